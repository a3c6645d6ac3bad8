"""Fine-tuning over the swarm: training loop, checkpoints, adapter folders, and repositories where adapters are shared.

May use `client` and the rooms before it.
"""
