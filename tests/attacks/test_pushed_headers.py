"""A server that changes, in what it pushes, what the client has said of the step: the next server is not to blame."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.node.server.requests.pushes import Pushes
from petalnode.node.server.steps import StepOutput
from petalnode.node.testing.memory_servers import MemorySwarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import receipt_from_wire
from tests.attacks.two_answers import LIAR, OTHERS, STRANGER, Lies, generated, signed_again
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("headers") / "model")


pytestmark = pytest.mark.usefixtures("patient")


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


def lying(monkeypatch: pytest.MonkeyPatch, lies: Lies, change: Callable[[wire.Step], None]) -> list[int]:
    """The steps that the liar has changed in one of its pushes, which come with its right receipt."""
    told: list[int] = []
    send = Pushes.send

    async def lie(self: Pushes, peer: bytes, push: wire.Push, output: StepOutput) -> bool:
        ready = self._known.get(peer) is not None and self._known[peer].stream is not None
        if lies.active and ready and not told and receipt_from_wire(push.receipt).is_signed_by(LIAR.peer_id):
            told.append(push.step.sequence)
            change(push.step)
        return await send(self, peer, push, output)

    monkeypatch.setattr(Pushes, "send", lie)
    return told


@pytest.mark.parametrize("change", [long, later, of_row, earlier, next_step, without_reply, handed_on])
def test_who_computes_what_was_pushed_is_not_blamed(
    change: Callable[[wire.Step], None], swarm: MemorySwarm, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client sends the step itself, or leaves a server that is at another position or of a later route by then."""
    lies = Lies(lambda receipt, before: receipt, most=0)
    told = lying(monkeypatch, lies, change)
    bans, route, recoveries = generated(swarm, model_folder, lies, lambda: bool(told))
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
    change: Callable[[wire.Tensor], None], swarm: MemorySwarm, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receipt that comes with it is for the same bytes."""
    told: list[int] = []
    send = Pushes.send

    async def lie(self: Pushes, peer: bytes, push: wire.Push, output: StepOutput) -> bool:
        ready = self._known.get(peer) is not None and self._known[peer].stream is not None
        if lies.active and ready and not told and receipt_from_wire(push.receipt).is_signed_by(LIAR.peer_id):
            told.append(push.step.sequence)
            tensor = wire.Tensor()
            tensor.CopyFrom(output.tensor)
            change(tensor)
            output = replace(output, tensor=tensor)
        return await send(self, peer, push, output)

    monkeypatch.setattr(Pushes, "send", lie)
    lies = Lies(lambda receipt, before: receipt, most=0)
    bans, _, _ = generated(swarm, model_folder, lies, lambda: bool(told))
    assert bans == set() and told


@pytest.mark.parametrize("receipt", [None, "for another session", "of this step"])
def test_rows_that_have_changed_places_are_computed_anew(
    receipt: str | None, swarm: MemorySwarm, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To send the step once more would not bring them back: the server is left, and not blamed."""
    said = OTHERS.get(receipt or "", signed_again)
    lies = Lies(said, most=0 if receipt is None else 1)
    told = lying(monkeypatch, lies, exchanged)
    bans, _, recoveries = generated(swarm, model_folder, lies, lambda: bool(told), rows=2)
    assert bans == ({LIAR.peer_id} if said is signed_again and receipt else set()) and recoveries
