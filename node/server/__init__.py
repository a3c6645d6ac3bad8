"""A server of a span of blocks: its `lifecycle`, the `requests` that it answers, the thread that computes them.

May use `placement` and the rooms before it.
"""
