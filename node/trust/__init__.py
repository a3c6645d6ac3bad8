"""What a node makes of others: evidence of their faults, bans, reputation."""
