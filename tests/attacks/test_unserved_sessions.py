"""Sessions that are opened and used in ways that nothing comes of: their streams cost what those of strangers do, until
something on them was answered."""

from __future__ import annotations

from trio.testing import wait_all_tasks_blocked

from petalnode.crypto.identity import Identity, peer_id_to_bytes
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.testing import MemoryStream
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.inference import INFERENCE, PUSH
from tests.attacks.held_prompts import CLIENT, KEEP, NEVER, PUSHER, TOKENS, begins, held_up
from tests.attacks.one_server import VERSION, OneServer, one_server, pushed
from tests.swarm.raw import TIMEOUT, RawSession, values
from tests.tiny_models import NUM_BLOCKS


def connected(server: OneServer, client: Identity = CLIENT) -> tuple[RawSession, MemoryStream]:
    stream, end = server.connect(INFERENCE, server.service.handle_session, client)
    return RawSession(stream, {"blocks": [0, NUM_BLOCKS], "model_version": VERSION.hex()}), end


async def test_session_counts_as_stranger_until_step_is_answered(blocks: BlockSpan) -> None:
    async with one_server(blocks) as server:
        session, end = connected(server)
        assert (await session.open()).HasField("granted") and not end.granted
        refused, _ = await session.step(1, 0, values(TOKENS), dtype="float99")
        assert refused.HasField("error") and not end.granted
        session, end = connected(server)
        await session.open()
        assert (await session.step(1, 0, values(TOKENS)))[0].HasField("reply")
        await wait_all_tasks_blocked()
        assert end.granted


async def test_who_gives_up_prompt_counts_as_stranger_again(blocks: BlockSpan) -> None:
    async with one_server(blocks) as server:
        session, end = connected(server)
        await session.open(keep_ms=KEEP)
        await session.step(1, 0, values(TOKENS))
        async with held_up(server):
            await session.send_step(2, TOKENS, values(TOKENS))
            await begins(server)
            await session.stream.reset()
            await wait_all_tasks_blocked()
        again, end = connected(server)
        resume = wire.Resume(nonce=session.nonce, session_epoch=session.granted.session_epoch, answered=1)
        await again.stream.send(wire.InferenceFrame(resume=resume), timeout=NEVER)
        assert (await again.receive())[0].granted.sequence == 1 and not end.granted
        again.terms = session.terms
        assert (await again.step(2, TOKENS, values(TOKENS)))[0].HasField("reply")
        await wait_all_tasks_blocked()
        assert end.granted


async def test_pusher_is_a_stranger_until_a_taken_push(blocks: BlockSpan) -> None:
    async with one_server(blocks) as server:
        session, _ = connected(server)
        await session.open(upstream=peer_id_to_bytes(PUSHER.peer_id))
        payload = values(TOKENS)
        for wrong in (True, False):
            stream, end = server.connect(PUSH, server.service.handle_push, PUSHER)
            frame = pushed(session, CLIENT, PUSHER, 1, 0, payload, **{"reply_hash": bytes(32)} if wrong else {})
            await stream.send(frame, [payload], timeout=NEVER)
            if wrong:
                answer, _ = await stream.receive(timeout=TIMEOUT)
                assert answer.HasField("error") and not end.granted
        assert (await session.receive())[0].HasField("reply")
        await wait_all_tasks_blocked()
        assert end.granted
