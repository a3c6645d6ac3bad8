"""Points for verified work: accounts and ledger of a validator, wallets, payments. No other room but `cli` uses it.

May use `validator` and the rooms before it.
"""
