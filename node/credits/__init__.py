"""Points for verified work: a validator's accounts and ledger, a peer's wallet, and the server's payment verifier.

Only `cli` uses this room: clients and servers get them by injection. May use `validator` and the rooms
before it.
"""
