"""Encodings of keys."""
