"""A validator's accounts: no point comes from nothing, none is spent twice, and a killed process changes neither."""

from __future__ import annotations

import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from petalnode.crypto.credits import CreditQuery, DepositOrder, Transfer, is_voucher
from petalnode.crypto.identity import Identity
from petalnode.node.credits import ledger as ledger_module
from petalnode.node.credits.ledger import LEDGER, Account, Ledger, NotCleared, earned
from petalnode.node.errors import MachineError
from petalnode.protocols.credits import CREDITS_LIMITS
from tests.import_graph import ROOT
from tests.swarm import warm_python
from tests.unit.transfers import ISSUER, PEERS, START, A, B, transfer


class Clock:
    """Milliseconds, which pass when told."""

    now = START

    def __call__(self) -> int:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def ledger(tmp_path: Path, clock: Clock) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite", ISSUER, clock) as opened:
        yield opened


def order(server: Identity, points: int, sequence: int, until_ms: int = START + 60_000) -> DepositOrder:
    return DepositOrder(ISSUER.peer_id, server.peer_id, points, until_ms, sequence).signed(server)


def points(ledger: Ledger, peer: Identity) -> int:
    return ledger.credit_of(peer.peer_id).points


def test_work_is_paid_and_points_are_handed_on(ledger: Ledger) -> None:
    assert points(ledger, A) == 0
    assert ledger.issue(A.peer_id, 100)
    clearing = ledger.clear(transfer(A, B.peer_id, 30, 1))
    assert clearing.is_signed and clearing.transfer.issuer == ISSUER.peer_id
    assert (points(ledger, A), points(ledger, B)) == (70, 30)
    credit = ledger.credit_of(A.peer_id)
    assert credit.is_signed and credit.sequence == 1
    assert ledger.totals() == (100, 100, 0)


def test_the_same_transfer_again_is_the_same_clearing(ledger: Ledger, clock: Clock) -> None:
    ledger.issue(A.peer_id, 100)
    first = ledger.clear(transfer(A, B.peer_id, 30, 1))
    clock.now += 1_000
    assert ledger.clear(transfer(A, B.peer_id, 30, 1)) == first
    assert points(ledger, B) == 30


def test_nothing_is_spent_twice(ledger: Ledger) -> None:
    ledger.issue(A.peer_id, 100)
    ledger.clear(transfer(A, B.peer_id, 60, 5))
    for again in (transfer(A, PEERS[2].peer_id, 10, 5), transfer(A, B.peer_id, 10, 5), transfer(A, B.peer_id, 10, 4)):
        with pytest.raises(NotCleared, match="each is carried out once"):
            ledger.clear(again)
    with pytest.raises(NotCleared, match="60 points are wanted, 40 are there"):
        ledger.clear(transfer(A, B.peer_id, 60, 6))
    assert (points(ledger, A), points(ledger, B)) == (40, 60)


BAD_TRANSFERS = {
    "is not signed": Transfer(ISSUER.peer_id, A.peer_id, B.peer_id, 5, 1, START + 1, b"x" * 64),
    "are one": transfer(A, A.peer_id, 5, 1),
    "0 is no number": transfer(A, B.peer_id, 0, 1),
    "-5 is no number": transfer(A, B.peer_id, -5, 1),
    "too old": transfer(A, B.peer_id, 5, 1, START - CREDITS_LIMITS.skew_ms - 1),
    "may be valid": transfer(A, B.peer_id, 5, 1, START + LEDGER.max_order_ms + CREDITS_LIMITS.skew_ms + 1),
    "not of this validator": transfer(A, B.peer_id, 5, 1, issuer=B.peer_id),
    "not the next one": transfer(A, B.peer_id, 5, 1 << 60),
}


@pytest.mark.parametrize("why", BAD_TRANSFERS)
def test_bad_transfers_change_nothing(ledger: Ledger, why: str) -> None:
    ledger.issue(A.peer_id, 100)
    with pytest.raises(NotCleared, match=why):
        ledger.clear(BAD_TRANSFERS[why])
    assert (points(ledger, A), points(ledger, B), ledger.credit_of(A.peer_id).sequence) == (100, 0, 0)


def test_only_the_holder_is_told(ledger: Ledger, clock: Clock) -> None:
    ledger.issue(A.peer_id, 7)
    assert ledger.credit(CreditQuery(ISSUER.peer_id, A.peer_id, START).signed(A)).points == 7
    with pytest.raises(NotCleared, match="not signed"):
        ledger.credit(CreditQuery(ISSUER.peer_id, A.peer_id, START, bytes(64)))
    clock.now += CREDITS_LIMITS.skew_ms + 1
    with pytest.raises(NotCleared, match="another time"):
        ledger.credit(CreditQuery(ISSUER.peer_id, A.peer_id, START).signed(A))


def test_a_deposit_is_kept_and_comes_back(ledger: Ledger, clock: Clock) -> None:
    ledger.issue(A.peer_id, 100)
    until = START + 60_000
    voucher = ledger.deposit(order(A, 80, 1, until))
    assert is_voucher(ISSUER.peer_id, A.peer_id, 80, until, voucher)
    credit = ledger.credit_of(A.peer_id)
    assert (credit.points, credit.deposit, credit.deposit_until_ms) == (20, 80, until)
    with pytest.raises(NotCleared, match="20 are there"):
        ledger.clear(transfer(A, B.peer_id, 21, 2))
    clock.now = until + LEDGER.grace_ms
    assert points(ledger, A) == 20
    clock.now += 1
    assert points(ledger, A) == 100


def test_deposit_never_shrinks_under_a_voucher(ledger: Ledger, clock: Clock) -> None:
    ledger.issue(A.peer_id, 100)
    ledger.deposit(order(A, 80, 1, START + 60_000))
    ledger.deposit(order(A, 10, 2, START + 30_000))
    credit = ledger.credit_of(A.peer_id)
    assert (credit.points, credit.deposit, credit.deposit_until_ms) == (20, 80, START + 60_000)
    ledger.deposit(order(A, 100, 3, START + 90_000))
    credit = ledger.credit_of(A.peer_id)
    assert (credit.points, credit.deposit, credit.deposit_until_ms) == (0, 100, START + 90_000)
    for bad in (
        order(A, 101, 4),
        order(A, 5, 3),
        order(A, 5, 4, START),
        order(A, 5, 4, START + LEDGER.max_deposit_ms + CREDITS_LIMITS.skew_ms + 1),
        DepositOrder(ISSUER.peer_id, A.peer_id, 5, START + 9, 4, bytes(64)),
    ):
        with pytest.raises(NotCleared):
            ledger.deposit(bad)
    assert ledger.credit_of(A.peer_id).deposit == 100


def test_a_proved_fault_takes_the_deposit_once(ledger: Ledger) -> None:
    ledger.issue(A.peer_id, 100)
    ledger.deposit(order(A, 81, 1))
    assert ledger.forfeit(A.peer_id, b"evidence", B.peer_id) == 81 // LEDGER.forfeit_share
    assert (ledger.credit_of(A.peer_id).deposit, points(ledger, A)) == (0, 19)
    assert points(ledger, B) == 20
    assert ledger.totals() == (100, 39, 61)
    ledger.deposit(order(A, 10, 2))
    assert ledger.forfeit(A.peer_id, b"evidence", B.peer_id) == 0
    assert ledger.credit_of(A.peer_id).deposit == 10
    assert ledger.forfeit(A.peer_id, b"more evidence", A.peer_id) == 0, "nobody earns by its own fault"
    assert points(ledger, A) == 9
    assert ledger.forfeit(PEERS[3].peer_id, b"of a stranger", B.peer_id) == 0


def test_clearings_are_kept_for_a_while_only(ledger: Ledger) -> None:
    ledger.issue(A.peer_id, 100)
    for sequence in range(1, LEDGER.kept_clearings + 2):
        ledger.clear(transfer(A, B.peer_id, 1, sequence))
    assert ledger.clear(transfer(A, B.peer_id, 1, 2)).is_signed
    with pytest.raises(NotCleared, match="carried out once"):
        ledger.clear(transfer(A, B.peer_id, 1, 1))
    assert points(ledger, B) == LEDGER.kept_clearings + 1


def test_accounts_are_bounded_and_expire(ledger: Ledger, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "LEDGER", replace(ledger_module.LEDGER, max_accounts=3))
    monkeypatch.setattr(ledger_module, "_MAX_BY_TRANSFER", 2)
    assert ledger.issue(A.peer_id, 10)
    ledger.clear(transfer(A, B.peer_id, 1, 1))
    with pytest.raises(NotCleared, match="no room"):
        ledger.clear(transfer(A, PEERS[2].peer_id, 1, 2))
    assert ledger.issue(PEERS[2].peer_id, 5), "who earns has room where transfers make none"
    assert not ledger.issue(PEERS[3].peer_id, 5)
    clock.now += LEDGER.expiry_ms + 1
    # The spender is idle as well: the transfer keeps its account open, and does not pay twice.
    ledger.clear(transfer(A, PEERS[3].peer_id, 4, 2, clock.now))
    assert (points(ledger, A), points(ledger, B), points(ledger, PEERS[3])) == (5, 0, 4)
    assert ledger.totals() == (15, 9, 6)
    # What was spent before an account was closed is not spent again after it was opened anew.
    ledger.issue(B.peer_id, 10)
    with pytest.raises(NotCleared, match="too old"):
        ledger.clear(transfer(B, A.peer_id, 1, 1))


def test_file_that_is_no_ledger_is_said_so(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    file.write_bytes(b"no database" * 500)
    with pytest.raises(MachineError, match="move the file away"):
        Ledger(file, ISSUER)


def test_earnings_are_never_negative() -> None:
    with pytest.raises(ValueError, match="cannot be earned"):
        earned(Account("a"), -1)


WHO = st.integers(0, len(PEERS) - 1)
SOME = st.integers(-5, 120)
ACTS = st.lists(
    st.one_of(
        st.tuples(st.just("issue"), WHO, st.integers(0, 100)),
        st.tuples(st.just("transfer"), WHO, WHO, SOME, st.integers(0, 12)),
        st.tuples(st.just("deposit"), WHO, SOME, st.integers(0, 12), st.integers(1, 50)),
        st.tuples(st.just("forfeit"), WHO, WHO, st.binary(min_size=1, max_size=1)),
        st.tuples(st.just("wait"), st.integers(0, LEDGER.grace_ms)),
    ),
    max_size=25,
)


@settings(deadline=None, max_examples=20)
@given(ACTS)
def test_points_are_neither_made_nor_lost(acts: list[tuple[str, ...]]) -> None:
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder, Ledger(Path(folder) / "l.sqlite", ISSUER, clock) as ledger:
        cleared: dict[tuple[str, int], Transfer] = {}
        for act, *rest in acts:
            before = {peer.peer_id: ledger.credit_of(peer.peer_id) for peer in PEERS}
            numbers = [int(part) if isinstance(part, int) else 0 for part in rest]
            try:
                if act == "issue":
                    ledger.issue(PEERS[numbers[0]].peer_id, numbers[1])
                elif act == "transfer":
                    spender, recipient, some, sequence = numbers
                    sent = transfer(PEERS[spender], PEERS[recipient].peer_id, some, sequence, clock.now)
                    ledger.clear(sent)
                    key = (sent.spender, sent.sequence)
                    assert cleared.setdefault(key, sent) == sent, "one number was spent twice"
                elif act == "deposit":
                    server, some, sequence, seconds = numbers
                    ledger.deposit(order(PEERS[server], some, sequence, clock.now + 1000 * seconds))
                elif act == "forfeit":
                    ledger.forfeit(PEERS[numbers[0]].peer_id, bytes(rest[2]), PEERS[numbers[1]].peer_id)  # type: ignore[arg-type]
                else:
                    clock.now += numbers[0]
            except NotCleared:
                assert {peer.peer_id: ledger.credit_of(peer.peer_id) for peer in PEERS} == before
            issued, held, void = ledger.totals()
            assert issued == held + void
            for peer in PEERS:
                credit = ledger.credit_of(peer.peer_id)
                assert credit.points >= 0 and credit.deposit >= 0 and credit.is_signed
                assert credit.sequence >= before[peer.peer_id].sequence


_SPEND = """
import sys
from pathlib import Path
import time
from petalnode.node.credits.ledger import Ledger
from tests.unit.transfers import A, B, ISSUER, transfer
with Ledger(Path(sys.argv[1]), ISSUER) as ledger:
    sequence = ledger.credit_of(A.peer_id).sequence
    print("ready", flush=True)
    while True:
        sequence += 1
        ledger.clear(transfer(A, B.peer_id, 1, sequence, time.time_ns() // 1_000_000 + 60_000))
        print(sequence, flush=True)
"""


def test_killed_ledger_has_cleared_once_or_never(tmp_path: Path) -> None:
    file = tmp_path / "ledger.sqlite"
    with Ledger(file, ISSUER) as ledger:
        ledger.issue(A.peer_id, 1_000_000)
    chance = random.Random(7)
    said = 0
    for _ in range(4):
        command = [sys.executable, "-c", _SPEND, str(file)]
        process = warm_python.start(command, warm_python.python_environment(), ROOT)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        for _ in range(chance.randrange(1, 40)):
            said = int(process.stdout.readline())
        process.kill()
        said = max([said, *(int(line) for line in process.stdout.read().split("\n")[:-1])])
        process.wait()
        process.stdout.close()
        with Ledger(file, ISSUER) as ledger:
            credit, received = ledger.credit_of(A.peer_id), points(ledger, B)
            assert ledger.totals() == (1_000_000, 1_000_000, 0)
            assert credit.sequence in (said, said + 1), "what was said to be cleared is cleared"
            assert received == credit.sequence == 1_000_000 - credit.points
