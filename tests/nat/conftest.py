from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.nat.lab import Lab, open_lab, why_no_delay, why_not
from tests.nat.nodes import LabNodes, lab_nodes


@pytest.fixture(autouse=True)
def networks() -> None:
    """All tests here need network namespaces."""
    if reason := why_not():
        pytest.skip(reason)


@pytest.fixture
def delays() -> None:
    """For tests whose lines have delays."""
    if reason := why_no_delay():
        pytest.skip(reason)


@pytest.fixture
def lab() -> Iterator[Lab]:
    with open_lab() as opened:
        yield opened


@pytest.fixture
def lab6() -> Iterator[Lab]:
    """A lab with IPv6 beside IPv4."""
    with open_lab(ipv6=True) as opened:
        yield opened


@pytest.fixture
def nodes(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LabNodes]:
    """Starts programs on the lab's machines; all have ended before the lab is dismantled."""
    for lab in ("lab", "lab6"):
        if lab in request.fixturenames:
            request.getfixturevalue(lab)
    with lab_nodes(tmp_path) as started:
        yield started
