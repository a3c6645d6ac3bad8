"""Planning: which machines should serve which blocks, and what to expect of it. Pure functions; numpy, no torch."""
