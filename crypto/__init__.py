"""What a node can prove: identity, canonical bytes and hashes, receipts. And JSON of strangers, within bounds.
Knows no streams.
"""
