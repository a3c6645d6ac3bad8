"""The version of this software, as `--version` prints it and nodes tell it to each other."""

__version__ = "0.1.0"
