"""A short run of every target: the same inputs each time. `make fuzz` runs many more, from another seed each time."""

from __future__ import annotations

import pytest

from tests.fuzz import connections, server
from tests.fuzz.harness import Target, grown, run
from tests.fuzz.targets import all_targets

SEED = 20_261
TARGETS = all_targets()
SHARES = sum(target.share for target in TARGETS)
INPUTS = 6_000
"""Of all targets together."""
STATEFUL = (*server.TARGETS, *connections.TARGETS)
WATCHED = 5
"""Inputs of each of them that are fed again and again."""
KEPT = 16 << 10
"""Bytes that each of them may leave behind: less than any frame, stream or connection with its buffers."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_input_gets_past_its_handler(target: Target) -> None:
    report = run(target, SEED, range(INPUTS * target.share // SHARES))
    assert not report.failures, "\n\n".join(f"input {failure.number}: {failure.what}" for failure in report.failures)


@pytest.mark.parametrize("target", STATEFUL, ids=lambda target: target.name)
def test_no_input_leaves_memory_behind_or_takes_much(target: Target) -> None:
    kept, above, number = grown(target, SEED, WATCHED)
    assert kept <= KEPT * WATCHED
    assert above <= 0, f"input {number} took {above:,} bytes more than it may"
