"""What a server pledges is in force when it pledges it, also after its clock was put right."""

from __future__ import annotations

from typing import Any, cast

import pytest

from petalnode.crypto.identity import Identity
from petalnode.node.server.lifecycle import pledging
from petalnode.node.server.lifecycle.pledging import Pledging
from petalnode.protocols.ids import Span

HOUR = 3_600_000
NOW = 1_800_000_000_000


class Hosted:
    model_version, span, dtype, quantisation = b"v" * 32, Span(0, 4), "float32", "none"


@pytest.mark.parametrize("wrong", [-30, -24, -6, 0, 6, 11, 24, 30])
def test_after_clock_was_wrong_pledge_is_in_force(monkeypatch: pytest.MonkeyPatch, wrong: int) -> None:
    """Clients refuse a server whose pledge begins in the future: one of a clock six hours ahead, for six hours."""
    moment = NOW + wrong * HOUR
    monkeypatch.setattr(pledging, "now_ms", lambda: moment)
    kept = Pledging(Identity.from_seed(b"s" * 32), cast(Any, Hosted()), 5)
    first = kept.current()
    moment = NOW
    assert kept.current().is_in_force(NOW) and kept.current().is_signed
    assert (kept.current() == first) == (wrong in (0, -6, -11))
