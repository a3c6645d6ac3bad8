"""Which model a command takes that was given none."""

from __future__ import annotations

from petalnode.node.cli.model_choice import served_by
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span

OURS, THEIRS = b"o" * 32, b"t" * 32
MODELS = {OURS: ("ours", 4), THEIRS: ("theirs", 8)}


def server(peer_id: str, version: bytes) -> Announcement:
    name, blocks = MODELS[version]
    return Announcement(peer_id, version, name, blocks, Span(0, blocks), ServerState.ONLINE)


SERVERS = [server("a", OURS), server("b", OURS), server("c", THEIRS), server("d", THEIRS)]


def test_what_the_named_peers_serve_comes_first() -> None:
    assert served_by({"a"}, MODELS, SERVERS) == {OURS: ("ours", 4)}
    assert served_by({"a", "c"}, MODELS, SERVERS) == MODELS


def test_unnamed_or_unserving_plan_leaves_all_models() -> None:
    assert served_by(set(), MODELS, SERVERS) == MODELS
    assert served_by({"bootstrap"}, MODELS, SERVERS) == MODELS
    assert served_by({"a"}, {THEIRS: MODELS[THEIRS]}, SERVERS) == {THEIRS: ("theirs", 8)}
