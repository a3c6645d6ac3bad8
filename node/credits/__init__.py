"""Points for verified work: a validator's accounts and ledger, the owner's wallet, and the server's payment verifier.

May use every room but `cli`, and only `cli` uses it: clients and servers get a wallet or verifier by injection.
"""
