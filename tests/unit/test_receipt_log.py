"""What a client keeps of receipts, and what it makes of their times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from petalnode.crypto.receipts import Receipt
from petalnode.node.client.request import ServerClaims, check_time
from petalnode.node.testing.node_inspection import held
from petalnode.node.trust.receipt_log import LAST_SESSIONS, LoggedBatch, ReceiptArchive, SessionLog
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from tests.unit.test_receipts import RECEIPT

TENSOR = wire.Tensor(shape=[1, 1, 4], dtype="float32", codec="none", nbytes=16)


def receipt(sequence: int) -> Receipt:
    return replace(RECEIPT, sequence=sequence)


def filled(count: int, **options: int | bool) -> SessionLog:
    log = SessionLog("server", **options)  # type: ignore[arg-type]
    log.begin(wire.Open(), wire.Granted(session_epoch=b"e" * 16))
    for sequence in range(1, count + 1):
        log.asked(wire.Step(sequence=sequence), TENSOR, bytes(16))
        log.answered(sequence, receipt(sequence), bytes(16))
    return log


def test_only_who_shares_keeps_tensors() -> None:
    assert [entry.input for entry in filled(2).entries] == [None, None] and filled(2).nbytes == 0
    kept = filled(2, keeps_tensors=True)
    assert kept.nbytes == 64 and kept.complete
    kept.forget_tensors()
    assert kept.nbytes == 0 and [entry.output for entry in kept.entries] == [None, None]
    assert all(entry.step is not None for entry in kept.entries)


def test_the_oldest_receipts_go_and_the_log_says_so() -> None:
    log = filled(10, limit=4, keeps_tensors=True)
    assert [entry.receipt.sequence for entry in log.entries] == [7, 8, 9, 10]
    assert not log.complete and log.nbytes == 4 * 32


def test_an_answer_to_what_is_not_known_leaves_a_gap() -> None:
    log = filled(1)
    log.answered(2, receipt(2), None)
    assert log.entries[1].step is None and not log.complete


def test_steps_that_nobody_answers_are_forgotten() -> None:
    log = SessionLog("server", keeps_tensors=True)
    for sequence in range(1, 5000):
        log.asked(wire.Step(sequence=sequence), TENSOR, bytes(16))
    assert held(log) <= 1024
    log.answered(5000, receipt(5000), None)
    assert held(log) == len(log.entries) == 1


def test_the_archive_is_bounded() -> None:
    archive = ReceiptArchive(shared_bytes=1000)
    first = archive.session("server")
    for sequence in range(1, 100):
        first.asked(wire.Step(sequence=sequence), TENSOR, bytes(16))
        first.answered(sequence, receipt(sequence), bytes(16))
    for _ in range(LAST_SESSIONS + 5):
        archive.session("server")
    assert len(archive.sessions) == LAST_SESSIONS
    assert first.nbytes == 0
    work = LoggedBatch("server", "/x", RECEIPT, wire.BatchRequest(), (bytes(100),), None, (), (bytes(100),))
    for _ in range(20):
        archive.add_batch(work)
    assert sum(batch.nbytes for batch in archive.batches) <= 1000
    archive.add_batch(replace(work, inputs=(bytes(5000),)))
    assert all(batch.nbytes == 200 for batch in archive.batches)


@pytest.mark.parametrize(
    ("seconds", "fine"), [(0, True), (8, True), (-8, True), (12, False), (-12, False), (1e6, False), (-1e6, False)]
)
def test_clocks_may_differ_a_little(seconds: float, fine: bool) -> None:
    now = 1_700_000_000_000
    found = check_time(replace(RECEIPT, time_ms=now + round(1000 * seconds)), now, now)
    assert (found is None) == fine


def test_a_server_that_has_not_announced_its_dtype_promises_nothing() -> None:
    claims = ServerClaims(b"m" * 32, Span(0, 4), "", "none")
    assert claims.broken_by(RECEIPT) is None
    assert replace(claims, dtype="float32").broken_by(RECEIPT)
    assert replace(claims, dtype="bfloat16").broken_by(RECEIPT) is None
