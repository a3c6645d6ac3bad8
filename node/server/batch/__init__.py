"""The server's side of `/petalnode/forward/1` and `/petalnode/backward/1`."""
