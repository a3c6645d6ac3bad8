"""Tensors under a codec: bytes that make something else than they say, and inputs that a codec rounds most.

A client or server may send any bytes under any codec. Who serves honestly what came so, or is rounded on the way, must
not be blamed.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import trio

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.span import BlockSpan
from petalnode.node.models.folder import ModelFolder
from petalnode.node.trust.bundle import session_bundle
from petalnode.node.verification.evidence_check import check_evidence
from petalnode.node.verification.judging import token_errors
from petalnode.node.verification.tolerances import CODEC_SLACK
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import CODECS, all_finite
from petalnode.protocols.tensors import DTYPES, decode, encode
from tests.attacks.forger import ATTACKER, hidden
from tests.attacks.one_server import one_server
from tests.signing_server import SigningServer, probed, spoiled
from tests.tiny_models import HIDDEN

INT8 = "int8-block64"


def int8(tokens: int, scale: float = 0.01, value: int = 1, hidden: int = HIDDEN) -> bytes:
    """As one would encode it whose scales are all `scale`."""
    count = tokens * hidden
    return np.full(-(-count // 64), scale, "<f2").tobytes() + np.full(count, value, np.int8).tobytes()


STEPS: dict[str, dict[str, Any]] = {
    "scales that are no number": {"payload": int8(2, float("nan"))},
    "scales without end": {"payload": int8(2, float("inf"))},
    "scales without end downwards": {"payload": int8(2, float("-inf"))},
    "scales only": {"payload": int8(2)[: -2 * HIDDEN]},
    "values only": {"payload": int8(2)[-2 * HIDDEN :]},
    "a byte too few": {"payload": int8(2)[:-1]},
    "a byte too many": {"payload": int8(2) + b"\0"},
    "nothing that says it is much": {"payload": b"", "shape": [1, 63, HIDDEN]},
    "many values in few bytes": {"payload": int8(2), "shape": [1, 63, HIDDEN]},
    "bytes of another codec": {"payload": bytes(4 * 2 * HIDDEN)},
    "the name of another codec": {"payload": bytes(4 * 2 * HIDDEN), "codec": "none"},
    "a codec that nobody has": {"payload": int8(2), "codec": "zip"},
}


@pytest.mark.parametrize("name", STEPS)
async def test_step_under_codec_that_cannot_be_is_refused(name: str, blocks: BlockSpan) -> None:
    with trio.fail_after(600):  # of a test that hangs
        async with one_server(blocks) as server:
            session = server.session(Identity.generate())
            assert (await session.open(codec=INT8)).WhichOneof("body") == "granted"
            how: dict[str, Any] = {"codec": INT8, "shape": [1, 2, HIDDEN]} | STEPS[name]
            frame, _ = await session.step(1, 0, **how)
            assert frame.WhichOneof("body") == "error", frame
            assert frame.error.code == wire.ERROR_BAD_REQUEST and frame.error.message
            # Others are served as before.
            other = server.session(Identity.generate())
            await other.open(codec=INT8)
            frame, (payload,) = await other.step(1, 0, int8(2), codec=INT8, shape=[1, 2, HIDDEN])
            assert frame.WhichOneof("body") == "reply" and len(payload) == len(int8(2))


@pytest.mark.parametrize("dtype", DTYPES)
async def test_the_largest_scales_compute_or_are_refused(dtype: str, blocks: BlockSpan) -> None:
    """65,504 times -100 is finite in float32, and not in float16."""
    with trio.fail_after(600):
        async with one_server(blocks) as server:
            session = server.session(Identity.generate())
            await session.open(codec=INT8, activation_dtype=dtype)
            payload = int8(2, 65504.0, -100)
            frame, _ = await session.step(1, 0, payload, codec=INT8, dtype=dtype, shape=[1, 2, HIDDEN])
            assert frame.WhichOneof("body") == ("error" if dtype == "float16" else "reply"), frame


@pytest.mark.parametrize("value", [1e-8, 1.0, 500.0, 65000.0, 65536.0, 3e38, -3e38])
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_called_finite_are_finite_as_read(dtype: str, codec: str, value: float) -> None:
    """As a server may answer: bfloat16 and the scales of int8 hold more than float16 does."""
    values = torch.full((1, 2, 70), value)
    payload = (
        int8(2, min(abs(value), 65504.0), -128, 70)
        if codec == INT8
        else encode(values.to(DTYPES[dtype if codec == "none" else codec]), "none")[1]
    )
    header = wire.Tensor(shape=[1, 2, 70], dtype=dtype, codec=codec, nbytes=len(payload))
    read = decode(header, payload)
    if all_finite(header, payload):
        assert torch.isfinite(read).all()
    elif codec != INT8:
        assert not torch.isfinite(read).all()


# --- what honest servers are judged by


def outliers(tokens: int, size: float) -> torch.Tensor:
    """One value of every 64 so much larger than the others that it takes the whole scale."""
    made = hidden(tokens)
    made[..., ::64] = size
    return made


def worst_for_int8() -> torch.Tensor:
    """All values but one of a block half a step away from what can be said."""
    values = torch.full((1, 4, 64), 0.5)
    values[..., 0] = 127.0
    return values


def test_no_codec_rounds_by_more_than_allowed() -> None:
    worst = dict.fromkeys(CODECS, 0.0)
    for tensor in (hidden(200), outliers(20, 30.0), outliers(20, 3000.0), worst_for_int8()):
        for codec in CODECS:
            errors = token_errors(decode(*encode(tensor, codec)), tensor)
            worst[codec] = max(worst[codec], float(errors.max()))
    assert all(worst[codec] <= CODEC_SLACK[codec] for codec in CODECS), worst
    assert worst[INT8] > 0.03


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("size", [1.0, 30.0, 3000.0])
def test_honest_server_is_not_blamed_for_codec(
    codec: str, size: float, server: SigningServer, folder: ModelFolder
) -> None:
    """What a validator recomputes begins with what arrived, and ends with what the codec makes of it."""
    steps = [(0, outliers(6, size), ()), (6, outliers(1, -size), ()), (7, hidden(1, seed=3), ())]
    log = server.session(steps, codec=codec)
    for step in range(len(steps)):
        outcome = check_evidence(session_bundle(ATTACKER, log, step), folder)
        assert not outcome.proven and not outcome.inconclusive, outcome
    assert probed(folder, log).verdict == "ok"


@pytest.mark.parametrize("codec", CODECS)
def test_a_cheat_is_not_covered_by_a_codec(codec: str, server: SigningServer, folder: ModelFolder) -> None:
    log = server.session([(0, hidden(6), ()), (6, hidden(1, seed=2), ())], codec=codec, spoil=spoiled)
    assert check_evidence(session_bundle(ATTACKER, log, 1), folder).proven
    assert probed(folder, log).verdict == "faulty"
