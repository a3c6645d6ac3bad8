"""Sessions: steps through a chain of servers that keep the attention caches.

The way of one step: `session` begins it, `pipeline` carries it from server to server beside those that are under way.
`step` asks one of them and takes its answer, `stream` sends and checks the receipt. `history` keeps the input for a
replay. When something fails, it does what `recovery` decides: `chain` opens and fills other servers, and `link` finds
the same one again. `compared_session` does all of that over several chains, which `comparing` chooses and judges.

May use the top of `client` and the rooms before it; nothing of `batch` and `api`.
"""
