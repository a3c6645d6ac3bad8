"""Commands that plan: which model fits on which machines, and who serves which blocks."""
