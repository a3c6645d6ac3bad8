"""A server that pushes something else than it answers to the client: the next server, which has computed what it was
pushed, is not to blame."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import Receipt
from petalnode.node.client.session.recovery import Misled, Recover, Send, StepState, next_action
from petalnode.node.testing.memory_servers import MemorySwarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import receipt_from_wire, receipt_to_wire
from tests.attacks.two_answers import LIAR, OTHERS, STRANGER, Lies, generated, signed_again
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("two-answers") / "model")


pytestmark = pytest.mark.usefixtures("blocks_as_served", "patient")


def test_who_signs_two_answers_is_banned_and_replaced(swarm: MemorySwarm, model_folder: Path) -> None:
    bans, route, recoveries = generated(swarm, model_folder, Lies(signed_again))
    assert bans == {LIAR.peer_id}
    assert LIAR.peer_id not in route and route[1] == STRANGER.peer_id and recoveries == 1


@pytest.mark.parametrize("kind", OTHERS)
def test_who_cannot_be_proved_to_lie_is_unblamed(swarm: MemorySwarm, model_folder: Path, kind: str) -> None:
    """The next server might show an old receipt. Its session goes on, and the client relays."""
    bans, route, recoveries = generated(swarm, model_folder, Lies(OTHERS[kind]))
    assert bans == set()
    assert route == [LIAR.peer_id, STRANGER.peer_id] and recoveries == 0


def test_who_pushes_an_old_output_again_is_refused(swarm: MemorySwarm, model_folder: Path) -> None:
    """So that a server which signs for one has made that up."""
    bans, route, recoveries = generated(swarm, model_folder, Lies(lambda receipt, before: before or receipt))
    assert bans == set() and route == [LIAR.peer_id, STRANGER.peer_id] and recoveries == 0


@pytest.mark.parametrize("by", [None, STRANGER, "an earlier step's"])
def test_who_invents_push_does_not_blame_server_before(
    swarm: MemorySwarm, model_folder: Path, by: Identity | str | None
) -> None:
    """Here the second server lies: it says that it was pushed what nobody pushed."""
    told, lies = [], Lies(signed_again, most=0)
    earlier: list[Receipt] = []

    def invent(stream: Any, frame: wire.InferenceFrame, payloads: Sequence[Any]) -> None:
        reply = frame.reply
        if frame.WhichOneof("body") != "reply" or not reply.HasField("upstream") or not lies.active:
            return
        earlier.append(receipt_from_wire(reply.upstream))
        if len(earlier) < 3 or told:
            return
        told.append(reply.sequence)
        said = replace(earlier[-1], reply_hash=bytes(32))
        said = said.signed(by) if isinstance(by, Identity) else said if by is None else earlier[-3]
        reply.upstream.CopyFrom(receipt_to_wire(said))
        signed = replace(receipt_from_wire(reply.receipt), upstream_receipt=said.hash()).signed(STRANGER)
        reply.receipt.CopyFrom(receipt_to_wire(signed))

    bans, _, _ = generated(swarm, model_folder, lies, lambda: bool(told), answers=invent)
    assert told and bans == {STRANGER.peer_id}


def test_who_shows_no_receipt_is_left_unblamed(swarm: MemorySwarm, model_folder: Path) -> None:
    """As servers of older versions do."""

    def without(stream: Any, frame: wire.InferenceFrame, payloads: Sequence[Any]) -> None:
        if frame.WhichOneof("body") == "reply":
            frame.reply.ClearField("upstream")

    bans, route, recoveries = generated(swarm, model_folder, Lies(signed_again), answers=without)
    assert bans == set() and recoveries and STRANGER.peer_id not in route


# --- the rules


def test_server_that_was_misled_is_asked_anew_once() -> None:
    state, action = next_action(StepState("pushed"), Misled(proved=False))
    assert action == Send(anew=True) and state.phase == "sending"
    state, action = next_action(replace(state, phase="sent"), Misled(proved=False))
    assert action is Recover.REPLACE


def test_server_before_is_replaced_once_it_is_proved() -> None:
    state, action = next_action(StepState("pushed"), Misled(proved=True))
    assert action is Recover.REPLACE and state.phase == "replacing"
