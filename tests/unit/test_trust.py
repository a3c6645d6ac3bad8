"""Reputation, bans and the store that keeps them."""

from __future__ import annotations

import sqlite3
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from petalnode.crypto.identity import Identity
from petalnode.node.errors import MachineError
from petalnode.node.trust import store as store_module
from petalnode.node.trust.evidence_message import Endorsement, TrustedValidators, parse_trusted
from petalnode.node.trust.reputation import (
    REPUTATION,
    Ban,
    ServiceRecord,
    extended,
    newcomer,
    penalty_seconds,
    reputation,
)
from petalnode.node.trust.store import STORE, Database, TrustStore, trust_file
from tests.swarm.processes import environment, petalnode

pytestmark = pytest.mark.virtual_time

NOW = 1_700_000_000.0
KEYS = [Identity.from_seed(bytes([number]) * 32) for number in range(1, 6)]


# --- reputation


def test_new_key_starts_low_and_grows() -> None:
    record = newcomer(NOW)
    assert reputation(None, NOW) == reputation(record, NOW) == 0
    grown = record.after_tokens(round(REPUTATION.newcomer_tokens), NOW, recomputed=True)
    assert reputation(grown, NOW) == pytest.approx(0.5)
    assert reputation(record.after_tokens(round(REPUTATION.newcomer_tokens), NOW, recomputed=False), NOW) < 0.02


def test_reputation_decays_and_a_fault_takes_it() -> None:
    record = newcomer(NOW).after_tokens(1_000_000, NOW, recomputed=True)
    assert reputation(record, NOW + 20 * REPUTATION.half_life) < 0.01
    fallen = record.after_fault(NOW)
    assert reputation(fallen, NOW) == 0
    again = fallen.after_tokens(1_000_000, NOW, recomputed=True)
    assert reputation(again, NOW) < 0.11
    later = NOW + 5 * REPUTATION.half_life
    assert reputation(again.at(later).after_tokens(1_000_000, later, recomputed=True), later) > 0.9


@given(st.integers(0, 10**9), st.floats(0, 20), st.floats(0, 1e8))
def test_reputation_and_penalty_stay_within_bounds(tokens: int, faults: float, later: float) -> None:
    record = ServiceRecord(NOW, NOW, float(tokens), faults)
    assert 0 <= reputation(record, NOW + later) <= 1
    assert 0 <= penalty_seconds(record, NOW + later) <= 600 + REPUTATION.newcomer_seconds
    more = record.after_tokens(1000, NOW + later, recomputed=True)
    assert reputation(more, NOW + later) >= reputation(record, NOW + later)
    assert penalty_seconds(more, NOW + later) <= penalty_seconds(record, NOW + later)


def test_route_hardly_avoids_newcomer_and_much_cheat() -> None:
    known = newcomer(NOW).after_tokens(10**9, NOW, recomputed=True)
    assert penalty_seconds(known, NOW) < 1e-5 < penalty_seconds(None, NOW) == REPUTATION.newcomer_seconds
    assert penalty_seconds(known.after_fault(NOW), NOW) > 30


# --- bans


def test_bans_grow_expire_and_never_shrink() -> None:
    first = extended(None, "peer", "lied", "own", NOW)
    assert first.until == NOW + REPUTATION.cheated_seconds and first.holds(NOW) and not first.holds(first.until)
    second = extended(first, "peer", "lied", "own", NOW)
    assert second.until == NOW + 2 * REPUTATION.cheated_seconds and second.count == 2
    proven = extended(second, "peer", "proven", "evidence", NOW)
    assert proven.until == NOW + REPUTATION.proven_seconds
    assert extended(proven, "peer", "lied", "own", NOW).until == proven.until
    flipped = extended(None, "peer", "a bit", "one bit", NOW)
    assert flipped.until == NOW + REPUTATION.one_bit_seconds < first.until
    assert extended(flipped, "peer", "a bit", "one bit", NOW).until == proven.until
    long = first
    for _ in range(100):
        long = extended(long, "peer", "lied", "own", NOW)
    assert long.until <= NOW + REPUTATION.longest_seconds


def endorsements(*validators: Identity) -> list[Endorsement]:
    return [Endorsement.made(validator, b"e" * 32, "accused", 5) for validator in validators]


def test_validators_of_different_owners_have_to_agree() -> None:
    trusted = TrustedValidators({KEYS[0].peer_id: "ann", KEYS[1].peer_id: "ann", KEYS[2].peer_id: "ben"}, quorum=2)
    assert not trusted.convinced_by(endorsements(KEYS[0]))
    assert not trusted.convinced_by(endorsements(KEYS[0], KEYS[1], KEYS[0]))
    assert not trusted.convinced_by(endorsements(KEYS[0], KEYS[3], KEYS[4]))
    assert trusted.convinced_by(endorsements(KEYS[1], KEYS[2]))
    assert not TrustedValidators({}, quorum=0).convinced_by(endorsements(*KEYS))


def test_an_endorsement_is_signed() -> None:
    (good,) = endorsements(KEYS[0])
    assert good.is_signed
    for changed in ({"validator": KEYS[1].peer_id}, {"evidence_id": b"x" * 32}, {"accused": "other"}, {"time_ms": 6}):
        assert not replace(good, **changed).is_signed  # type: ignore[arg-type]


def test_a_trusted_validator_is_named_with_its_owner() -> None:
    peer = KEYS[0].peer_id
    assert parse_trusted(peer) == (peer, peer) and parse_trusted(f"{peer}=ann") == (peer, "ann")
    with pytest.raises(ValueError, match="peer id"):
        parse_trusted("nobody")


# --- the store


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def __call__(self) -> float:
        return self.now


def test_a_book_outlives_its_process(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "data" / "trust.sqlite"
    store = TrustStore(file, clock=clock)
    store.note_tokens("good", 10_000, recomputed=True)
    store.ban("bad", "it lied", "own")
    store.save()
    again = TrustStore(file, clock=clock)
    again.load()
    ban = again.ban_of("bad")
    assert ban is not None and ban.reason == "it lied" and ban.source == "own"
    assert again.reputation("good") == pytest.approx(0.5) and again.reputation("bad") == 0
    assert [ban.peer_id for ban in again.bans()] == ["bad"]
    clock.now += REPUTATION.cheated_seconds
    assert not again.is_banned("bad") and again.penalty_seconds("bad") > 30
    third = TrustStore(file, clock=clock)
    third.load()
    assert third.bans() == []


def test_a_ban_can_be_lifted(tmp_path: Path) -> None:
    file = tmp_path / "trust.sqlite"
    store = TrustStore(file)
    store.ban("bad", "it lied", "own")
    store.save()
    assert store.forgive("bad") and not store.forgive("bad")
    again = TrustStore(file)
    again.load()
    assert again.bans() == [] and again.penalty_seconds("bad") == REPUTATION.newcomer_seconds


def test_new_key_is_newcomer_whatever_old_one_was() -> None:
    store = TrustStore()
    store.note_tokens("old", 10**6, recomputed=True)
    store.ban("old", "it lied", "evidence")
    assert store.is_banned("old") and not store.is_banned("new")
    assert store.reputation("new") == 0 and store.penalty_seconds("new") == REPUTATION.newcomer_seconds


def test_used_versions_outlive_the_process_bounded(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "trust.sqlite"
    one, other = TrustStore(file, clock=clock), TrustStore(file, clock=clock)
    for number in range(store_module.STORE.max_versions):
        one.note_version(number.to_bytes(32, "big"), b"1")
    one.save()
    clock.now += 1
    other.note_version(bytes(32), b"2")
    other.note_version(b"new", b"3")
    other.save()
    again = TrustStore(file, clock=clock)
    again.load()
    assert again.version_used(bytes(32)) == b"2" and again.version_used(b"new") == b"3"
    assert again.version_used(b"never") is None
    kept = sqlite3.connect(file).execute("SELECT count(*) FROM versions").fetchall()
    assert kept == [(store_module.STORE.max_versions,)]


def test_two_processes_share_book_and_longer_ban_stays(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "trust.sqlite"
    one, other = TrustStore(file, clock=clock), TrustStore(file, clock=clock)
    one.ban("bad", "proven", "evidence")
    one.save()
    other.ban("bad", "lied", "own")
    other.ban("worse", "lied", "own")
    other.save()
    one.save()
    assert one.is_banned("worse")
    for store in (one, other):
        ban = store.ban_of("bad")
        assert ban is not None and ban.until == NOW + REPUTATION.proven_seconds


def test_threads_books_lose_no_bans(tmp_path: Path) -> None:
    file = tmp_path / "trust.sqlite"

    def write(number: int) -> None:
        store = TrustStore(file)
        for turn in range(5):
            store.ban(f"peer {number} {turn}", "lied", "own")
            store.save()

    threads = [threading.Thread(target=write, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    store = TrustStore(file)
    store.load()
    assert len(store.bans()) == 20


def test_a_store_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of bans those that end first give way, of reputations those of which nothing was heard for longest."""
    monkeypatch.setattr(store_module, "REPUTATION", replace(store_module.REPUTATION, max_bans=3))
    monkeypatch.setattr(store_module, "STORE", replace(store_module.STORE, max_records=20))
    clock = Clock()
    store = TrustStore(clock=clock)
    store.ban("long", "proven", "evidence")
    for number in range(4):
        clock.now += 1
        store.ban(f"{number}", "lied", "own")
    assert [ban.peer_id for ban in store.bans()] == ["long", "3", "2"]
    store = TrustStore(clock=clock)
    for number in range(21):
        clock.now += 1
        store.note_tokens(f"{number}", 10_000, recomputed=True)
    known = [number for number in range(21) if store.reputation(f"{number}")]
    assert known == list(range(2, 21))


def test_other_processs_writes_are_read_when_writing(tmp_path: Path) -> None:
    clock, file = Clock(), tmp_path / "trust.sqlite"
    one, other = TrustStore(file, clock=clock), TrustStore(file, clock=clock)
    one.note_tokens("both", 100, recomputed=True)
    one.note_tokens("its own", 5000, recomputed=True)
    other.note_tokens("both", 10_000, recomputed=True)
    one.save()
    other.load()
    assert other.reputation("both") == pytest.approx(0.5)  # its own, which is not written yet
    assert other.reputation("its own") == pytest.approx(1 / 3)
    other.save()
    one.save()
    assert one.reputation("both") == pytest.approx(0.5)
    other.ban("bad", "first", "own")
    other.ban("bad", "second", "own")
    other.save()
    one.ban("bad", "once", "own")
    one.save()
    third = TrustStore(file, clock=clock)
    third.load()
    ban = third.ban_of("bad")
    assert ban is not None and ban.count == 2 and ban.until == NOW + 2 * REPUTATION.cheated_seconds
    clock.now += 3 * REPUTATION.cheated_seconds
    one.save()
    rows = sqlite3.connect(file).execute("SELECT count(*) FROM bans").fetchall()
    assert rows == [(0,)]  # those that are over are deleted


def test_what_was_forgiven_is_not_written_again(tmp_path: Path) -> None:
    file = tmp_path / "trust.sqlite"
    store = TrustStore(file)
    store.ban("bad", "it lied", "own")
    assert store.forgive("bad")
    store.save()
    again = TrustStore(file)
    again.load()
    assert again.bans() == [] and again.penalty_seconds("bad") == REPUTATION.newcomer_seconds
    store.save()  # nothing


async def test_store_is_read_at_once_and_written_rarely(tmp_path: Path) -> None:
    file = tmp_path / "trust.sqlite"
    earlier = TrustStore(file)
    earlier.ban("known", "it lied", "own")
    earlier.save()

    def written() -> set[str]:
        store = TrustStore(file)
        store.load()
        return {ban.peer_id for ban in store.bans()}

    store = TrustStore(file)
    async with store.kept():
        assert store.is_banned("known")
        store.ban("first", "it lied", "own")
        assert written() == {"known"}
        await trio.sleep(STORE.save_interval + 1)
        assert written() == {"known", "first"}
        store.ban("second", "it lied", "own")
    assert written() == {"known", "first", "second"}


def test_bans_reason_is_cut_and_longer_stays() -> None:
    long = extended(None, "peer", "x" * 1000, "evidence", NOW)
    assert long.reason == "x" * 500
    assert extended(long, "peer", "lied", "own", NOW) == replace(long, count=2)


def test_a_record_never_grows_younger() -> None:
    record = newcomer(NOW).after_tokens(100, NOW, recomputed=True)
    assert record.at(NOW - 1000) == record and record.first_seen == NOW
    later = record.after_fault(NOW + REPUTATION.half_life)
    assert (later.tokens, later.faults, later.updated) == (0.0, 1.0, NOW + REPUTATION.half_life)
    assert later.after_tokens(200, NOW + 2 * REPUTATION.half_life, recomputed=False).tokens == 2.0
    assert later.at(NOW + 2 * REPUTATION.half_life).faults == 0.5
    assert penalty_seconds(later, NOW + REPUTATION.half_life) == pytest.approx(60 + REPUTATION.newcomer_seconds)
    many = replace(later, faults=50.0)
    assert penalty_seconds(many, NOW + REPUTATION.half_life) == pytest.approx(600 + REPUTATION.newcomer_seconds)
    assert penalty_seconds(replace(later, faults=0.05), NOW + REPUTATION.half_life) == REPUTATION.newcomer_seconds


def test_unusable_database_is_told_with_advice(tmp_path: Path) -> None:
    class Notes(Database):
        NAME = "notes"

        def version(self) -> int:
            return int(self._database.execute("PRAGMA user_version").fetchone()[0])

    file = tmp_path / "notes.sqlite"
    with Notes(file, "CREATE TABLE t (x INTEGER)", ["user_version = 7"]) as notes:
        assert notes.version() == 7
    with pytest.raises(sqlite3.ProgrammingError):
        notes.version()  # it is closed
    file.write_bytes(b"no database" * 100)
    with pytest.raises(MachineError, match=r"the validator's notes .*notes.sqlite cannot be used .*move the file away"):
        Notes(file, "CREATE TABLE t (x INTEGER)")
    with pytest.raises(MachineError, match="cannot be used"):
        Notes(file / "below", "")


def test_a_ban_says_why() -> None:
    assert Ban("x", NOW, "why", "own").holds(NOW - 1)


def test_the_command_lists_bans_and_lifts_them(tmp_path: Path) -> None:
    env = environment(tmp_path)
    store = TrustStore(trust_file(tmp_path / "data" / "petalnode"))
    store.ban("12D3bad", "it lied", "own")
    store.ban("12D3worse", "it lied more", "evidence")
    store.save()
    done = petalnode("bans", "--json", "--forgive", "12D3bad", env=env)
    assert done.code == 0, done
    (told,) = done.objects
    assert told["peer_id"] == "12D3worse" and told["reason"] == "it lied more" and told["seconds_left"] > 600_000
    done = petalnode("bans", "--forgive", "12D3bad", env=env)
    assert done.code == 1 and "was not banned" in done.err and "12D3worse" in done.out


def test_reputations_in_the_file_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "STORE", replace(store_module.STORE, max_records=20))
    clock, file = Clock(), tmp_path / "trust.sqlite"
    store = TrustStore(file, clock=clock)
    for number in range(50):
        clock.now += 1
        store.note_tokens(f"{number}", 10_000, recomputed=True)
        store.save()
    (kept,) = sqlite3.connect(file).execute("SELECT group_concat(peer_id) FROM standings").fetchone()
    assert set(kept.split(",")) == set(map(str, range(30, 50)))


def test_bans_are_told_while_others_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read in another thread, which may have its turn anywhere."""
    store = TrustStore()
    for number in range(3):
        store.ban(f"{number}", "lied", "own")
    holds = Ban.holds

    def read_meanwhile(ban: Ban, now: float) -> bool:
        store.ban(f"read with {ban.peer_id}", "lied", "own")
        return holds(ban, now)

    monkeypatch.setattr(Ban, "holds", read_meanwhile)
    assert {ban.peer_id for ban in store.bans()} == {"0", "1", "2"}
