from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from petalnode.crypto.identity import Identity
from petalnode.node.swarm import peer_file
from petalnode.node.swarm.peer_file import PEER_FILE, PeerRecord, PeerStore, in_order, peer_store_file, updated

NOW = 1_800_000_000.0
DAY = 86400.0
A, B, C = (Identity.from_seed(bytes([n]) * 32).peer_id for n in (1, 2, 3))
HERE, THERE = "/ip4/11.1.1.1/tcp/1", "/ip4/11.2.2.2/tcp/2"


def test_the_address_that_worked_comes_first() -> None:
    known = updated((), {A: [HERE]}, (), NOW)
    assert known == (PeerRecord(A, (HERE,), NOW),)
    assert updated(known, {A: [THERE]}, (), NOW + 1) == (PeerRecord(A, (THERE, HERE), NOW + 1),)


def test_a_peer_without_an_address_is_not_remembered() -> None:
    assert updated((), {A: []}, (), NOW) == ()


def test_there_is_room_for_some() -> None:
    peers = {Identity.generate().peer_id: [f"/ip4/11.0.0.1/tcp/{port}" for port in range(1, 20)] for _ in range(70)}
    known = updated((), peers, (), NOW)
    assert len(known) == PEER_FILE.max_peers and all(len(record.addrs) == PEER_FILE.max_addrs for record in known)
    assert updated(known, {A: [HERE]}, (), NOW + 1)[0].peer_id == A


def test_who_fails_for_days_is_forgotten() -> None:
    known = updated((), {A: [HERE], B: [THERE]}, (), NOW)
    known = updated(known, {B: [THERE]}, [A], NOW + DAY)
    assert {record.peer_id: record.failing for record in known} == {A: NOW + DAY, B: 0}
    known = updated(known, {B: [THERE]}, [A], NOW + 2 * DAY)
    assert {record.peer_id: record.failing for record in known} == {A: NOW + DAY, B: 0}
    assert [record.peer_id for record in in_order(known)] == [B, A]
    assert [record.peer_id for record in updated(known, {B: [THERE]}, [A], NOW + 5 * DAY)] == [B]


def test_who_comes_back_is_trusted_again() -> None:
    known = updated(updated((), {A: [HERE]}, (), NOW), {B: [HERE]}, [A], NOW + DAY)
    known = updated(known, {A: [HERE]}, (), NOW + 2 * DAY)
    assert in_order(known)[0] == PeerRecord(A, (HERE,), NOW + 2 * DAY)


def test_who_was_not_met_for_months_is_forgotten() -> None:
    known = updated((), {A: [HERE]}, (), NOW)
    assert updated(known, {}, (), NOW + 61 * DAY) == ()


def test_each_swarm_has_its_file(tmp_path: Path) -> None:
    files = {peer_store_file(tmp_path, psk) for psk in (None, "00" * 32, "01" * 32)}
    assert len(files) == 3
    assert peer_store_file(tmp_path, "ab" * 32) == peer_store_file(tmp_path, "AB" * 32)
    assert "ab" * 4 not in peer_store_file(tmp_path, "ab" * 32).name


def test_what_is_written_is_read(tmp_path: Path) -> None:
    memory = PeerStore(tmp_path / "not yet" / "public.json")
    assert memory.load() == ()
    memory.update({A: [HERE], B: [THERE]}, (), NOW)
    memory.update({C: [HERE]}, [A], NOW + 1)
    assert [(record.peer_id, record.failing) for record in memory.load()] == [(C, 0), *sorted([(A, NOW + 1), (B, 0)])]
    assert (tmp_path / "not yet" / "public.json").stat().st_mode & 0o777 == 0o600


def test_several_write_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        peer_file, "PEER_FILE", replace(peer_file.PEER_FILE, lock_patience=300.0)
    )  # however slow the disk is
    peers = [Identity.generate().peer_id for _ in range(24)]
    path = tmp_path / "public.json"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda peer: PeerStore(path).update({peer: [HERE]}, (), NOW), peers))
    assert {record.peer_id for record in PeerStore(path).load()} == set(peers)
    assert not [file for file in tmp_path.iterdir() if file.name.startswith(".")]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"peers": 7}',
        '{"peers": [7, null, {}]}',
        json.dumps({"peers": [{"peer_id": "x", "addrs": [HERE], "seen": 1, "failing": 0}]}),
        json.dumps({"peers": [{"peer_id": A, "addrs": [7], "seen": 1, "failing": 0}]}),
        json.dumps({"peers": [{"peer_id": A, "addrs": [HERE], "seen": "long ago", "failing": 0}]}),
        "[" * 100_000,
    ],
)
def test_a_damaged_file_is_an_empty_one(text: str, tmp_path: Path) -> None:
    path = tmp_path / "public.json"
    path.write_text(text)
    memory = PeerStore(path)
    assert memory.load() == ()
    memory.update({A: [HERE]}, (), NOW)
    assert len(memory.load()) == 1


def test_unwritable_place_is_no_failure(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    memory = PeerStore(tmp_path / "file" / "public.json")
    memory.update({A: [HERE]}, (), NOW)
    assert memory.load() == ()


def test_named_peers_through_which_others_came_are_remembered() -> None:
    known = updated((), {A: [HERE]}, (), NOW, ["x"])
    assert known == (PeerRecord(A, (HERE,), NOW, named=("x",)),)
    known = updated(known, {A: [HERE]}, (), NOW + 1, ["y", "x"])
    assert known[0].named == ("y", "x")
    assert updated(known, {A: [HERE]}, (), NOW + 2)[0].named == ("y", "x")
    many = updated(known, {A: [HERE]}, (), NOW + 3, [f"z{n}" for n in range(20)])
    assert len(many[0].named) == 8
