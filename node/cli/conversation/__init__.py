"""A conversation at a terminal: typing questions, showing answers, /commands, and what is kept. Used by `cli` only."""
