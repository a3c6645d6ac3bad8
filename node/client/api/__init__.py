"""The synchronous Python API: models that feel like those of transformers."""
