"""`petalnode api`: the HTTP interfaces that people's programs already speak, over the client of a swarm.

`http_server` carries HTTP over trio and ends what nobody waits for any more; `app` has the routes, keys and limits, and
is where pages are mounted; `core` answers requests, each in a session of its own; the other files say what OpenAI's
endpoints take and give.

May use `credits` and the rooms before it, but not `server`.
"""
