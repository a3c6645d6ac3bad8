"""What a live server says to those who bring it adapters that cannot be, and that it keeps none longer than it must."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trio

from petalnode.node.models.adapter import Adapter
from petalnode.node.swarm.swarm import Swarm
from petalnode.node.testing.memory_servers import MemoryServer
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.adapter import ADAPTER
from petalnode.protocols.framing import PeerError
from petalnode.protocols.inference import receipt_from_wire
from petalnode.protocols.tensors import encode
from petalnode.protocols.training import BatchFrames, send_pieces
from tests.messages import tensor
from tests.swarm.memory_pool import MemoryPool, raw_node_of
from tests.swarm.raw import HIDDEN, TIMEOUT, RawSession, values

BAD, MODEL, SPAN = wire.ERROR_BAD_REQUEST, wire.ERROR_UNKNOWN_MODEL, wire.ERROR_SPAN_NOT_HOSTED
LONG, UNSUPPORTED = wire.ERROR_TOO_LONG, wire.ERROR_UNSUPPORTED
NAME = "3.self_attn.o_proj"


@pytest.fixture(scope="module")
def server(pool: MemoryPool) -> MemoryServer:
    started = pool.start("2:4")
    started.ready  # noqa: B018  (waits)
    return started


def adapter(scale: float = 1.0, rank: int = 2) -> Adapter:
    generator = torch.Generator().manual_seed(0)
    a, b = (scale * torch.randn(shape, generator=generator) for shape in ((rank, HIDDEN), (HIDDEN, rank)))
    # Block 5 is of another server: only its hash comes here.
    elsewhere = {f"5.self_attn.o_proj.lora_{part}": torch.ones(1, 1) for part in "AB"}
    return Adapter.of("mine", {f"{NAME}.lora_A": a, f"{NAME}.lora_B": b, **elsewhere})


def one_infinite() -> Adapter:
    """An adapter of which one value is infinite."""
    tensors = {name: tensor.clone() for name, tensor in adapter().tensors.items()}
    tensors[f"{NAME}.lora_B"][3, 1] = float("inf")
    return Adapter.of("mine", tensors)


def offer(content: Adapter, ready: dict[str, Any], **fields: Any) -> tuple[wire.Adapter, list[bytes]]:
    tensors = {name: encode(tensor, "none") for name, tensor in content.tensors.items() if name.startswith("3.")}
    usual: dict[str, Any] = {
        "protocol_version": 1,
        "model_version": bytes.fromhex(ready["model_version"]),
        "span": wire.Span(start=2, end=4),
        "hash": content.hash,
        "blocks": [wire.AdapterBlock(block=block, hash=value) for block, value in content.blocks],
        "names": list(tensors),
        "tensors": [header for header, _ in tensors.values()],
    }
    return wire.Adapter(**usual | fields), [payload for _, payload in tensors.values()]


async def opened(swarm: Swarm, ready: dict[str, Any]) -> BatchFrames:
    swarm.host.remember(ready["peer_id"], ready["addrs"])
    return await swarm.new_stream(ready["peer_id"], ADAPTER, timeout=TIMEOUT)


async def answer(stream: BatchFrames) -> wire.BatchFrame:
    frame, _ = await stream.receive(timeout=TIMEOUT)
    return frame


async def bring(swarm: Swarm, ready: dict[str, Any], content: Adapter, **fields: Any) -> tuple[BatchFrames, Any]:
    """The stream, and the last answer on it."""
    stream = await opened(swarm, ready)
    message, payloads = offer(content, ready, **fields)
    await stream.send(wire.BatchFrame(adapter=message), timeout=TIMEOUT)
    said = await answer(stream)
    if said.WhichOneof("body") == "adapter_state" and not said.adapter_state.held:
        await send_pieces(stream, payloads, timeout=TIMEOUT)
        said = await answer(stream)
    return stream, said


A, B = tensor(2, HIDDEN), tensor(HIDDEN, 2)
NAMES = [f"{NAME}.lora_A", f"{NAME}.lora_B"]
OFFERS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "another protocol": (UNSUPPORTED, "speaks 1", {"protocol_version": 2}),
    "another model version": (MODEL, "tiny-llama version", {"model_version": bytes(32)}),
    "blocks that are elsewhere": (SPAN, "2:4 are here", {"span": wire.Span(start=1, end=4)}),
    "no blocks": (BAD, "3:3", {"span": wire.Span(start=3, end=3)}),
    "a hash of something else": (BAD, "not that of its blocks", {"hash": bytes(32)}),
    "too few names": (BAD, "a name of its own", {"names": NAMES[:1]}),
    "one name twice": (BAD, "a name of its own", {"names": [NAMES[0], NAMES[0]]}),
    "a wrong shape": (BAD, "lora_A takes", {"tensors": [tensor(2, 63), B]}),
    "two ranks": (BAD, "lora_A takes", {"tensors": [tensor(3, HIDDEN), B]}),
    "no such layer": (BAD, "no linear layer 'mlp'", {"names": ["3.mlp.lora_A", "3.mlp.lora_B"]}),
    "another block": (BAD, "not of blocks 2:4", {"names": ["1.x.lora_A", "1.x.lora_B"]}),
    "no name of anything": (BAD, "nothing of a block", {"names": ["weights", "biases"]}),
    "sizes that do not fit": (BAD, "cannot be shape", {"tensors": [tensor(2, HIDDEN), tensor(HIDDEN, 2)], "size": 4}),
    "too large": (LONG, "256 MiB are allowed", {"tensors": [tensor(1 << 21, HIDDEN), B]}),
    "a tensor too few": (BAD, "not all that the adapter has", {"names": [], "tensors": []}),
}


@pytest.mark.parametrize("name", OFFERS)
async def test_an_adapter_that_cannot_be_is_refused(name: str, server: MemoryServer, raw_node: Swarm) -> None:
    code, says, fields = OFFERS[name]
    fields = dict(fields)
    if fields.pop("size", None):
        fields["tensors"][0].nbytes = 4
    stream, said = await bring(raw_node, server.ready, adapter(), **fields)
    assert said.WhichOneof("body") == "error", said
    assert said.error.code == code and says in said.error.message
    with pytest.raises(PeerError):
        await answer(stream)
    assert server.alive


async def test_other_tensors_than_those_of_hash_are_refused(server: MemoryServer, raw_node: Swarm) -> None:
    for content, says in (
        (adapter(2.0), "not those of its hash"),
        (adapter(float("nan")), "NaN"),
        (one_infinite(), "NaN"),
    ):
        mine = adapter()
        blocks = [wire.AdapterBlock(block=block, hash=value) for block, value in mine.blocks]
        _, said = await bring(raw_node, server.ready, content, hash=mine.hash, blocks=blocks)
        assert said.error.code == BAD and says in said.error.message


async def test_it_is_held_as_long_as_its_sessions(server: MemoryServer, raw_node: Swarm) -> None:
    mine = adapter()
    session = await RawSession.connect(raw_node, server.ready)
    refused = await session.open(adapter=mine.hash)
    assert refused.error.code == UNSUPPORTED and mine.hash.hex()[:12] in refused.error.message

    stream, said = await bring(raw_node, server.ready, mine)
    assert said.adapter_state.held
    again, said = await bring(raw_node, server.ready, mine)  # it is here: no pieces are asked for
    assert said.adapter_state.held
    session = await RawSession.opened(raw_node, server.ready, adapter=mine.hash)
    for opened in (stream, again):
        await opened.send(wire.BatchFrame(close=wire.Close()), timeout=TIMEOUT)
        await opened.close()
    plain = await RawSession.opened(raw_node, server.ready)
    frame, (changed,) = await session.step(1, 0, values(3))
    assert receipt_from_wire(frame.reply.receipt).adapter == mine.hash
    frame, (unchanged,) = await plain.step(1, 0, values(3))
    assert receipt_from_wire(frame.reply.receipt).adapter == b""
    assert changed != unchanged
    second = await RawSession.opened(raw_node, server.ready, adapter=mine.hash)  # the first session holds it
    for opened in (session, second, plain):
        await opened.close()
    with trio.fail_after(TIMEOUT):
        while True:
            late = await RawSession.connect(raw_node, server.ready)
            frame = await late.open(adapter=mine.hash)
            if frame.WhichOneof("body") == "error":
                break
            await late.close()
            await trio.sleep(0.05)
    assert frame.error.code == UNSUPPORTED


async def test_it_is_nobody_else_s(pool: MemoryPool, server: MemoryServer, raw_node: Swarm) -> None:
    mine = adapter(3.0)
    _, said = await bring(raw_node, server.ready, mine)
    assert said.adapter_state.held
    session = await RawSession.connect(raw_node_of(pool), server.ready)
    assert (await session.open(adapter=mine.hash)).error.code == UNSUPPORTED
