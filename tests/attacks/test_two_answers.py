"""A server that pushes something else than it answers to the client: the next server, which has computed what it was
pushed, is not to blame."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import Receipt
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.client.session.recovery import Misled, Recover, Send, StepState, next_action
from petalnode.node.server.requests import session as session_module
from petalnode.node.server.requests.pushes import Pushes
from petalnode.node.server.requests.session import ServerSession
from petalnode.node.server.steps import StepOutput
from petalnode.node.testing.memory_servers import MemorySwarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import receipt_from_wire, receipt_to_wire, sha256
from tests.inspection import Said, alter_answers, client_of, identity_of, session_of
from tests.tiny_models import load_whole, save_tiny

LIAR = Identity.from_seed(bytes(range(21, 53)))
STRANGER = Identity.from_seed(bytes(range(22, 54)))
TOKENS = 40


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("two-answers") / "model")


@dataclass
class Lies:
    """What the liar pushes in the place of what it answers. `told`: how often; `most`: how often at most."""

    receipt: Callable[[Receipt, Receipt | None], Receipt]
    shown: Callable[[wire.Reply], None] = lambda reply: None
    most: int = 1
    told: int = 0
    active: bool = False
    before: Receipt | None = None


@contextmanager
def lying(lies: Lies) -> Iterator[None]:
    send = Pushes.send

    async def lie(self: Pushes, peer: bytes, push: wire.Push, output: StepOutput) -> bool:
        receipt = receipt_from_wire(push.receipt)
        before, lies.before = lies.before, receipt
        ready = self._known.get(peer) is not None and self._known[peer].stream is not None
        if not (lies.active and ready and lies.told < lies.most and receipt.is_signed_by(LIAR.peer_id)):
            return await send(self, peer, push, output)
        lies.told += 1
        payload = bytes(len(output.payload))
        said = lies.receipt(replace(receipt, reply_hash=sha256(payload)), before)
        other = wire.Push(client=push.client, nonce=push.nonce, step=push.step, receipt=receipt_to_wire(said))
        other.step.previous_receipt = said.hash()
        return await send(self, peer, other, replace(output, payload=payload))

    Pushes.send = lie  # type: ignore[method-assign]
    try:
        yield
    finally:
        Pushes.send = send  # type: ignore[method-assign]


def banned(model: Any) -> set[str]:
    return {ban.peer_id for ban in client_of(model).swarm.trust.bans()}


pytestmark = pytest.mark.usefixtures("patient")


def generated(
    swarm: MemorySwarm, folder: Path, lies: Lies, done: Callable[[], bool] | None = None, rows: int = 1
) -> tuple[set[str], list[str], int]:
    """Who is banned, the route in the end, and the recoveries; the answer has to be that of plain transformers.

    Generates until `done`: until all lies are told, if that is None. A push comes when its stream is open.
    """
    liar = swarm.start(folder, "0:3", identity=LIAR)
    honest = swarm.start(folder, "3:6", identity=STRANGER)
    assert liar.ready and honest.ready
    prompt = torch.randint(3, 100, (rows, 9), generator=torch.Generator().manual_seed(3))
    options: Any = {"do_sample": False, "pad_token_id": 0}
    expected = load_whole(folder).generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, **options)
    with (
        lying(lies),
        swarm.open_model(AutoDistributedModelForCausalLM, folder) as model,
        model.inference_session(200) as session,
    ):
        first = model.generate(prompt, session=session, max_new_tokens=2, min_new_tokens=2, **options)
        assert swarm.start(folder, "0:3").ready and swarm.start(folder, "3:6").ready
        lies.active = True
        more = TOKENS - 2
        while True:
            output = model.generate(first, session=session, max_new_tokens=more, min_new_tokens=more, **options)
            assert torch.equal(output, expected)
            if lies.told == lies.most if done is None else done():
                break
            session.position = first.shape[1] - 1
            session.tokens = first[:, : session.position].tolist()
        return banned(model), [hop.peer_id for hop in session_of(session).route], session.recoveries


def signed_again(receipt: Receipt, before: Receipt | None) -> Receipt:
    return receipt.signed(LIAR)


def test_who_signs_two_answers_is_banned_and_replaced(swarm: MemorySwarm, model_folder: Path) -> None:
    bans, route, recoveries = generated(swarm, model_folder, Lies(signed_again))
    assert bans == {LIAR.peer_id}
    assert LIAR.peer_id not in route and route[1] == STRANGER.peer_id and recoveries == 1


OTHERS: dict[str, Callable[[Receipt, Receipt | None], Receipt]] = {
    "for another step": lambda receipt, before: replace(receipt, sequence=receipt.sequence + 100).signed(LIAR),
    "for another session": lambda receipt, before: replace(receipt, session_epoch=bytes(16)).signed(LIAR),
    "after another receipt": lambda receipt, before: replace(receipt, previous_receipt=bytes(32)).signed(LIAR),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_who_cannot_be_proved_to_lie_is_not_blamed_and_nobody_else_is(
    swarm: MemorySwarm, model_folder: Path, kind: str
) -> None:
    """The next server might show an old receipt. Its session goes on, and the client relays."""
    bans, route, recoveries = generated(swarm, model_folder, Lies(OTHERS[kind]))
    assert bans == set()
    assert route == [LIAR.peer_id, STRANGER.peer_id] and recoveries == 0


def test_who_pushes_an_old_output_again_is_refused(swarm: MemorySwarm, model_folder: Path) -> None:
    """So that a server which signs for one has made that up."""
    bans, route, recoveries = generated(swarm, model_folder, Lies(lambda receipt, before: before or receipt))
    assert bans == set() and route == [LIAR.peer_id, STRANGER.peer_id] and recoveries == 0


@pytest.mark.parametrize("by", [None, STRANGER, "an earlier step's"])
def test_who_invents_a_push_does_not_blame_the_server_before(
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


def test_who_shows_no_receipt_is_left_and_not_blamed(
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


def test_a_server_that_was_misled_is_asked_anew_once() -> None:
    state, action = next_action(StepState("pushed"), Misled(proved=False))
    assert action == Send(anew=True) and state.phase == "sending"
    state, action = next_action(replace(state, phase="sent"), Misled(proved=False))
    assert action is Recover.REPLACE


def test_the_server_before_is_replaced_once_it_is_proved() -> None:
    state, action = next_action(StepState("pushed"), Misled(proved=True))
    assert action is Recover.REPLACE and state.phase == "replacing"
