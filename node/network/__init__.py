"""A libp2p peer: its host, DHT, gossip and mDNS, with `transport` (connections) and `nat` (reachability) inside.
Knows no models and no servers. May use `errors`.
"""
