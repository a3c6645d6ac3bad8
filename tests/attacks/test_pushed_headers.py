"""A server that changes, in what it pushes, what the client has said of the step: the next server is not to blame."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.node.testing.memory_servers import MemorySwarm
from petalnode.protocols import wire_pb2 as wire
from tests.attacks.two_answers import LIAR, OTHERS, STRANGER, Lies, generated, signed_again
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("headers") / "model")


pytestmark = pytest.mark.usefixtures("blocks_as_served", "patient")


def long(step: wire.Step) -> None:
    step.long_factors = not step.long_factors


def later(step: wire.Step) -> None:
    step.route_epoch += 1


def earlier(step: wire.Step) -> None:
    step.position -= 1


def exchanged(step: wire.Step) -> None:
    step.reorder[:] = [1, 0]


def of_row(step: wire.Step) -> None:
    step.reorder[:] = [0]


def next_step(step: wire.Step) -> None:
    step.sequence += 1


def without_reply(step: wire.Step) -> None:
    step.receipt_only = not step.receipt_only


def handed_on(step: wire.Step) -> None:
    step.targets.add(peer_id=peer_id_to_bytes(LIAR.peer_id), nonce=bytes(16), sequence=step.sequence)


def changing(change: Callable[[wire.Step], None], **lies: Any) -> Lies:
    """The liar changes a step in one of its pushes, which come with their right receipts unless `lies` say other."""
    return Lies(**{"most": 0, **lies}, change=lambda frame: change(frame.push.step))


@pytest.mark.parametrize("change", [long, later, of_row, earlier, next_step, without_reply, handed_on])
def test_who_computes_what_was_pushed_is_not_blamed(
    change: Callable[[wire.Step], None], swarm: MemorySwarm, model_folder: Path
) -> None:
    """The client sends the step itself, or leaves a server that is at another position or of a later route by then."""
    bans, route, recoveries = generated(swarm, model_folder, changing(change))
    assert bans == set()
    if change in (long, of_row):
        assert route == [LIAR.peer_id, STRANGER.peer_id] and recoveries == 0


def as_bfloat16(tensor: wire.Tensor) -> None:
    """The same bytes are twice as many tokens."""
    tensor.dtype = "bfloat16"
    tensor.shape[1] *= 2


def of_more_rows(tensor: wire.Tensor) -> None:
    tensor.shape[:] = [1, 2, tensor.shape[2] // 2]


@pytest.mark.parametrize("change", [as_bfloat16, of_more_rows])
def test_who_reads_pushes_as_told_is_not_blamed(
    change: Callable[[wire.Tensor], None], swarm: MemorySwarm, model_folder: Path
) -> None:
    """The receipt that comes with it is for the same bytes."""
    bans, _, _ = generated(swarm, model_folder, Lies(most=0, change=lambda frame: change(frame.tensors[0])))
    assert bans == set()


@pytest.mark.parametrize("receipt", [None, "for another session", "of this step"])
def test_rows_that_have_changed_places_are_computed_anew(
    receipt: str | None, swarm: MemorySwarm, model_folder: Path
) -> None:
    """To send the step once more would not bring them back: the server is left, and not blamed."""
    said = OTHERS.get(receipt or "", signed_again)
    lies = changing(exchanged, receipt=said, most=0 if receipt is None else 1)
    bans, _, recoveries = generated(swarm, model_folder, lies, rows=2)
    assert bans == ({LIAR.peer_id} if said is signed_again and receipt else set()) and recoveries
