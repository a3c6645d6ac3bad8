"""The computation of a span of transformer blocks, and of the client's part of a model. May use `models`."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def collector_paused() -> Iterator[None]:
    """For the imports of torch and transformers, and the loading of a model.

    They make a million objects that live as long as the process; looking through them again and again takes a
    fifth of the time of the imports. Afterwards they are exempt from all later collections (`gc.freeze`), which would
    hold up a decode step now and then.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
