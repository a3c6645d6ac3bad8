"""Where adapters are shared: a folder, a git repository or the hub."""
