"""Answers token by token: the loop over tokens, how a token is chosen, and drafts of those that may come next.

`conversation` keeps a session from answer to answer, and `decoding` is the loop that chat, the API, `generate` and
probes have in common. `sampling` chooses a token. `draft_model` guesses tokens, `drafting` decides how many guesses are
worth asking about, and `speculation` checks them in steps that are under way side by side.

May use the top of `client`, `session` and the rooms before it; nothing of `batch` and `api`.
"""
