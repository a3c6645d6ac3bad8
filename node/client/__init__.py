"""The client of one model: sessions and batches over chains of servers.

`core` has the client, `router` what its sessions and batches have of it, `server_selection` the choice of servers, and
`round_trips` how near these are. `request` is what sessions and batches have in common.

May use `verification` and the rooms before it.
"""
