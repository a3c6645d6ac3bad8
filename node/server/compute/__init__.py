"""The thread that owns the device, what it computes next, and the budget of attention cache."""
