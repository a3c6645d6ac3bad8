"""A server breaks its chain of receipts at a step that turned out not to be wanted, so that its later answers in the
session cannot be audited: who audits could not tell what led to them."""

from __future__ import annotations

import pytest

from petalnode.node.errors import ServerCheated
from petalnode.node.trust.receipt_log import SessionLog
from petalnode.protocols import wire_pb2 as wire
from tests.answering_server import SERVER, asked, chunk_of, received, talking

pytestmark = pytest.mark.virtual_time


async def test_receipt_for_other_bytes_is_found_without_waiting() -> None:
    async with talking(log=SessionLog(SERVER.peer_id, keeps_tensors=True)) as (server, session):
        chunk = chunk_of()
        early, late = await asked(session, chunk), await asked(session, chunk, 1)
        await server.answer(early, chunk, signed={"request_hash": b"x" * 32})
        await server.answer(late, chunk)
        with pytest.raises(ServerCheated, match="for something else than it was asked"):
            await received(session, late, chunk)


@pytest.mark.parametrize("pushed_on", [False, True])
@pytest.mark.parametrize("upstream", [b"b" * 32, b"o" * 32], ids=["the receipt of that", "another receipt"])
async def test_unawaited_pushs_signer_is_blamed_only_where_sure(upstream: bytes, pushed_on: bool) -> None:
    """An honest server that was pushed something else by the one before it is not; what it did is not audited then.

    The one before has signed for the payload only, not for what it says of the step.
    """
    log = SessionLog(SERVER.peer_id, keeps_tensors=True)
    async with talking(log=log) as (server, session):
        chunk, other = chunk_of(), chunk_of(9.0, 9.0, 9.0, 9.0)
        pushed = wire.Step(sequence=session.target().sequence, route_epoch=1, previous_receipt=b"b" * 32)
        log.asked(pushed, chunk.tensor, chunk.payload)
        late = await asked(session, chunk)
        await server.answer(pushed, other, pushed=pushed_on, signed={"upstream_receipt": upstream})
        await server.answer(late, chunk)
        if not pushed_on:
            with pytest.raises(ServerCheated, match="for something else than it was asked"):
                await received(session, late, chunk)
        else:
            await received(session, late, chunk)
            assert [entry.step for entry in log.entries] == [None, late] and not log.complete
