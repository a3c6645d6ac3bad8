"""Attacks on what a server computes: sessions, pushes, batches, adapters."""

from __future__ import annotations

import os
import struct
from contextlib import suppress
from functools import partial
from typing import Any

import trio

from petalnode.crypto.identity import peer_id_to_bytes
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.adapter import ADAPTER
from petalnode.protocols.framing import MessageStream, PeerError, varint
from petalnode.protocols.inference import INFERENCE, PUSH
from petalnode.protocols.training import BACKWARD, FORWARD, BatchProtocol
from tests import messages

from .keys import PATIENCE, Key, Victim, until_reset

LONG_PROMPT = 512
"""Tokens of a prompt that is abandoned."""


def opening(victim: Victim, **fields: Any) -> wire.Open:
    """The terms of a session that a server grants."""
    return messages.opening(**_served(victim) | fields)


def _served(victim: Victim) -> dict[str, Any]:
    """What an opening says of the model and the blocks, under a nonce of its own."""
    start, end = victim.served.get("blocks", (0, 1))
    version = bytes.fromhex(victim.served.get("model_version", "11" * 32))
    return {"model_version": version, "span": wire.Span(start=start, end=end), "nonce": os.urandom(16)}


async def session(key: Key, victim: Victim, **fields: Any) -> MessageStream[wire.InferenceFrame]:
    """An open session.

    Raises:
        PeerError: it is refused.
    """
    stream = await key.messages(victim, INFERENCE)
    await stream.send(wire.InferenceFrame(open=opening(victim, **fields)), timeout=PATIENCE)
    frame, _ = await stream.receive(timeout=PATIENCE)
    if not frame.HasField("granted"):
        await stream.reset()
        raise PeerError("refused", victim.peer_id)
    return stream


def step(key: Key, victim: Victim, sequence: int, position: int, tokens: int = 1) -> tuple[wire.InferenceFrame, bytes]:
    """A step of small random hidden states."""
    values = [key.random.gauss(0, 0.1) for _ in range(victim.hidden)]
    payload = struct.pack(f"<{victim.hidden}f", *values) * tokens
    asked = wire.Step(sequence=sequence, position=position, route_epoch=1)
    return wire.InferenceFrame(step=asked, tensors=[messages.tensor(1, tokens, victim.hidden)]), payload


async def hoarded_cache(key: Key, victim: Victim) -> None:
    """All the cache that is granted, in long sessions that are used now and then."""
    held = []
    try:
        with suppress(PeerError):
            for _ in range(40):
                held.append(await session(key, victim, max_length=2048))
        if not held:
            raise PeerError("refused", victim.peer_id)
        for number in range(1, 20):
            for stream in held:
                with suppress(PeerError):
                    frame, payload = step(key, victim, number, number - 1)
                    await stream.send(frame, [payload], timeout=PATIENCE)
            await trio.sleep(1.0)
    finally:
        for stream in held:
            await stream.reset()


async def busy_session(key: Key, victim: Victim) -> None:
    """A client like others that never stops; with its twenty keys, twenty of them at each server."""
    async with until_reset(session(key, victim, max_length=512)) as stream:
        for number in range(1, 500):
            frame, payload = step(key, victim, number, number - 1)
            await stream.send(frame, [payload], timeout=PATIENCE)
            await stream.receive(timeout=PATIENCE)


async def abandoned_prompts(key: Key, victim: Victim) -> None:
    """Long prompts, each broken off when it was sent."""
    async with until_reset(session(key, victim, max_length=2 * LONG_PROMPT)) as stream:
        frame, payload = step(key, victim, 1, 0, LONG_PROMPT)
        await stream.send(frame, [payload], timeout=PATIENCE)


async def unread_before_permission(key: Key, victim: Victim) -> None:
    """As many streams as there can be, each with all the bytes that its window takes, of a message that never ends."""
    streams = []
    try:
        for _ in range(64):
            stream = await key.open(victim, INFERENCE.id)
            streams.append(stream)
            frame, _ = step(key, victim, 1, 0, 1)
            frame.tensors[0].nbytes = 64 << 20
            data = frame.SerializeToString()
            with trio.move_on_after(0.2):
                await stream.write(varint(len(data)) + data)
                while True:
                    await stream.write(bytes(64 << 10))
        await trio.sleep(5.0)
    finally:
        for stream in streams:
            await stream.reset()


async def large_payloads(key: Key, victim: Victim) -> None:
    """The largest steps that were granted, in part, at the least rate; then no more."""
    frame, _ = step(key, victim, 1, 0, 1)
    frame.tensors[0].shape[:] = [1, 2048, victim.hidden]
    frame.tensors[0].nbytes = 4 * 2048 * victim.hidden
    data = frame.SerializeToString()
    async with until_reset(session(key, victim, max_length=2048)) as stream:
        raw = stream._raw
        await raw.write(varint(len(data)) + data)
        for _ in range(60):
            await raw.write(bytes(32 << 10))
            await trio.sleep(0.1)
        await trio.sleep(5.0)


async def wrong_steps(key: Key, victim: Victim) -> None:
    """Steps out of order, of wrong shapes, or with no numbers."""
    frame, payload = step(key, victim, key.random.choice((1, 2, 2**60)), key.random.choice((0, 5, 2**31)))
    kind = key.random.randrange(4)
    if kind == 0:
        payload = b"\xff" * len(payload)
    elif kind == 1:
        frame.tensors[0].shape[:] = [2**31, 2**31, victim.hidden]
    elif kind == 2:
        frame.tensors[0].dtype = "x" * 1000
    else:
        frame.step.previous_receipt = bytes(32)
    async with until_reset(session(key, victim)) as stream:
        await stream.send(frame, [payload], timeout=PATIENCE)
        await stream.receive(timeout=PATIENCE)


async def wrong_pushes(key: Key, victim: Victim) -> None:
    """Pushes to sessions that are none, and of receipts that nobody signed."""
    frame, payload = step(key, victim, 1, 0, 16)
    push = wire.Push(client=peer_id_to_bytes(key.identity.peer_id), nonce=os.urandom(16), step=frame.step)
    push.receipt.nonce = push.nonce
    async with until_reset(key.messages(victim, PUSH)) as stream:
        for _ in range(20):
            await stream.send(wire.PushFrame(push=push, tensors=frame.tensors), [payload], timeout=PATIENCE)


async def _batches(protocol: BatchProtocol, key: Key, victim: Victim) -> None:
    opened = messages.batch_opening(**_served(victim))
    async with until_reset(key.messages(victim, protocol)) as stream:
        await stream.send(wire.BatchFrame(open=opened), timeout=PATIENCE)
        frame, _ = await stream.receive(timeout=PATIENCE)
        if not frame.HasField("granted"):
            raise PeerError("refused", victim.peer_id)
        tensor = messages.tensor(1, 256, victim.hidden)
        tensors = [tensor] if protocol == FORWARD else [tensor, tensor]
        await stream.send(wire.BatchFrame(work=wire.BatchRequest(sequence=1, tensors=tensors)), timeout=PATIENCE)
        for _ in range(len(tensors)):
            payload = bytes(tensor.nbytes)
            for at in range(0, len(payload), 1 << 18):
                part = payload[at : at + (1 << 18)]
                piece = wire.BatchFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=len(part))])
                await stream.send(piece, [part], timeout=PATIENCE)
        await stream.receive(timeout=PATIENCE)


forward_batches = partial(_batches, FORWARD)
backward_batches = partial(_batches, BACKWARD)


async def adapters(key: Key, victim: Victim) -> None:
    """Adapters that are announced, begun and never ended."""
    start, end = victim.served.get("blocks", (0, 1))
    weight = f"model.layers.{start}.self_attn.q_proj.weight"
    adapter = wire.Adapter(
        protocol_version=1,
        model_version=bytes.fromhex(victim.served.get("model_version", "11" * 32)),
        span=wire.Span(start=start, end=end),
        hash=key.random.randbytes(32),
        blocks=[wire.AdapterBlock(block=start, hash=key.random.randbytes(32))],
        names=[weight],
        tensors=[messages.tensor(victim.hidden, victim.hidden)],
    )
    async with until_reset(key.messages(victim, ADAPTER)) as stream:
        await stream.send(wire.BatchFrame(adapter=adapter), timeout=PATIENCE)
        await stream.receive(timeout=PATIENCE)
        piece = wire.BatchFrame(piece=wire.Piece(), tensors=[wire.Tensor(nbytes=1000)])
        for _ in range(20):
            await stream.send(piece, [bytes(1000)], timeout=PATIENCE)
            await trio.sleep(0.5)
