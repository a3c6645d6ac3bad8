"""Points for verified work: accounts and ledger of a validator, wallets, payments. No other room but `cli` uses it."""
