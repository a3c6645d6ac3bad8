"""Answers token by token: the loop over tokens, how a token is chosen, and drafts of those that may come next.

`conversation` keeps a session from answer to answer. `decoding` is the loop that chat, the API, `generate` and probes
share. `sampling` chooses a token. `draft_model` guesses tokens, and `drafting` decides how many are worth asking about.
`speculation` checks them in steps that are under way side by side.

May use the top of `client`, `session` and the rooms before it; nothing of `batch` and `api`.
"""
