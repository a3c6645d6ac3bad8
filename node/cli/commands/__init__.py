"""The commands of `petalnode`, a file each."""
