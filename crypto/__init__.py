"""What a node can prove: identity, canonical bytes and hashes, receipts. Knows no streams."""
