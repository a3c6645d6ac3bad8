"""The server's side of `/petalnode/inference/1` and `/petalnode/push/1`."""
