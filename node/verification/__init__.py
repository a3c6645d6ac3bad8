"""Recomputation of what servers answered, and the judgement within calibrated tolerances.
May use `blocks`, `trust` and the rooms before them.
"""
