"""Probes and audits of servers. May use `client`, `verification` and the rooms before them."""
