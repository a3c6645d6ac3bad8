"""A node in its swarm: the directory of servers, discovery, and routes over the servers it knows.
May use `network`, `trust` and the rooms before them.
"""
