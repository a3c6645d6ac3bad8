"""A key that fills the store of files by other things than files: requests of batches, answers, batches, tiny files."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from petalnode.node.api.batches.objects import ENDPOINTS
from petalnode.node.api.batches.store import BATCH_STORE, BatchLine, BatchStore, NoRoom, StoredBatch

DISK = 16 << 20
SHARE = DISK // 4


def batch(number: int, owner: str = "attacker", **fields: str) -> StoredBatch:
    return StoredBatch(f"batch_{owner}_{number}", owner, ENDPOINTS[0], "file", "validating", int(time.time()), fields)


def fill(store: BatchStore, what: str) -> int:
    """How often the attacker could add something; the store refuses at some time."""
    store.add_batch(batch(-1))
    if what == "answers":
        store.begin("batch_attacker_-1", [(line, str(line), "{}") for line in range(1000)])
    for number in range(2000):
        try:
            if what == "requests":
                store.add_batch(batch(number))
                store.begin(f"batch_attacker_{number}", [(line, str(line), "x" * 1000) for line in range(100)])
            elif what == "answers":
                store.note_result(BatchLine("batch_attacker_-1", number, str(number), "{}"), False, "x" * 100_000)
            elif what == "open batches":
                store.add_batch(batch(number, metadata="x" * 9000))
            else:
                store.add_file("attacker", "x", "batch", b"")
        except NoRoom:
            return number
    raise AssertionError("nothing is counted for the share")


@pytest.mark.parametrize("what", ["requests", "answers", "open batches", "empty files"])
def test_whatever_a_key_keeps_counts_for_its_share(what: str, tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches", DISK)
    assert 0 < fill(store, what) <= SHARE // BATCH_STORE.object_bytes
    assert (tmp_path / "batches").stat().st_size <= 1.25 * SHARE
    for owner in ("bob", "carol"):  # who have their whole shares
        store.add_file(owner, "x", "batch", b"x" * (SHARE - 3 * BATCH_STORE.object_bytes))
        store.add_batch(batch(0, owner))
    store.close()
    again = BatchStore(tmp_path / "batches", DISK)  # which counts what is there
    with pytest.raises(NoRoom, match="one key"):
        again.add_file("attacker", "x", "batch", b"x" * 200_000)
    again.close()


def test_what_is_deleted_is_room_again(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches", DISK)
    room = store.room("attacker")
    file = store.add_file("attacker", "x", "batch", b"x" * 1000)
    store.add_batch(batch(0))
    store.begin("batch_attacker_0", [(line, str(line), "x" * 1000) for line in range(100)])
    assert room - store.room("attacker") > 100_000
    for line in store.open_lines("batch_attacker_0", -1, 100):
        store.note_result(line, False, "ü" * 100)
    store.finish(batch(0), "completed")
    (output,) = [found for found in store.files("attacker") if found.id != file.id]
    assert output.bytes == 100 * 201
    assert store.content("attacker", output.id) == ("ü" * 100 + "\n").encode() * 100
    for found in (file, output):
        store.drop_file("attacker", found.id)
    assert room - store.room("attacker") < BATCH_STORE.object_bytes + 1000  # the batch, which stays
    store.close()


def test_the_oldest_batches_that_are_over_are_forgotten(tmp_path: Path) -> None:
    store = BatchStore(tmp_path / "batches", 1 << 30)
    store.add_batch(batch(-1))
    for number in range(BATCH_STORE.max_batches + 50):
        store.add_batch(batch(number))
        store.set_status(f"batch_attacker_{number}", "failed")
    known = [found.id for found in store.batches("attacker")]
    assert len(known) == BATCH_STORE.max_batches + 1
    assert "batch_attacker_-1" in known  # which is not over
    assert "batch_attacker_49" not in known
    store.close()


def test_an_answer_without_room_leaves_those_before(tmp_path: Path) -> None:
    """What has been answered becomes a file; the batch says why it ended."""
    from petalnode.node.api.batches.runner import BatchRunner

    store = BatchStore(tmp_path / "batches", DISK)
    store.add_batch(batch(0))
    store.begin("batch_attacker_0", [(line, str(line), "{}") for line in range(50)])
    runner = BatchRunner(store)
    for line in store.open_lines("batch_attacker_0", -1, 50):
        runner.note(batch(0), line, 200, b'"' + b"x" * 200_000 + b'"')
    found = store.batch("attacker", "batch_attacker_0")
    assert found is not None and found.status == "failed"
    assert found.fields["errors"]["data"][0]["code"] == "no_room"
    output = store.content("attacker", found.fields["output_file_id"])
    assert output is not None and 10 <= output.count(b"\n") == found.completed < 50
    store.close()
