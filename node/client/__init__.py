"""The client of one model: sessions and batches over chains of servers.

May use `verification` and the rooms before it.
"""
