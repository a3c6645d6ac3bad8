"""Targets that are the handlers of one server, with real blocks of a tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import torch
import trio

from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.models.adapter import digests_of
from petalnode.node.server.budget import MemoryBudget
from petalnode.node.server.compute_thread import ComputeThread
from petalnode.node.server.requests import adapters as adapters_module
from petalnode.node.server.requests import request as request_module
from petalnode.node.server.requests import service as service_module
from petalnode.node.server.requests.adapters import Adapters
from petalnode.node.server.requests.admission import Hosted
from petalnode.node.server.requests.request import RequestContext
from petalnode.node.server.requests.service import RequestService
from petalnode.protocols import ids
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.adapter import ADAPTER, hash_of_adapter, hashes_of_blocks
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import (
    INFERENCE,
    PUSH,
    Refusal,
    receipt_from_wire,
    receipt_to_wire,
    sha256,
)
from petalnode.protocols.tensors import encode
from petalnode.protocols.training import BACKWARD, FORWARD
from tests.attacks.one_server import NobodyNext
from tests.fuzz import corpus
from tests.fuzz.corpus import ATTACKER, EPOCH, NONCE, OTHER, SERVER, VERSION
from tests.fuzz.harness import Target
from tests.fuzz.mutation import Mutator
from tests.fuzz.parsers import parsed
from tests.fuzz.streams import Conversation, Frame, Handlers, Talk, conversation
from tests.inspection import adapters_coming, budgets_of, open_batches
from tests.messages import batch_opening
from tests.node_inspection import held, logged
from tests.tiny_models import HIDDEN, NUM_BLOCKS, save_tiny

CACHE_TOKENS: Final = 10_000
CROSSING: Final = "gemma4_shared"
MACHINE: Final = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=256 << 20))
"""In place of psutil."""


class InPlace(ComputeThread):
    """Computes in the task that waits, since the clock jumps while a thread computes."""

    def start(self) -> None:
        self._token = trio.lowlevel.current_trio_token()

    async def stop(self) -> None: ...

    def close(self, session: Any) -> None:
        super().close(session)
        self._turn()

    async def _result(self, pending: Any, item: Any) -> Any:
        self._depth += pending.counts
        self._queue.put(item)
        while not pending.done.is_set():
            await trio.lowlevel.checkpoint()
            self._turn()
        if isinstance(pending.value, BaseException):
            raise pending.value
        return pending.value

    async def _checked(self, pending: Any, step: Any, check: Any) -> Any:
        """The step is computed before its check, not beside it."""
        try:
            await self._result(pending, step)
        except Refusal:
            pass  # it is in `pending`, and counts less than what the check says
        try:
            check.check()
        except Exception:
            await self.call(step.undo)
            raise
        return await self._outcome(pending)

    def finish(self) -> None:
        """What was given up is dropped, as the thread would have done by itself."""
        while not self._queue.empty() or self._is_busy:
            self._turn()

    def _turn(self) -> None:
        if not self._queue.empty() or self._is_busy:
            self._drain_queue()
            self._run_turn()

    def _finish(self, pending: Any, value: object) -> None:
        pending.value = value
        self._depth -= pending.counts
        pending.done.set()


@cache
def blocks(kind: str = "llama") -> BlockSpan:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        save_tiny(kind, Path(folder))
        return load_span(Path(folder), Span(0, NUM_BLOCKS))


@asynccontextmanager
async def opened(kind: str = "llama") -> AsyncIterator[Talk]:
    """A server as `SpanServer` puts it together."""
    handlers, of_kind = Handlers(), blocks(kind)
    compute = InPlace(of_kind)
    compute.start()
    hosted = Hosted(VERSION, "tiny", NUM_BLOCKS, Span(0, NUM_BLOCKS), HIDDEN, "float32", "none", 256)
    hosted = replace(hosted, takes_groups=of_kind.takes_groups, boundaries=of_kind.stack.boundaries)
    context = RequestContext(hosted, compute, SERVER, pledger=partial(corpus.pledge_of, SERVER))
    cache_budget = MemoryBudget(CACHE_TOKENS)
    with (
        patch.object(service_module, "psutil", MACHINE),
        patch.object(adapters_module, "psutil", MACHINE),
        patch.object(request_module, "os", SimpleNamespace(urandom=lambda size: EPOCH[:size])),
    ):
        adapters = Adapters(context)
        service = RequestService(context, cache_budget, NobodyNext(), adapters)
        set_handler = handlers.streams.set_handler
        set_handler(INFERENCE, service.handle_session)
        set_handler(PUSH, service.handle_push)
        set_handler(FORWARD, service.handle_forward)
        set_handler(BACKWARD, service.handle_backward)
        set_handler(ADAPTER, adapters.handle)
        # Nothing waits in what the service cannot see: requests that count, and what budgets have lent.
        budgets = {
            "cache": cache_budget,
            **budgets_of(service, adapters),
        }

        def state() -> Mapping[str, int]:
            compute.finish()
            used = {name: budget.capacity - budget.free + held(budget) for name, budget in budgets.items()}
            counts = {
                "sessions": service.sessions + held(service),
                "batches": open_batches(service),
                "adapters on their way": adapters_coming(adapters) + held(adapters),
                "depth": compute.depth + held(compute) + held(compute.steps),
            }
            return {f"{name} used": amount for name, amount in used.items()} | counts

        yield Talk(lambda protocol: handlers.by_protocol[protocol], state, logged(handlers.streams))


# --- valid conversations


def _hidden(rows: int, tokens: int, width: int = HIDDEN) -> tuple[wire.Tensor, bytes]:
    values = torch.randn(rows, tokens, width, generator=torch.Generator().manual_seed(7))
    return encode(values, "none")


def _step(stream: str, sequence: int, position: int, tokens: int, width: int = HIDDEN, **fields: Any) -> Frame:
    tensor, payload = _hidden(2, tokens, width)
    step = wire.Step(**{"sequence": sequence, "position": position, "route_epoch": 1} | fields)
    return Frame(stream, wire.InferenceFrame(step=step, tensors=[tensor]), payload)


@cache
def _session() -> tuple[Frame, ...]:
    first, second = f"{INFERENCE.id} 1", f"{INFERENCE.id} 2"
    opening = corpus.opening()
    opening.ClearField("upstream")
    target = wire.PushTarget(peer_id=peer_id_to_bytes(OTHER.peer_id), nonce=NONCE, sequence=5)
    resume = wire.Resume(nonce=NONCE, session_epoch=EPOCH, answered=2, attempt=1)
    return (
        Frame(first, wire.InferenceFrame(open=opening)),
        _step(first, 1, 0, 3, groups=[0, 2, 1, 3, 2, 1]),
        _step(first, 2, 3, 1, reorder=[1, 0]),
        _step(first, 3, 4, 1, targets=[target]),
        _push(4, 5, 1),
        _step(first, 5, 2, 1, previous_receipt=b"r" * 32),
        _step(first, 5, 2, 1, previous_receipt=b"r" * 32),
        Frame(second, wire.InferenceFrame(resume=resume)),
        _step(second, 6, 3, 1),
        Frame(second, wire.InferenceFrame(close=wire.Close())),
    )


@cache
def _crossing() -> tuple[Frame, ...]:
    """At blocks whose tokens see each other in groups, get values for themselves and share keys and values."""
    stream, opening, boundaries = f"{INFERENCE.id} 1", corpus.opening(), blocks(CROSSING).stack.boundaries
    opening.ClearField("upstream")
    opening.span.start = 2
    width = boundaries.width(2)
    return (
        Frame(stream, wire.InferenceFrame(open=opening)),
        _step(stream, 1, 0, 4, width, groups=[0, 2, 1, 0, 3, 2, 1, 0]),
        _step(stream, 2, 4, 1, width, reorder=[1, 0]),
        _step(stream, 3, 5, 6, width, groups=[*[6, 5, 4, 3, 2, 1], *[2, 1] * 3]),
        _step(stream, 4, 4, 2, width),
        _step(stream, 5, 6, 1, boundaries.width(0)),
        Frame(stream, wire.InferenceFrame(close=wire.Close())),
    )


def _push(sequence: int, position: int, tokens: int) -> Frame:
    tensor, payload = _hidden(2, tokens)
    receipt = corpus.receipt(client=ATTACKER.peer_id, reply_hash=sha256(payload), sequence=sequence)
    step = wire.Step(sequence=sequence, position=position, route_epoch=1, previous_receipt=receipt.hash())
    push = wire.Push(
        client=peer_id_to_bytes(ATTACKER.peer_id), nonce=NONCE, step=step, receipt=receipt_to_wire(receipt)
    )
    return Frame(f"{PUSH.id} 1", wire.PushFrame(push=push, tensors=[tensor]), payload)


def _signed_push(mutator: Mutator, data: bytes) -> bytes:
    """The receipt of a changed push, signed by the attacker, and named by the step."""
    frame = parsed(wire.PushFrame, data)
    if frame is None or frame.WhichOneof("body") != "push" or mutator.chance(0.4):
        return data
    try:
        receipt = receipt_from_wire(frame.push.receipt).signed(ATTACKER)
    except ValueError:
        return data
    frame.push.receipt.CopyFrom(receipt_to_wire(receipt))
    frame.push.step.previous_receipt = receipt.hash()
    return bytes(frame.SerializeToString())


def _pieces(stream: str, *payloads: bytes) -> Frame:
    tensors = [wire.Tensor(nbytes=len(payload)) for payload in payloads]
    return Frame(stream, wire.BatchFrame(piece=wire.Piece(), tensors=tensors), b"".join(payloads))


def _lora() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return {
        "2.self_attn.q_proj.lora_A": torch.randn(2, HIDDEN, generator=made),
        "2.self_attn.q_proj.lora_B": torch.randn(HIDDEN, 2, generator=made),
    }


@cache
def _batches(protocol: str) -> tuple[Frame, ...]:
    stream = f"{protocol} 1"
    backward = protocol == BACKWARD.id
    opening = batch_opening(ids.Span(2, 4), model_version=VERSION, nonce=NONCE)
    prompts = encode(torch.randn(2, 1, 2, HIDDEN, generator=torch.Generator().manual_seed(1)), "none")
    kept = {"prompts": prompts} | {name: encode(tensor, "none") for name, tensor in _lora().items()}
    keep = wire.Keep(number=1, names=list(kept), tensors=[tensor for tensor, _ in kept.values()])
    tensor, payload = _hidden(2, 4)
    tensors, payloads = [tensor] * (1 + backward), [payload] * (1 + backward)
    first = wire.BatchRequest(sequence=1, tensors=tensors, mask=b"\xff", positions=range(8), kept=1)
    frames = [
        Frame(stream, wire.BatchFrame(open=opening)),
        Frame(stream, wire.BatchFrame(keep=keep)),
        _pieces(stream, *(data for _, data in kept.values())),
        Frame(stream, wire.BatchFrame(work=first)),
        _pieces(stream, *payloads),
    ]
    if backward:
        later = wire.BatchRequest(sequence=2, tensors=tensors, gradient_follows=True)
        frames += [
            Frame(stream, wire.BatchFrame(work=later)),
            _pieces(stream, payload),
            Frame(stream, wire.BatchFrame(gradient=wire.Gradient(sequence=2))),
            _pieces(stream, payload),
        ]
    return (*frames, Frame(stream, wire.BatchFrame(close=wire.Close())))


def _offer(tensors: dict[str, torch.Tensor]) -> wire.Adapter:
    hashes = hashes_of_blocks(digests_of(tensors))
    return wire.Adapter(
        protocol_version=1,
        model_version=VERSION,
        span=wire.Span(start=1, end=4),
        hash=hash_of_adapter(hashes),
        blocks=[wire.AdapterBlock(block=number, hash=digest) for number, digest in hashes],
        names=list(tensors),
        tensors=[encode(tensor, "none")[0] for tensor in tensors.values()],
    )


@cache
def _adapter() -> tuple[Frame, ...]:
    stream, session = f"{ADAPTER.id} 1", f"{INFERENCE.id} 1"
    tensors = _lora()
    offer = _offer(tensors)
    opening = corpus.opening()
    opening.span.start, opening.span.end = 1, 4
    opening.adapter = offer.hash
    return (
        Frame(stream, wire.BatchFrame(adapter=offer)),
        _pieces(stream, *(encode(tensor, "none")[1] for tensor in tensors.values())),
        Frame(session, wire.InferenceFrame(open=opening)),
        _step(session, 1, 0, 2),
        Frame(session, wire.InferenceFrame(close=wire.Close())),
        Frame(stream, wire.BatchFrame(close=wire.Close())),
    )


def _rehashed(mutator: Mutator, data: bytes) -> bytes:
    """A changed offer under the hash of what it lists."""
    frame = parsed(wire.BatchFrame, data)
    if frame is None or frame.WhichOneof("body") != "adapter" or mutator.chance(0.3):
        return data
    frame.adapter.hash = hash_of_adapter([(block.block, block.hash) for block in frame.adapter.blocks])
    return bytes(frame.SerializeToString())


def _sessions_of(mutator: Mutator) -> Conversation:
    return conversation(mutator, _session(), _signed_push, shares=0.15)


def _crossing_of(mutator: Mutator) -> Conversation:
    return conversation(mutator, _crossing(), shares=0.15)


def _batches_of(mutator: Mutator) -> Conversation:
    protocol = mutator.random.choice((FORWARD.id, BACKWARD.id, BACKWARD.id))
    return conversation(mutator, _batches(protocol), shares=0.12)


def _adapters_of(mutator: Mutator) -> Conversation:
    return conversation(mutator, _adapter(), _rehashed, shares=0.25)


LONGEST: Final = 2400.0
"""Seconds: a session that asks for nothing is kept for half an hour."""

TARGETS: Final[tuple[Target, ...]] = (
    Target("sessions and pushes", 3, _sessions_of, opened, LONGEST, peak=16 << 20),
    Target("sessions with groups", 2, _crossing_of, partial(opened, CROSSING), LONGEST, peak=16 << 20),
    Target("batches", 2, _batches_of, opened, LONGEST, peak=16 << 20),
    Target("adapters from clients", 2, _adapters_of, opened, LONGEST, peak=16 << 20),
)
