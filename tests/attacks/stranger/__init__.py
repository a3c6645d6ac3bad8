"""A stranger on the network: keys at several addresses, and what they can do to a node that they reach.

`keys.py` has the keys and their connections; each other file has attacks on one kind of protocols, and `catalogue.py`
all of them by name. An attack is a coroutine of one key against one victim that goes on until it is cancelled. It is
written with the product's own framing, so that what is wrong in it is wrong on purpose. `benchmarks/under_attack.py`
runs them against processes, `test_stranger.py` against nodes in one process.
"""
