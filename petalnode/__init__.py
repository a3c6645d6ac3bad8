"""petalnode: run language models over a swarm of ordinary machines, peer to peer."""

__version__ = "0.1.0"
