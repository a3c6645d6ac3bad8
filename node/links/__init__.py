"""Links into a swarm: their bytes, what a person means by them, and making them of peers that answer.
May use `swarm` and the rooms before it.
"""
