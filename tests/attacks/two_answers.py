"""A server that signs another answer than it has sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import Receipt
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.testing.memory_servers import MemorySwarm
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import INFERENCE, PUSH, receipt_from_wire, receipt_to_wire, sha256
from tests.inspection import client_of, session_of
from tests.swarm.watched_streams import Hook, watch_opened, watch_served
from tests.tiny_models import load_whole

LIAR = Identity.from_seed(bytes(range(21, 53)))
STRANGER = Identity.from_seed(bytes(range(22, 54)))
TOKENS = 16
PLAIN: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}


@dataclass
class Lies:
    """What the liar pushes in the place of what it answers. `told`: how often; `most`: how often at most. `change`:
    what it changes in one push beside that, and `changed`: the number of that step."""

    receipt: Callable[[Receipt, Receipt | None], Receipt] = lambda receipt, before: receipt
    most: int = 1
    told: int = 0
    change: Callable[[wire.PushFrame], None] | None = None
    changed: list[int] = field(default_factory=list)
    active: bool = False
    before: Receipt | None = None

    def push(self, stream: Any, frame: wire.PushFrame, payloads: Sequence[Any]) -> Sequence[Any]:
        """What goes out in the place of a push and its payloads."""
        receipt = receipt_from_wire(frame.push.receipt)
        before, self.before = self.before, receipt
        if self.active and self.told < self.most:
            self.told += 1
            payloads = [bytes(len(payloads[0]))]
            said = self.receipt(replace(receipt, reply_hash=sha256(payloads[0])), before)
            frame.push.receipt.CopyFrom(receipt_to_wire(said))
            frame.push.step.previous_receipt = said.hash()
        if self.active and self.change is not None and not self.changed:
            self.changed.append(frame.push.step.sequence)
            self.change(frame)
        return payloads


def banned(model: Any) -> set[str]:
    return {ban.peer_id for ban in client_of(model).swarm.trust.bans()}


@cache
def answered(folder: Path, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A prompt, and what plain transformers says to it."""
    prompt = torch.randint(3, 100, (rows, 9), generator=torch.Generator().manual_seed(3))
    return prompt, load_whole(folder).generate(prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, **PLAIN)


def generated(
    swarm: MemorySwarm,
    folder: Path,
    lies: Lies,
    done: Callable[[], bool] | None = None,
    rows: int = 1,
    answers: Hook | None = None,
) -> tuple[set[str], list[str], int]:
    """Who is banned, the route in the end, and the recoveries; the answer has to be that of plain transformers.

    Generates until `done`: until all lies are told, if that is None. A push comes when its stream is open. `answers`
    sees what the second server says.
    """
    liar = swarm.start(folder, "0:3", identity=LIAR, prepare=lambda node: watch_opened(node, PUSH, sent=lies.push))
    known = partial(watch_served, protocol=INFERENCE, sent=answers)
    honest = swarm.start(folder, "3:6", identity=STRANGER, prepare=known)
    assert liar.ready and honest.ready
    prompt, expected = answered(folder, rows)
    with (
        swarm.open_model(AutoDistributedModelForCausalLM, folder) as model,
        model.inference_session(200) as session,
    ):
        first = model.generate(prompt, session=session, max_new_tokens=2, min_new_tokens=2, **PLAIN)
        assert swarm.start(folder, "0:3").ready and swarm.start(folder, "3:6").ready
        lies.active = True
        more = TOKENS - 2
        while True:
            output = model.generate(first, session=session, max_new_tokens=more, min_new_tokens=more, **PLAIN)
            assert torch.equal(output, expected)
            if (lies.told == lies.most and bool(lies.changed) == bool(lies.change)) if done is None else done():
                break
            session.position = first.shape[1] - 1
            session.tokens = first[:, : session.position].tolist()
        return banned(model), [hop.peer_id for hop in session_of(session).route], session.recoveries


def signed_again(receipt: Receipt, before: Receipt | None) -> Receipt:
    return receipt.signed(LIAR)


OTHERS: dict[str, Callable[[Receipt, Receipt | None], Receipt]] = {
    "for another step": lambda receipt, before: replace(receipt, sequence=receipt.sequence + 100).signed(LIAR),
    "for another session": lambda receipt, before: replace(receipt, session_epoch=bytes(16)).signed(LIAR),
    "after another receipt": lambda receipt, before: replace(receipt, previous_receipt=bytes(32)).signed(LIAR),
}
