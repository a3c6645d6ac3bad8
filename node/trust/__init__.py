"""What a node keeps about other peers: receipts, evidence of faults, bans and reputation.

Needs no torch and no network. May use `errors`.
"""
