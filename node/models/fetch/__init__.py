"""Models from elsewhere: the hub, the package index, and the aliases that name what is there."""
