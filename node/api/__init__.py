"""`petalnode api`: the HTTP interfaces that people's programs already speak, over the client of a swarm.

`app` has the routes, and is where pages are mounted; `http` carries HTTP over trio and lets requests in; `engine`
answers requests, each choice in a session of its own, whatever endpoint asks; `openai`, `anthropic` and `ollama` say
what the endpoints of each take and give, with `parts` that they share, `batches` keeps files and batches. All of them
use `errors` and `fields`; these four do not use each other, but `http`, which uses `engine`.

May use `credits` and the rooms before it, but not `server`.
"""
