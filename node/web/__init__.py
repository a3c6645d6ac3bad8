"""The pages that `petalnode api` serves, the chat and the swarm, and the swarm as JSON.

`pages` sends the files in `static/` as they are, under a strict Content-Security-Policy; `swarm_report` says in pure
functions what the swarm looks like and what it lacks, `swarm_endpoint` gathers what they need. The files are plain
JavaScript modules without a build step: `tests/web` has the tests of those that need no browser, and `make web-check`
drives the pages in one.

May use `api` and the rooms before it, but not `server`.
"""
