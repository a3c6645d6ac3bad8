from __future__ import annotations

from hypothesis import settings

# How fast this machine happens to be is no property of the code.
settings.register_profile("petalnode", deadline=None, max_examples=60)
settings.load_profile("petalnode")
