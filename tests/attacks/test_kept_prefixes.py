"""What a server keeps of a session is of no use to others, takes nobody's room, and is what its name says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.server.prefixes import SHARE
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import terms_of
from petalnode.protocols.prefix import BLOCK_TOKENS, MAX_BLOCKS, MAX_SALT, PrefixNames, token_digests
from tests.attacks.one_server import OneServer, one_server
from tests.swarm.raw import RawSession, values

pytestmark = pytest.mark.usefixtures("mock_clock")

OWNER, STRANGER, HOG = Identity.generate(), Identity.generate(), Identity.generate()
CAPACITY = 10_000
"""Cache tokens of the server."""


async def opened(server: OneServer, client: Identity, names: list[bytes], **how: Any) -> RawSession:
    """A session that asks for these blocks, and lets the server keep its own."""
    session = server.session(client)
    prefix = wire.Prefix(blocks=names, keep=how.pop("keep", True), salt=how.pop("salt", b""))
    granted = await session.open(prefix=prefix, **{"max_length": 160} | how)
    assert granted.HasField("granted"), granted
    return session


def names_of(session: RawSession, payload: bytes, rows: int = 1) -> list[bytes]:
    """What the server makes of these inputs, sent in this session."""
    named = PrefixNames(terms_of(session.terms).prefix_root)
    named.append(token_digests(payload, rows, len(payload) // (256 * rows)))
    return named.names


async def left_by(server: OneServer, client: Identity, tokens: int, seed: int = 0, **how: Any) -> list[bytes]:
    """The names of what a session of the client leaves, which has ended."""
    session = await opened(server, client, [], **how)
    payload = values(tokens, seed=seed)
    frame, _ = await session.step(1, 0, payload)
    assert frame.HasField("reply")
    await ended(server, session)
    return names_of(session, payload)


async def held(server: OneServer, client: Identity, names: list[bytes], **how: Any) -> int:
    """Tokens with which a session of the client begins."""
    session = await opened(server, client, names, **how)
    await ended(server, session)
    return session.granted.prefix_tokens


async def ended(server: OneServer, session: RawSession) -> None:
    """Closes the session; returns when the server has done so."""
    before = server.service.sessions
    await session.close()
    while server.service.sessions == before:
        await trio.lowlevel.checkpoint()


async def test_a_stranger_who_knows_the_text_learns_nothing(blocks: BlockSpan) -> None:
    async with one_server(blocks) as server:
        names = await left_by(server, OWNER, 70)
        assert await held(server, STRANGER, names) == 0
        assert await held(server, OWNER, names) == 64


async def test_blocks_of_different_texts_are_not_joined(blocks: BlockSpan) -> None:
    """A server would sign for what nobody can recompute."""
    async with one_server(blocks) as server:
        names = await left_by(server, OWNER, 64)
        text = await left_by(server, OWNER, 64, seed=1)
        salted = await left_by(server, OWNER, 64, salt=b"another")
        part = await left_by(server, OWNER, 64, span=(1, 4))
        assert len({*names, *text, *salted, *part}) == 8
        for others in (text, salted, part):
            assert await held(server, OWNER, [names[0], others[1]]) == 32
            assert await held(server, OWNER, others[1:]) == 0
        assert await held(server, OWNER, salted) == await held(server, OWNER, part) == 0
        assert await held(server, OWNER, names, batch=2) == 0
        assert await held(server, OWNER, names, left_padding=[1]) == 0


async def test_a_claimed_name_is_not_believed(blocks: BlockSpan) -> None:
    async with one_server(blocks) as server:
        victim = names_of(await opened(server, OWNER, []), values(64, seed=1))
        liar = await opened(server, OWNER, victim)
        assert liar.granted.prefix_tokens == 0
        frame, _ = await liar.step(1, 0, values(64, seed=2))
        assert frame.HasField("reply")
        assert await held(server, OWNER, victim) == 0
        assert await held(server, OWNER, names_of(liar, values(64, seed=2))) == 64


async def test_undone_steps_are_not_kept_under_old_names(blocks: BlockSpan) -> None:
    async with one_server(blocks) as server:
        session = await opened(server, OWNER, [], batch=2)
        first, second = values(40, rows=2), values(40, rows=2, seed=1)
        plain = await opened(server, STRANGER, [], batch=2)
        _, (right,) = await plain.step(1, 0, second)
        await session.step(1, 0, first)
        await session.step(2, 0, second)
        again = await opened(server, OWNER, names_of(session, second, rows=2), batch=2)
        assert again.granted.prefix_tokens == 32
        rest = b"".join(second[row + 32 * 256 : row + 40 * 256] for row in (0, 40 * 256))
        _, (out,) = await again.step(1, 32, rest)
        expected = torch.frombuffer(bytearray(right), dtype=torch.float32).view(2, 40, 64)[:, 32:]
        found = torch.frombuffer(bytearray(out), dtype=torch.float32).view(2, 8, 64)
        torch.testing.assert_close(found, expected)
        # From here on the rows of the session are those of no inputs.
        await session.step(3, 40, values(40, rows=2, seed=2), reorder=[1, 0])
        third = PrefixNames(terms_of(session.terms).prefix_root)
        third.append(token_digests(second, 2, 40) + token_digests(values(40, rows=2, seed=2), 2, 40))
        assert await held(server, OWNER, third.names, batch=2) == 32


async def test_whoever_reserves_gets_the_room(blocks: BlockSpan) -> None:
    async with one_server(blocks) as server:
        names = await left_by(server, OWNER, 160)
        assert server.service.cache.free == CAPACITY
        hungry = server.session(STRANGER)
        assert (await hungry.open(batch=100, max_length=100)).HasField("granted")
        await ended(server, hungry)
        assert await held(server, OWNER, names) == 0


async def test_a_flood_of_texts_costs_who_sends_it(blocks: BlockSpan) -> None:
    async with one_server(blocks) as server:
        names = await left_by(server, OWNER, 96)
        first = await left_by(server, HOG, 160, seed=100)
        for seed in range(int(SHARE * CAPACITY) // 160 + 2):
            await left_by(server, HOG, 160, seed=seed)
        assert await server.service.context.compute.call(server.kept_tokens) <= SHARE * CAPACITY
        assert await held(server, OWNER, names) == 96
        assert await held(server, HOG, first) == 0


@pytest.mark.parametrize(
    "prefix",
    [
        wire.Prefix(blocks=[bytes(32)] * (MAX_BLOCKS + 1)),
        wire.Prefix(blocks=[bytes(31)]),
        wire.Prefix(blocks=[bytes(32)] * 6),  # more than max_length
        wire.Prefix(salt=bytes(MAX_SALT + 1)),
    ],
    ids=["many", "short", "long", "salt"],
)
async def test_a_prefix_that_cannot_be_is_refused(blocks: BlockSpan, prefix: wire.Prefix) -> None:
    async with one_server(blocks) as server:
        answer = await server.session(OWNER).open(prefix=prefix, max_length=6 * BLOCK_TOKENS - 1)
        assert answer.error.code == wire.ERROR_BAD_REQUEST


async def test_who_refuses_to_be_kept_is_not(blocks: BlockSpan) -> None:
    async with one_server(blocks) as server:
        names = await left_by(server, OWNER, 64, keep=False)
        assert await held(server, OWNER, names) == 0
        assert await server.service.context.compute.call(server.kept_tokens) == 0


async def test_clients_share_only_by_an_agreed_secret_salt(blocks: BlockSpan) -> None:
    salt = b"sixteen bytes at" + bytes(16)
    async with one_server(blocks, prefix_cache="salted") as server:
        names = await left_by(server, OWNER, 64, salt=salt)
        assert await held(server, STRANGER, names, salt=salt) == 64
        assert await held(server, STRANGER, names) == await held(server, STRANGER, names, salt=bytes(32)) == 0
        short = await left_by(server, OWNER, 64, seed=1, salt=b"guessed")
        assert await held(server, STRANGER, short, salt=b"guessed") == 0
        assert await held(server, OWNER, short, salt=b"guessed") == 64


async def test_a_server_may_keep_nothing(blocks: BlockSpan) -> None:
    async with one_server(blocks, prefix_cache="off") as server:
        names = await left_by(server, OWNER, 64)
        assert await held(server, OWNER, names) == 0
        assert await server.service.context.compute.call(server.kept_tokens) == 0
