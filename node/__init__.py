"""What a node does: join the swarm, hold blocks, serve sessions, be a client, be a command."""
