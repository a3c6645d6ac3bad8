"""How other peers reach this node: observed addresses, AutoNAT, UPnP, relays and hole punching."""
