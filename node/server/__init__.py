"""A server of blocks. May use `placement` and the rooms before it, but not `client`."""
