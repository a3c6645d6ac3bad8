from __future__ import annotations

import os
import signal

from hypothesis import settings

# How fast this machine happens to be is no property of the code.
settings.register_profile("petalnode", deadline=None, max_examples=60)
settings.load_profile("petalnode")

# Before torch is imported. Of tiny models, threads of torch mostly wait for each other, on cores that other tests want.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that starts us in the background has Ctrl-C ignored, by us and by every process that we start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
