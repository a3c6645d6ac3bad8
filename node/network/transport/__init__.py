"""Connections: dialing, Noise, Yamux, the private swarm's key, and the limits on bytes per second."""
