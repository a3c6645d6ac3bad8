"""Probes and audits of servers, and the recomputation of others' evidence.

May use `client`, `verification` and the rooms before them.
"""
