"""The synchronous Python API: models that are used like those of transformers, over the client in a trio thread.

May use the rooms that `client` may use, and the rest of `client`. What is public stands in `petalnode/__init__.py`.
"""
