"""Pings and pushes come at the rate of one who means them, however many fit into a frame."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import pytest
import trio
from libp2p.identity.identify.pb.identify_pb2 import Identify
from libp2p.peer.id import ID
from libp2p.peer.peerstore import PeerStoreError

from petalnode.node.network import standard_protocols
from petalnode.node.network.host import Host
from petalnode.node.network.transport.stream_bytes import StreamBytes
from petalnode.node.version import __version__
from petalnode.protocols.delimited import DelimitedStream
from petalnode.protocols.framing import varint
from tests.attacks.hosts import LOOPBACK, TIMEOUT, delimited, host, knowing

PING = "/ipfs/ping/1.0.0"
PUSH = "/ipfs/id/push/1.0.0"
IDENTIFY = "/ipfs/id/1.0.0"


async def pinged(stream: StreamBytes, data: bytes) -> bytes:
    await stream.write(data)
    answer = b""
    with trio.fail_after(TIMEOUT):
        while len(answer) < len(data):
            answer += await stream.read(len(data) - len(answer))
    return answer


async def test_thousands_of_pings_are_answered_steadily(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard_protocols, "PINGS", (0.001, 50.0))  # as on a machine of any speed
    answered = 0
    async with host(LOOPBACK) as victim, knowing(victim) as attacker, knowing(victim) as honest:
        streams = [await attacker.open_stream(victim.peer_id, PING) for _ in range(4)]

        async def flood(stream: StreamBytes) -> None:
            nonlocal answered
            await stream.write(bytes(32 * 500))
            with suppress(OSError):
                while data := await stream.read(1 << 16):
                    answered += len(data)

        async with trio.open_nursery() as nursery:
            for stream in streams:
                nursery.start_soon(flood, stream)
            other = await honest.open_stream(victim.peer_id, PING)
            for number in range(40):
                await trio.sleep(0.005)
                assert await pinged(other, bytes([number]) * 32) == bytes([number]) * 32
            nursery.cancel_scope.cancel()
    assert 0 < answered <= 32 * 60


def known(victim: Host, peer_id: str) -> set[str]:
    return set(victim.libp2p.get_peerstore().get_protocols(ID.from_string(peer_id)))


async def test_a_push_is_small_and_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard_protocols, "PUSHES", (0.001, standard_protocols.PUSHES[1]))

    async def push(attacker: Host, victim: Host, message: Identify) -> bool:
        stream = await attacker.open_stream(victim.peer_id, PUSH)
        with suppress(OSError), trio.fail_after(TIMEOUT):
            await stream.write(delimited(message))
            await stream.close_write()
            return not await stream.read(1)
        return False

    async with host(LOOPBACK) as victim, knowing(victim) as attacker:
        assert await push(attacker, victim, Identify(protocols=["/mine"]))
        assert known(victim, attacker.peer_id) == {"/mine"}
        assert not await push(attacker, victim, Identify(protocols=["/large"], agent_version="x" * (64 << 10)))
        assert await push(attacker, victim, Identify(protocols=[f"/{number}" for number in range(1000)]))
        assert len(known(victim, attacker.peer_id)) <= 128
        taken = [await push(attacker, victim, Identify(protocols=["/a"])) for _ in range(40)]
        assert taken[0] and not all(taken)


async def test_node_says_by_what_program_it_is_run() -> None:
    async with host(LOOPBACK) as asked, knowing(asked) as peer:
        stream = DelimitedStream(await peer.open_stream(asked.peer_id, IDENTIFY), asked.peer_id, max_message=1 << 16)
        said = await stream.receive(Identify, timeout=TIMEOUT)
        assert said.agent_version == f"petalnode/{__version__}" and IDENTIFY in said.protocols


ANSWERS = {
    "right": delimited(Identify(protocols=["/b"])),
    "many": delimited(Identify(protocols=["/a"] * 3000)),
    "long": delimited(Identify(protocols=["/a"], agent_version="x" * (128 << 10))),
    "a name that is no UTF-8": varint(4) + bytes([0x1A, 2, 0xFF, 0xFE]),
    "never whole": varint(1 << 20),
    "no length": b"\xff" * 20,
}


@pytest.mark.parametrize("answer", ANSWERS)
async def test_answer_to_identify_is_read_within_bounds(answer: str) -> None:
    """A node asks whoever connects; libp2p takes an answer of 1 MiB."""
    async with host(LOOPBACK) as victim, knowing(victim) as attacker:
        ended = trio.Event()

        async def lie(raw: StreamBytes, _: str) -> None:
            with suppress(OSError):
                await raw.write(ANSWERS[answer])
                await raw.read(1)
            ended.set()

        attacker.set_stream_handler(IDENTIFY, lie)
        await attacker.connect(victim.peer_id)
        with trio.fail_after(TIMEOUT):
            await ended.wait()
        with suppress(PeerStoreError):  # nothing at all was kept
            assert known(victim, attacker.peer_id) == ({"/b"} if answer == "right" else set())
        assert await pinged(await attacker.open_stream(victim.peer_id, PING), bytes(32)), "it is still there"


async def test_silent_answer_to_identify_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standard_protocols, "LIMITS", replace(standard_protocols.LIMITS, patience=1.0))
    async with host(LOOPBACK) as victim, knowing(victim) as attacker:
        ended = trio.Event()

        async def be_silent(raw: StreamBytes, _: str) -> None:
            with suppress(OSError):
                await raw.write(varint(5))
                await raw.read(1)
            ended.set()

        attacker.set_stream_handler(IDENTIFY, be_silent)
        await attacker.connect(victim.peer_id)
        with trio.fail_after(TIMEOUT):
            await ended.wait()
