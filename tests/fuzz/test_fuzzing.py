"""A short run of every target: the same inputs each time. `make fuzz` runs many more, from another seed each time."""

from __future__ import annotations

import pytest

from tests.fuzz.harness import Target, run
from tests.fuzz.targets import all_targets

SEED = 20_261
TARGETS = all_targets()
SHARES = sum(target.share for target in TARGETS)
INPUTS = 6_000
"""Of all targets together."""


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_no_input_gets_past_its_handler(target: Target) -> None:
    report = run(target, SEED, range(max(40, INPUTS * target.share // SHARES)))
    assert not report.failures, "\n\n".join(f"input {failure.number}: {failure.what}" for failure in report.failures)
