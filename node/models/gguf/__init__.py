"""GGUF files: their header, and an ordinary model folder made from one."""
