"""A server from start to stop: memory, model source, choice of blocks, announcement, draining."""
