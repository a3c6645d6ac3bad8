"""Adapters on disk: the folder as peft writes it, and the note that says what it was made for."""
