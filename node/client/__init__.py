"""The client of one model: sessions and batches over chains of servers.

`core` has the client, `server_selection` its choice of servers, `round_trips` how near they are. `request` is what
sessions and batches have in common, `router` what they need of the client.

May use `verification` and the rooms before it.
"""
