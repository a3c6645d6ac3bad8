"""Models that also take pictures: what encodes these for the first block, and their language part alone."""
