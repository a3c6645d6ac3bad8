"""What a client keeps of receipts, and what it makes of their times."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import pytest

from petalnode.crypto.receipts import Receipt
from petalnode.node.client.request import ServerClaims, check_time
from petalnode.node.trust.receipt_log import KEPT_RECEIPTS, LoggedBatch, ReceiptArchive, SessionLog
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.training import KeptSet, MicroBatch
from tests.node_inspection import held
from tests.receipts import RECEIPT

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


def test_oldest_receipts_go_and_log_says_so() -> None:
    log = filled(10, limit=4, keeps_tensors=True)
    assert [entry.receipt.sequence for entry in log.entries] == [7, 8, 9, 10]
    assert not log.complete and log.nbytes == 4 * 32


def test_answer_to_what_is_not_known_leaves_gap() -> None:
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
    for _ in range(KEPT_RECEIPTS.last_sessions + 5):
        archive.session("server")
    assert len(archive.sessions) == KEPT_RECEIPTS.last_sessions
    assert first.nbytes == 0
    work = LoggedBatch("server", "/x", RECEIPT, MicroBatch(wire.BatchRequest(), (bytes(100),)), (bytes(100),))
    for _ in range(20):
        archive.add_batch(work)
    assert sum(batch.nbytes for batch in archive.batches) <= 1000
    archive.add_batch(replace(work, asked=replace(work.asked, payloads=(bytes(5000),))))
    assert all(batch.nbytes == 200 for batch in archive.batches)


def test_log_is_found_by_number_among_the_last() -> None:
    log = filled(20)
    assert log.find(20) == receipt(20) and log.find(5) == receipt(5)
    assert log.find(4) is None and log.find(21) is None
    assert filled(0).complete and not filled(0).entries
    assert not SessionLog("server").complete and SessionLog("server").opening is None


def test_an_answer_belongs_to_its_own_step() -> None:
    log = SessionLog("server", keeps_tensors=True)
    log.begin(wire.Open(max_length=7), wire.Granted(codec="none"))
    assert log.opening == wire.Open(max_length=7) and log.granted == wire.Granted(codec="none")
    for sequence in (1, 2, 3):
        log.asked(wire.Step(sequence=sequence), TENSOR, bytes([sequence]) * 16)
    log.answered(2, receipt(2), b"out")
    (entry,) = log.entries
    assert entry.step == wire.Step(sequence=2) and entry.input == bytes([2]) * 16 and entry.output == b"out"
    assert entry.asked == TENSOR and log.nbytes == 19 and log.complete
    log.answered(1, receipt(1), None)  # that was forgotten when a later one was answered
    assert log.entries[1].step is None and not log.complete
    log.answered(3, receipt(3), None)
    assert log.entries[2].input == bytes([3]) * 16 and log.nbytes == 35 and not log.complete


def test_forgotten_tensors_return_with_no_later_step() -> None:
    log = filled(1, keeps_tensors=True)
    log.asked(wire.Step(sequence=2), TENSOR, bytes(16))
    log.forget_tensors()
    log.answered(2, receipt(2), bytes(16))
    log.asked(wire.Step(sequence=3), TENSOR, bytes(16))
    log.answered(3, receipt(3), bytes(16))
    assert [(entry.input, entry.output) for entry in log.entries] == [(None, None)] * 3
    assert log.nbytes == 0 and log.complete and [entry.asked for entry in log.entries] == [TENSOR] * 3


def batch(size: int) -> LoggedBatch:
    asked = MicroBatch(wire.BatchRequest(), (bytes(size),), KeptSet(wire.Keep(), (bytes(size),), b""))
    return LoggedBatch("server", "/x", RECEIPT, asked, (bytes(size),))


def test_unsharing_node_keeps_open_sessions_receipts_only() -> None:
    """They are several kilobytes each, of objects that nobody would look at again."""
    archive = ReceiptArchive()
    log, next_log = archive.session("server"), archive.session("next")
    next_log.begin(wire.Open(nonce=b"n" * 16), wire.Granted())
    for _ in range(KEPT_RECEIPTS.last_sessions):  # that come and go meanwhile
        archive.session("server")
    log.pushed_on(b"n" * 16, wire.Step(sequence=3), TENSOR, bytes(16))
    assert next_log.waiting(3) is not None
    gone = weakref.ref(next_log)
    del next_log
    gc.collect()
    assert gone() is None and not archive.sessions


def test_who_does_not_share_keeps_no_batches() -> None:
    archive = ReceiptArchive()
    archive.add_batch(batch(0))
    assert not archive.shares and not archive.batches
    assert batch(5).nbytes == 15


def test_batches_yield_before_sessions_and_oldest_first() -> None:
    archive = ReceiptArchive(shared_bytes=1000)
    assert archive.shares
    archive.add_batch(batch(84))  # 252 bytes: more than a quarter
    assert not archive.batches
    archive.add_batch(replace(batch(0), outputs=(bytes(250),)))  # just a quarter
    assert len(archive.batches) == 1
    logs = [archive.session("server") for _ in range(2)]
    for log in logs:
        log.begin(wire.Open(), wire.Granted())
        log.asked(wire.Step(sequence=1), TENSOR, bytes(200))
        log.answered(1, receipt(1), bytes(200))
    first, second = replace(batch(60), peer_id="first"), replace(batch(60), peer_id="second")
    archive.add_batch(first)
    archive.add_batch(second)
    assert list(archive.batches) == [second] and [log.nbytes for log in logs] == [400, 400]
    logs[1].asked(wire.Step(sequence=2), TENSOR, bytes(300))
    logs[1].answered(2, receipt(2), bytes(1))
    archive.session("server")
    assert not archive.batches and [log.nbytes for log in logs] == [0, 701]
    assert list(archive.sessions)[:2] == logs and len(archive.sessions) == 3


@pytest.mark.parametrize(
    ("seconds", "fine"), [(0, True), (8, True), (-8, True), (12, False), (-12, False), (1e6, False), (-1e6, False)]
)
def test_clocks_may_differ_a_little(seconds: float, fine: bool) -> None:
    now = 1_700_000_000_000
    found = check_time(replace(RECEIPT, time_ms=now + round(1000 * seconds)), now, now)
    assert (found is None) == fine


def test_unannounced_dtype_promises_nothing() -> None:
    claims = ServerClaims(b"m" * 32, Span(0, 4), "", "none")
    assert claims.broken_by(RECEIPT) is None
    assert replace(claims, dtype="float32").broken_by(RECEIPT)
    assert replace(claims, dtype="bfloat16").broken_by(RECEIPT) is None
