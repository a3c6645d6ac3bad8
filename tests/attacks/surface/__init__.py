"""Whatever handles bytes of a stranger: who may send it, what bounds it, and which test sends the worst.

A *bound* names constants of petalnode, `node.swarm.view.MAX_RECORDS`, by which it can be looked up. `test_surface.py`
fails for one that is gone, for a test that is gone, and for a protocol, a message, a target of the fuzzing, a route or
a field that has no row here. `size` is in bytes, `time` is what bounds the time on the loop or at a thread (a rate, a
deadline, a number of pieces), `entries` what is kept or open at once. Parsers are also held to the 2 s of processor
time that an input may take at most in `tests/fuzz` (`LONGEST`), whatever the row says.
"""
