"""What a node knows of its peers' honesty: receipts, evidence of faults and its gossip, bans and reputation.

No module here needs torch or opens a connection. May use `errors` and `network` and no other room.
"""
