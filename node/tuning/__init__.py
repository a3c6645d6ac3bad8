"""Fine-tuning over the swarm. May use `client` and the rooms before it."""
