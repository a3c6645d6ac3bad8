"""A server that pushes something else than it answers to the client: the next server, which has computed what it was
pushed, is not to blame."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import Receipt
from petalnode.node.client.session.recovery import Misled, Recover, Send, StepState, next_action
from petalnode.node.server.requests import session as session_module
from petalnode.node.server.requests.session import ServerSession
from petalnode.node.testing.memory_servers import MemorySwarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import receipt_from_wire, receipt_to_wire
from tests.attacks.two_answers import LIAR, OTHERS, STRANGER, Lies, generated, signed_again
from tests.inspection import Said, alter_answers, identity_of
from tests.tiny_models import save_tiny


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("two-answers") / "model")


pytestmark = pytest.mark.usefixtures("patient")


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
    swarm: MemorySwarm, model_folder: Path, monkeypatch: pytest.MonkeyPatch, by: Identity | str | None
) -> None:
    """Here the second server lies: it says that it was pushed what nobody pushed."""
    told, lies = [], Lies(signed_again, most=0)
    earlier: list[Receipt] = []

    def invent(session: ServerSession, step: wire.Step, upstream: wire.Receipt | None) -> Said:
        if upstream is not None and lies.active:
            earlier.append(receipt_from_wire(upstream))
        if upstream is None or len(earlier) < 3 or told or identity_of(session) is not STRANGER:
            return step, upstream
        told.append(step.sequence)
        said = replace(receipt_from_wire(upstream), reply_hash=bytes(32))
        said = said.signed(by) if isinstance(by, Identity) else said if by is None else earlier[-3]
        changed = wire.Step()
        changed.CopyFrom(step)
        changed.previous_receipt = said.hash()
        return changed, receipt_to_wire(said)

    with alter_answers(invent):
        bans, _, _ = generated(swarm, model_folder, lies, lambda: bool(told))
    assert told and bans == {STRANGER.peer_id}


def test_who_shows_no_receipt_is_left_unblamed(
    swarm: MemorySwarm, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As servers of older versions do."""
    reply = wire.Reply

    def without(**fields: Any) -> wire.Reply:
        fields["upstream"] = None
        return reply(**fields)

    older = SimpleNamespace(**{name: getattr(wire, name) for name in dir(wire) if not name.startswith("__")})
    older.Reply = without
    monkeypatch.setattr(session_module, "wire", older)
    bans, route, recoveries = generated(swarm, model_folder, Lies(signed_again))
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
