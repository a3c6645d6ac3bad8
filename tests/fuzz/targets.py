"""All targets in one table: what strangers send to a node, and files that they hand to a person."""

from __future__ import annotations

from tests.fuzz import answers, api, clients, connections, files, parsers, peers, pictures, quantised, server, weights
from tests.fuzz.harness import Target


def all_targets() -> tuple[Target, ...]:
    """Each with a name of its own."""
    return tuple(
        target
        for room in (parsers, api, pictures, answers, files, quantised, peers, server, clients, connections, weights)
        for target in room.TARGETS
    )
