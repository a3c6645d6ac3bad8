"""Where models come from: aliases (wheels of the package index), the hub, GGUF files; each becomes a model folder.

`resolve` is the way in. May use the rest of `models`.
"""
