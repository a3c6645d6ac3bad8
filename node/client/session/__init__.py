"""Sessions: steps through a chain of servers that keep the attention caches.

The way of one step: `session` cuts it into chunks and runs them, `step` takes one through the servers as `recovery`
decides, `stream` sends it to one server and checks the answer and its receipt, `history` keeps it for a replay. A
`flight` is several steps under way at once. When
something fails, `chain` opens and fills other servers, and `reconnector` finds the same one again. `compared_session`
does all of that over several chains, which `comparing` chooses and judges.

May use the top of `client` and the rooms before it; nothing of `batch` and `api`.
"""
