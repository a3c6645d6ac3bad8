"""Recomputation of what servers answered, and its judgement within calibrated tolerances.

May use `blocks`, `trust` and the rooms before them.
"""
