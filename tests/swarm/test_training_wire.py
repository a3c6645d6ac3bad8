"""What a live server says to those who train wrongly, and that it answers the next one as before."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch

from petalnode.crypto.receipts import NO_RECEIPT
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import PeerError
from petalnode.protocols.inference import Refusal, receipt_from_wire
from petalnode.protocols.training import (
    BACKWARD,
    FORWARD,
    NOTHING_KEPT,
    BatchFrames,
    BatchProtocol,
    hash_of_batch,
    hash_of_keep,
    hash_of_payloads,
    receive_pieces,
    send_in_pieces,
)
from tests.messages import batch_opening, tensor
from tests.swarm.memory_pool import MemoryPool
from tests.swarm.raw import HIDDEN, TIMEOUT, Run, values

BAD, LONG, UNSUPPORTED = wire.ERROR_BAD_REQUEST, wire.ERROR_TOO_LONG, wire.ERROR_UNSUPPORTED
_right_answers: list[list[bytearray]] = []


@pytest.fixture(scope="module")
def server(pool: MemoryPool) -> MemoryServer:
    started = pool.start("2:4", cache_tokens=100_000)
    started.ready  # noqa: B018  (waits)
    return started


class RawBatchStream:
    """One stream of batch requests to the server that `ready` speaks of."""

    def __init__(self, stream: BatchFrames, ready: dict[str, Any]) -> None:
        self.stream = stream
        self.nonce = os.urandom(16)
        self.granted = wire.BatchGranted()
        self._ready = ready

    @classmethod
    async def opened(
        cls, swarm: Swarm, ready: dict[str, Any], protocol: BatchProtocol, **fields: Any
    ) -> RawBatchStream:
        swarm.host.remember(ready["peer_id"], ready["addrs"])
        stream = await swarm.new_stream(ready["peer_id"], protocol, timeout=TIMEOUT)
        batches = cls(stream, ready)
        await batches.open(**fields)
        return batches

    async def open(self, **fields: Any) -> None:
        start, end = fields.pop("span", self._ready["blocks"])
        usual = {"model_version": bytes.fromhex(self._ready["model_version"]), "nonce": self.nonce}
        opening = batch_opening(span=wire.Span(start=start, end=end), **usual | fields)
        await self.send(wire.BatchFrame(open=opening))
        frame, _ = await self.stream.receive(timeout=TIMEOUT)
        _raise(frame)
        self.granted = frame.granted

    async def send(self, frame: wire.BatchFrame, payloads: Sequence[bytes] = ()) -> None:
        await send_in_pieces(self.stream, frame, payloads, timeout=TIMEOUT)

    async def keep(self, payload: bytes, shape: Sequence[int], number: int = 1, name: str = "prompts") -> wire.Keep:
        keep = wire.Keep(number=number, names=[name], tensors=[tensor(*shape, nbytes=len(payload))])
        await self.send(wire.BatchFrame(keep=keep), [payload])
        return keep

    async def ask(self, *payloads: bytes, sequence: int = 1, **fields: Any) -> wire.BatchRequest:
        shape = fields.pop("shape", None)
        tensors = [
            tensor(*(shape or [1, len(payload) // (4 * HIDDEN), HIDDEN]), nbytes=len(payload)) for payload in payloads
        ]
        request = wire.BatchRequest(sequence=sequence, tensors=tensors, **fields)
        await self.send(wire.BatchFrame(work=request), payloads)
        return request

    async def begin(self, hidden: bytes, sequence: int = 1) -> wire.BatchRequest:
        """Sends a request without its gradient."""
        tensors = [tensor(1, len(hidden) // (4 * HIDDEN), HIDDEN)] * 2
        request = wire.BatchRequest(sequence=sequence, tensors=tensors, gradient_follows=True)
        await self.send(wire.BatchFrame(work=request), [hidden])
        return request

    async def reply(self) -> tuple[wire.BatchReply, list[bytearray]]:
        frame, _ = await self.stream.receive(timeout=TIMEOUT)
        _raise(frame)
        sizes = [tensor.nbytes for tensor in frame.reply.tensors]
        return frame.reply, await receive_pieces(self.stream, sizes, timeout=TIMEOUT)


def _raise(frame: wire.BatchFrame) -> None:
    if frame.WhichOneof("body") == "error":
        raise Refusal.from_wire(frame.error)


@pytest.fixture(autouse=True)
def _the_server_lives_on(server: MemoryServer, run: Run) -> Iterator[None]:
    """After whatever a test did to it, the same server answers the same question with the same bytes."""
    yield

    async def answer(node: Swarm) -> list[bytearray]:
        batches = await RawBatchStream.opened(node, server.ready, BACKWARD)
        await batches.ask(values(3), values(3, seed=1))
        _, payloads = await batches.reply()
        await batches.send(wire.BatchFrame(close=wire.Close()))
        return payloads

    _right_answers.append(run(answer))
    assert server.alive
    assert _right_answers[-1] == _right_answers[0]


@pytest.mark.parametrize("protocol", [FORWARD, BACKWARD])
@pytest.mark.parametrize(
    ("fields", "code", "says"),
    [
        ({"model_version": bytes(32)}, wire.ERROR_UNKNOWN_MODEL, "tiny-llama"),
        ({"model_version": b"short"}, BAD, "32 bytes"),
        ({"span": (0, 2)}, wire.ERROR_SPAN_NOT_HOSTED, "0:2"),
        ({"span": (3, 3)}, BAD, "3:3"),
        ({"codec": "zip"}, UNSUPPORTED, "zip"),
        ({"activation_dtype": "int8"}, UNSUPPORTED, "int8"),
        ({"protocol_version": 9}, UNSUPPORTED, "9"),
        ({"nonce": b""}, BAD, "nonce"),
    ],
)
async def test_openings_that_are_refused(
    protocol: BatchProtocol, fields: dict[str, Any], code: int, says: str, server: MemoryServer, raw_node: Swarm
) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        await RawBatchStream.opened(raw_node, server.ready, protocol, **fields)
    assert caught.value.code == code


NAN = torch.full((3, HIDDEN), float("nan")).numpy().tobytes()
FORWARDS: dict[str, tuple[int, str, tuple[bytes, ...], dict[str, Any]]] = {
    "NaN": (BAD, "NaN", (NAN,), {}),
    "another shape": (BAD, "shape", (values(4),), {"shape": [1, 2, 2 * HIDDEN]}),
    "fewer bytes": (BAD, "bytes", (values(4),), {"shape": [1, 5, HIDDEN]}),
    "too many tokens": (LONG, "1024", (values(1100),), {"shape": [2, 550, HIDDEN]}),
    "longer than the model": (LONG, "4096", (values(4097),), {}),
    "no tensor": (BAD, "tensors", (), {}),
    "two tensors": (BAD, "tensors", (values(3), values(3)), {}),
    "another sequence": (BAD, "came after", (values(3),), {"sequence": 2}),
    "a mask of another size": (BAD, "mask", (values(3),), {"mask": b"ab"}),
    "positions beyond": (BAD, "positions", (values(3),), {"positions": [1, 2, 4096]}),
    "nothing kept": (BAD, "nothing is kept", (values(3),), {"kept": 1}),
}


@pytest.mark.parametrize("case", FORWARDS)
async def test_batch_requests_that_are_refused(case: str, server: MemoryServer, raw_node: Swarm) -> None:
    code, says, payloads, fields = FORWARDS[case]
    batches = await RawBatchStream.opened(raw_node, server.ready, FORWARD)
    await batches.ask(*payloads, **fields)
    with pytest.raises(Refusal, match=says) as caught:
        await batches.reply()
    assert caught.value.code == code
    with pytest.raises(PeerError):  # and the stream is over
        await batches.stream.receive(timeout=TIMEOUT)


async def test_a_gradient_that_is_refused(server: MemoryServer, raw_node: Swarm) -> None:
    for gradient, says in ((NAN, "gradient"), (values(4), "gradient of")):
        batches = await RawBatchStream.opened(raw_node, server.ready, BACKWARD)
        await batches.ask(values(3), gradient)
        with pytest.raises(Refusal, match=says):
            await batches.reply()


@pytest.mark.parametrize(
    ("payload", "shape", "how", "code", "says"),
    [
        (values(4), [2, 1, 2, HIDDEN], {"name": "weights"}, UNSUPPORTED, "weights"),
        (values(4), [2, 1, 2, HIDDEN], {"number": 2}, BAD, "Keep 2"),
        (values(4), [1, 2, 2, HIDDEN], {}, BAD, "prompts of"),
        (NAN, [1, 1, 3, HIDDEN], {}, BAD, "prompts of"),
        (2 * NAN, [2, 1, 3, HIDDEN], {}, BAD, "NaN"),
    ],
)
async def test_what_is_not_kept(
    payload: bytes, shape: list[int], how: dict[str, Any], code: int, says: str, server: MemoryServer, raw_node: Swarm
) -> None:
    batches = await RawBatchStream.opened(raw_node, server.ready, FORWARD)
    await batches.keep(payload, shape, **how)
    with pytest.raises(Refusal, match=says) as caught:
        await batches.reply()
    assert caught.value.code == code


async def test_the_answers_before_an_error_are_given(server: MemoryServer, raw_node: Swarm) -> None:
    batches = await RawBatchStream.opened(raw_node, server.ready, FORWARD)
    for sequence in (1, 2):
        await batches.ask(values(3), sequence=sequence)
    await batches.ask(NAN, sequence=3)
    for sequence in (1, 2):
        assert (await batches.reply())[0].sequence == sequence
    with pytest.raises(Refusal, match="NaN"):
        await batches.reply()


async def test_more_batch_requests_than_credits_are_refused(server: MemoryServer, raw_node: Swarm) -> None:
    batches = await RawBatchStream.opened(raw_node, server.ready, BACKWARD)
    answers: list[int] = []

    async def flood() -> None:
        # All at once and each of them long, so that the fifth is there before the first is done.
        with suppress(PeerError):
            for sequence in range(1, 13):
                await batches.ask(values(1500), values(1500), sequence=sequence)
        while True:
            answers.append((await batches.reply())[0].sequence)

    with pytest.raises(Refusal, match="at once") as caught:
        await flood()
    assert caught.value.code == wire.ERROR_BUSY
    assert answers == list(range(1, len(answers) + 1)) and batches.granted.credits <= len(answers) < 12


async def test_receipts_are_for_what_was_asked_and_answered(server: MemoryServer, raw_node: Swarm) -> None:
    batches = await RawBatchStream.opened(raw_node, server.ready, BACKWARD)
    assert (batches.granted.dtype, batches.granted.quantisation) == ("float32", "none")
    prompts = values(2 * 2)
    keep = await batches.keep(prompts, [2, 1, 2, HIDDEN])
    kept = hash_of_keep(keep, hash_of_payloads([prompts]))
    previous = NO_RECEIPT
    for sequence, number in ((1, 0), (2, 1), (3, 1)):
        hidden, gradient = values(5), values(5, seed=sequence)
        request = await batches.ask(hidden, gradient, sequence=sequence, kept=number)
        reply, payloads = await batches.reply()
        receipt = receipt_from_wire(reply.receipt)
        expected = hash_of_batch(
            BACKWARD.id, request, hash_of_payloads([hidden, gradient]), kept if number else NOTHING_KEPT
        )
        assert receipt.is_signed_by(server.peer_id) and receipt.client == raw_node.peer_id
        assert receipt.request_hash == expected
        assert receipt.reply_hash == hash_of_payloads(payloads)
        assert (receipt.sequence, receipt.previous_receipt) == (sequence, previous)
        assert (receipt.nonce, receipt.session_epoch) == (batches.nonce, batches.granted.session_epoch)
        assert receipt.span == (2, 4)
        assert [list(tensor.shape) for tensor in reply.tensors] == [[1, 5, HIDDEN], [2, 1, 2, HIDDEN]][: 1 + number]
        previous = receipt.hash()


async def test_gradients_may_come_later_and_in_any_order(server: MemoryServer, raw_node: Swarm) -> None:
    hidden, gradients = values(5), [values(5, seed=seed) for seed in (1, 2)]
    batches = await RawBatchStream.opened(raw_node, server.ready, BACKWARD)
    assert batches.granted.gradient_may_follow
    for sequence, gradient in enumerate(gradients, start=1):
        await batches.ask(hidden, gradient, sequence=sequence)
    expected = [await batches.reply() for _ in gradients]
    batches = await RawBatchStream.opened(raw_node, server.ready, BACKWARD)
    sent = [await batches.begin(hidden, sequence=sequence) for sequence in (1, 2)]
    for sequence in (2, 1):
        frame = wire.BatchFrame(gradient=wire.Gradient(sequence=sequence))
        await batches.send(frame, [gradients[sequence - 1]])
    for request, gradient, (_, right) in zip(sent, gradients, expected, strict=True):
        reply, payloads = await batches.reply()
        assert payloads == right and reply.sequence == request.sequence
        receipt = receipt_from_wire(reply.receipt)
        assert receipt.is_signed_by(server.peer_id)
        assert receipt.request_hash == hash_of_batch(
            BACKWARD.id, request, hash_of_payloads([hidden, gradient]), NOTHING_KEPT
        )


async def test_gradients_that_are_refused(server: MemoryServer, raw_node: Swarm) -> None:
    batches = await RawBatchStream.opened(raw_node, server.ready, FORWARD)
    assert not batches.granted.gradient_may_follow
    await batches.ask(values(3), gradient_follows=True)
    with pytest.raises(Refusal, match="no gradient"):
        await batches.reply()
    for sequence, gradient, says in ((2, values(3), "no batch request 2"), (1, NAN, "the gradient")):
        batches = await RawBatchStream.opened(raw_node, server.ready, BACKWARD)
        await batches.begin(values(3))
        await batches.send(wire.BatchFrame(gradient=wire.Gradient(sequence=sequence)), [gradient])
        with pytest.raises(Refusal) as caught:
            await batches.reply()
        assert says in caught.value.message or "given up" in caught.value.message


async def test_kept_tensors_are_dropped_when_newer_ones_come(server: MemoryServer, raw_node: Swarm) -> None:
    batches = await RawBatchStream.opened(raw_node, server.ready, FORWARD)
    for number in range(1, 6):
        await batches.keep(values(4, seed=number), [2, 1, 2, HIDDEN], number)
    await batches.ask(values(5), kept=5)
    await batches.ask(values(5), kept=2, sequence=2)
    first, second = [(await batches.reply())[1] for _ in range(2)]
    assert first != second
    await batches.ask(values(5), kept=1, sequence=3)
    with pytest.raises(Refusal, match="nothing is kept under number 1"):
        await batches.reply()


async def test_client_leaving_mid_batch_costs_nothing(server: MemoryServer, raw_node: Swarm) -> None:
    for pieces in (0, 1):
        batches = await RawBatchStream.opened(raw_node, server.ready, FORWARD)
        payload = values(5)
        request = wire.BatchRequest(sequence=1, tensors=[tensor(1, 5, HIDDEN)])
        await batches.stream.send(wire.BatchFrame(work=request), timeout=TIMEOUT)
        for _ in range(pieces):
            piece = wire.BatchFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=100)])
            await batches.stream.send(piece, [payload[:100]], timeout=TIMEOUT)
        await batches.stream.reset()
