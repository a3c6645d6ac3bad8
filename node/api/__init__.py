"""`petalnode api`: the HTTP interfaces that people's programs already speak, over the client of a swarm.

`app` has the routes, and is where pages are mounted. `http` carries HTTP over trio and lets requests in. `engine`
answers requests, each choice in a session of its own, whatever endpoint asks. `openai` says what its endpoints take and
give. `anthropic` and `ollama` translate into that and back, with `parts` that they share. `batches` keeps files and
batches. All of them use `errors` and `fields`; `http` uses `engine`, and they use `http`.

May use `credits` and the rooms before it, but not `server`.
"""
