from __future__ import annotations

import signal

from hypothesis import settings

# How fast this machine happens to be is no property of the code.
settings.register_profile("petalnode", deadline=None, max_examples=60)
settings.load_profile("petalnode")

# A shell that starts us in the background has Ctrl-C ignored, by us and by every process that we start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
