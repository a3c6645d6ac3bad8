"""GGUF files as they are: the header, the configuration that it tells, and the weights by transformers' names.

Nothing here imports torch or transformers at start-up. May use the rest of `models`.
"""
