"""Which server should hold which blocks: pure decisions from what the swarm announces. May use `models`,
`network` and `swarm`."""
