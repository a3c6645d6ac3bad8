"""Kernels of our own for a few rows on CPUs: weights multiplied in the form in which they are held, and a decode step
of all blocks in one call. Used where they agree with torch and are quicker. May use `quantisation` beside it.
"""
