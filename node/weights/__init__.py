"""Weights from peers: whoever holds parts of a model version hands them on, and others fetch what they need.

`holder` answers, `remote_model` finds a model that only the swarm has, and `fetching` brings its parts from several
peers at once. `plan` says which piece is asked of whom. `store` keeps them on this disk, `on_demand` for as long as
they are recomputed. May use `errors`, `models`, `network`, `trust` and `swarm`.
"""
