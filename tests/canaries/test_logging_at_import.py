"""py-libp2p: importing it sets the level of the logger `libp2p`, whatever the program had set."""

from __future__ import annotations

import inspect
import logging

import libp2p
from libp2p.utils.logging import setup_logging

CURED = "py-libp2p has cured it: docs/decisions/yamux-and-noise.md says what can be thrown away"


def test_the_import_resets_the_loggers_level() -> None:
    logger = logging.getLogger("libp2p")
    level, propagate, handlers = logger.level, logger.propagate, logger.handlers[:]
    try:
        logger.setLevel(logging.CRITICAL)
        setup_logging()
        assert logger.level == logging.WARNING, CURED
    finally:
        logger.setLevel(level)
        logger.propagate = propagate
        logger.handlers[:] = handlers
    assert "\nsetup_logging()\n" in inspect.getsource(libp2p), CURED
