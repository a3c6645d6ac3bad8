"""The messages of forward and backward passes: their pieces, their checks, their hashes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.server.requests.admission import Hosted, batch_bytes, check_batch, check_keep, check_terms
from petalnode.node.testing import run_autojumping
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import MAX_TENSORS, MessageStream
from petalnode.protocols.ids import Boundaries, Span
from petalnode.protocols.inference import Refusal
from petalnode.protocols.training import (
    BACKWARD,
    FORWARD,
    KEPT_SETS,
    MAX_KEPT_TENSORS,
    NOTHING_KEPT,
    PIECE_BYTES,
    BatchFrames,
    BatchTerms,
    LoraName,
    batch_terms_of,
    hash_of_batch,
    hash_of_keep,
    hash_of_payloads,
    receive_pieces,
    send_in_pieces,
    send_pieces,
)
from tests.messages import batch_opening, tensor
from tests.unit.memory_ends import PEER, ends

HOSTED = Hosted(b"m" * 32, "tiny", 8, Span(2, 6), 64, "float32", "none", 128)
TERMS = BatchTerms(b"m" * 32, Span(2, 5), "none", "float32", b"n" * 16)
BAD, LONG, UNSUPPORTED = wire.ERROR_BAD_REQUEST, wire.ERROR_TOO_LONG, wire.ERROR_UNSUPPORTED


def streams() -> tuple[BatchFrames, BatchFrames]:
    first, second = ends()
    return (
        MessageStream(first, FORWARD, PEER),
        MessageStream(second, FORWARD, PEER),
    )


# --- pieces


async def _sent_and_received(payloads: list[bytes]) -> list[bytearray]:
    sender, receiver = streams()
    received: list[bytearray] = []

    async def receive() -> None:
        frame, _ = await receiver.receive(timeout=5)
        received.extend(
            await receive_pieces(receiver, [described.nbytes for described in frame.work.tensors], timeout=5)
        )

    async with trio.open_nursery() as nursery:
        nursery.start_soon(receive)
        head = wire.BatchFrame(
            work=wire.BatchRequest(tensors=[wire.Tensor(nbytes=len(payload)) for payload in payloads])
        )
        await send_in_pieces(sender, head, payloads, timeout=5)
    return received


@pytest.mark.parametrize(
    "sizes",
    [
        [],
        [0],
        [1],
        [PIECE_BYTES],
        [PIECE_BYTES + 1],
        [3, 0, 5],
        [PIECE_BYTES - 1, 2, PIECE_BYTES],
        [3 * PIECE_BYTES],
        [1] * 300,
    ],
)
def test_tensors_arrive_as_they_were_sent(sizes: list[int]) -> None:
    payloads = [bytes([number % 251]) * size for number, size in enumerate(sizes, start=7)]
    assert run_autojumping(_sent_and_received, payloads) == payloads


@pytest.mark.virtual_time
async def test_no_more_pieces_are_made_than_it_takes() -> None:
    sender, receiver = streams()
    payloads = [bytes(PIECE_BYTES - 1), b"ab", *[b"x"] * 70]
    async with trio.open_nursery() as nursery:
        nursery.start_soon(partial(send_pieces, sender, payloads, timeout=5))
        found = [[len(part) for part in (await receiver.receive(timeout=5))[1]] for _ in range(3)]
    assert found == [[PIECE_BYTES - 1, 1], [1] * MAX_TENSORS, [1] * (71 - MAX_TENSORS)]


async def _received_of(*frames: tuple[wire.BatchFrame, list[bytes]]) -> list[bytearray]:
    sender, receiver = streams()
    for frame, payloads in frames:
        await sender.send(frame, payloads, timeout=5)
    return await receive_pieces(receiver, [3, 2], timeout=5)


def piece(*payloads: bytes) -> tuple[wire.BatchFrame, list[bytes]]:
    tensors = [wire.Tensor(nbytes=len(payload)) for payload in payloads]
    return wire.BatchFrame(piece=wire.Piece(), tensors=tensors), list(payloads)


def test_cuts_may_be_anywhere() -> None:
    assert run_autojumping(_received_of, piece(b"a"), piece(b"bc", b"d"), piece(b"e")) == [b"abc", b"de"]


def test_more_bytes_than_announced_are_refused() -> None:
    with pytest.raises(Refusal, match="more bytes"):
        run_autojumping(_received_of, piece(b"abcdef"))


def test_pieces_without_bytes_are_refused() -> None:
    with pytest.raises(Refusal, match="pieces"):
        run_autojumping(_received_of, piece(b""))


def test_something_else_between_pieces_is_refused() -> None:
    with pytest.raises(Refusal, match="pieces"):
        run_autojumping(_received_of, piece(b"abc"), (wire.BatchFrame(close=wire.Close()), []))


def test_an_error_between_pieces_is_the_peers() -> None:
    error = wire.Error(code=wire.ERROR_BUSY, message="too much to do")
    with pytest.raises(Refusal, match="too much to do") as caught:
        run_autojumping(_received_of, piece(b"abc"), (wire.BatchFrame(error=error), []))
    assert caught.value.code == wire.ERROR_BUSY


# --- opening


def test_an_opening_is_read() -> None:
    assert batch_terms_of(batch_opening()) == TERMS


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"protocol_version": 2}, UNSUPPORTED),
        ({"model_version": b"m"}, BAD),
        ({"nonce": b""}, BAD),
        ({"span": wire.Span(start=3, end=3)}, BAD),
    ],
)
def test_an_opening_that_cannot_be(fields: dict[str, Any], code: int) -> None:
    with pytest.raises(Refusal) as caught:
        batch_terms_of(batch_opening(**fields))
    assert caught.value.code == code


@pytest.mark.parametrize(
    ("terms", "code"),
    [
        (replace(TERMS, model_version=b"x" * 32), wire.ERROR_UNKNOWN_MODEL),
        (replace(TERMS, span=Span(0, 4)), wire.ERROR_SPAN_NOT_HOSTED),
        (replace(TERMS, codec="zip"), UNSUPPORTED),
        (replace(TERMS, dtype="float64"), UNSUPPORTED),
    ],
)
def test_what_is_not_hosted(terms: BatchTerms, code: int) -> None:
    check_terms(TERMS, HOSTED)
    with pytest.raises(Refusal) as caught:
        check_terms(terms, HOSTED)
    assert caught.value.code == code


# --- batch requests


def request(*tensors: wire.Tensor, **fields: Any) -> wire.BatchRequest:
    return wire.BatchRequest(**{"sequence": 4} | fields, tensors=tensors)


PROMPTS = wire.Keep(number=7, names=["prompts"], tensors=[tensor(3, 1, 5, 64)])
OF_ROWS = wire.Keep(number=8, names=["prompts"], tensors=[tensor(3, 2, 5, 64)])
HIDDEN = tensor(2, 9, 64)


def check(message: wire.BatchRequest, backward: bool = False) -> None:
    kept = {7: PROMPTS, 8: OF_ROWS}
    check_batch(message, TERMS, HOSTED, kept, backward=backward, last=3)


def test_gradient_is_as_wide_as_the_last_block() -> None:
    wide, entering = (
        replace(HOSTED, boundaries=Boundaries(64, 8, per_block=5)),
        tensor(2, 9, 64 + 5 * (8 - TERMS.span.start)),
    )
    for width in range(60, 110):
        gradient = tensor(2, 9, width)
        if width == 64 + 5 * (8 - TERMS.span.end):
            check_batch(request(entering, gradient), TERMS, wide, {}, backward=True, last=3)
            continue
        with pytest.raises(Refusal, match="gradient"):
            check_batch(request(entering, gradient), TERMS, wide, {}, backward=True, last=3)


@pytest.mark.parametrize(
    ("message", "backward"),
    [
        (request(HIDDEN), False),
        (request(HIDDEN, HIDDEN), True),
        (request(HIDDEN, mask=b"123"), False),
        (request(HIDDEN, positions=range(18)), False),
        (request(HIDDEN, kept=7), False),
        (request(HIDDEN, HIDDEN, kept=8), True),
        (request(tensor(8, 128, 64)), False),
    ],
)
def test_right_batch_requests_pass(message: wire.BatchRequest, backward: bool) -> None:
    check(message, backward)


@pytest.mark.parametrize(
    ("message", "backward", "code", "says"),
    [
        (request(HIDDEN, sequence=3), False, BAD, "came after"),
        (request(HIDDEN, sequence=5), False, BAD, "came after"),
        (request(), False, BAD, "1 tensors"),
        (request(HIDDEN, HIDDEN), False, BAD, "1 tensors"),
        (request(HIDDEN), True, BAD, "2 tensors"),
        (request(HIDDEN, tensor(2, 8, 64)), True, BAD, "gradient"),
        (request(tensor(2, 9, 63)), False, BAD, "64"),
        (request(tensor(2, 64)), False, BAD, "64"),
        (request(tensor(0, 9, 64)), False, BAD, "rows"),
        (request(tensor(2, 0, 64)), False, BAD, "tokens"),
        (request(tensor(2, 9, 64, nbytes=5)), False, BAD, "5 bytes"),
        (request(tensor(2, 9, 64, codec="float16")), False, BAD, "codec"),
        (request(tensor(2, 9, 64, dtype="bfloat16")), False, BAD, "bfloat16"),
        (request(tensor(1, 129, 64)), False, LONG, "128"),
        (request(tensor(9, 128, 64)), False, LONG, "1024"),
        (request(HIDDEN, mask=b"12"), False, BAD, "mask"),
        (request(HIDDEN, positions=range(17)), False, BAD, "positions"),
        (request(HIDDEN, positions=[128] * 18), False, BAD, "positions"),
        (request(HIDDEN, kept=6), False, BAD, "nothing is kept"),
        (request(tensor(3, 9, 64), kept=8), False, BAD, "prompts"),
        (request(tensor(2, 4, 64), kept=7), False, BAD, "prompts"),
    ],
)
def test_wrong_batch_requests_are_refused(message: wire.BatchRequest, backward: bool, code: int, says: str) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        check(message, backward)
    assert caught.value.code == code


LINEARS = {block: {"mlp.up": (64, 96), "out": (96, 64)} for block in range(2, 6)}


def keep(*tensors: wire.Tensor, **fields: Any) -> wire.Keep:
    return wire.Keep(**{"number": 3, "names": ["prompts"]} | fields, tensors=tensors)


@pytest.mark.parametrize(
    ("message", "code"),
    [
        (keep(tensor(3, 1, 5, 64), number=2), BAD),
        (keep(tensor(3, 1, 5, 64), names=[]), BAD),
        (keep(tensor(3, 1, 5, 64), tensor(3, 1, 5, 64), names=["prompts", "prompts"]), BAD),
        (keep(names=[]), BAD),
        (keep(*[tensor(1)] * (MAX_KEPT_TENSORS + 1), names=[str(n) for n in range(MAX_KEPT_TENSORS + 1)]), BAD),
        (keep(tensor(3, 1, 5, 64), names=["what is that"]), UNSUPPORTED),
        (keep(tensor(4, 1, 5, 64)), BAD),
        (keep(tensor(3, 1, 5, 63)), BAD),
        (keep(tensor(3, 5, 64)), BAD),
        (keep(tensor(3, 0, 5, 64)), BAD),
        (keep(tensor(3, 1, 5, 64, nbytes=1)), BAD),
    ],
)
def test_what_is_not_kept(message: wire.Keep, code: int) -> None:
    check_keep(keep(tensor(3, 1, 5, 64)), TERMS, HOSTED, LINEARS, last=2)
    with pytest.raises(Refusal) as caught:
        check_keep(message, TERMS, HOSTED, LINEARS, last=2)
    assert caught.value.code == code


def lora(name: str, a: tuple[int, ...] | None, b: tuple[int, ...] | None) -> wire.Keep:
    parts = {"lora_A": a, "lora_B": b}
    given = {f"{name}.{part}": shape for part, shape in parts.items() if shape is not None}
    return wire.Keep(number=3, names=list(given), tensors=[tensor(*shape) for shape in given.values()])


@pytest.mark.parametrize("message", [lora("3.mlp.up", (8, 64), (96, 8)), lora("2.out", (1, 96), (64, 1))])
def test_changes_of_layers_are_kept(message: wire.Keep) -> None:
    check_keep(message, TERMS, HOSTED, LINEARS, last=2)


@pytest.mark.parametrize(
    ("message", "says"),
    [
        (lora("5.mlp.up", (8, 64), (96, 8)), "not of blocks 2:5"),
        (lora("3.mlp.down", (8, 64), (96, 8)), "it has mlp.up, out"),
        (lora("3.mlp.up", (8, 64), None), "lora_B"),
        (lora("3.mlp.up", None, (96, 8)), "lora_A"),
        (lora("3.mlp.up", (8, 63), (96, 8)), "64"),
        (lora("3.mlp.up", (8, 64), (95, 8)), "96"),
        (lora("3.mlp.up", (8, 64), (96, 4)), "rank"),
        (lora("3.mlp.up", (0, 64), (96, 0)), "rank"),
    ],
)
def test_changes_that_fit_no_layer(message: wire.Keep, says: str) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        check_keep(message, TERMS, HOSTED, LINEARS, last=2)
    assert caught.value.code == BAD


@pytest.mark.parametrize("name", ["0.q.lora_A", "12.self_attn.q_proj.lora_B", "7.a.b.c.d.lora_A"])
def test_names_of_changes_are_read_as_written(name: str) -> None:
    assert str(LoraName.parse(name)) == name


@pytest.mark.parametrize(
    "name", ["prompts", "q.lora_A", "1.lora_A", "1.q.lora_C", "-1.q.lora_A", "1.q", "", "9" * 10 + ".q.lora_A"]
)
def test_other_names_are_no_changes(name: str) -> None:
    assert LoraName.parse(name) is None


def test_memory_counts_the_reply() -> None:
    hidden, prompts = 2 * 9 * 64 * 4, 3 * 5 * 64 * 4
    assert batch_bytes(request(HIDDEN), PROMPTS) == 2 * hidden
    assert batch_bytes(request(HIDDEN, HIDDEN), PROMPTS) == 3 * hidden + prompts
    assert batch_bytes(request(HIDDEN, HIDDEN), None) == 3 * hidden
    assert KEPT_SETS >= 2  # the sets of two batches at once


dtypes = st.sampled_from(["float32", "bfloat16", "float16"])


@given(st.builds(wire.Tensor, shape=st.lists(st.integers(0, 2**31), max_size=5), dtype=dtypes, codec=dtypes,
                 nbytes=st.integers(0, 2**40)), st.binary(max_size=8), st.integers(0, 9))  # fmt: skip
def test_no_batch_request_does_more_than_be_refused(tensor: wire.Tensor, mask: bytes, kept: int) -> None:
    try:
        check(request(tensor, mask=mask, kept=kept))
    except Refusal:
        pass


# --- hashes


def test_everything_that_changes_the_answer_changes_the_hash() -> None:
    usual = request(HIDDEN)
    payload, other = hash_of_payloads([b"a", b"b"]), hash_of_payloads([b"ac"])
    hashes = [
        hash_of_batch(FORWARD.id, usual, payload, NOTHING_KEPT),
        hash_of_batch(BACKWARD.id, usual, payload, NOTHING_KEPT),
        hash_of_batch(FORWARD.id, usual, other, NOTHING_KEPT),
        hash_of_batch(FORWARD.id, usual, payload, hash_of_keep(PROMPTS, payload)),
        hash_of_batch(FORWARD.id, usual, payload, hash_of_keep(PROMPTS, other)),
        hash_of_batch(FORWARD.id, usual, payload, hash_of_keep(OF_ROWS, payload)),
        hash_of_batch(FORWARD.id, request(HIDDEN, sequence=5), payload, NOTHING_KEPT),
        hash_of_batch(FORWARD.id, request(HIDDEN, mask=b"123"), payload, NOTHING_KEPT),
        hash_of_batch(FORWARD.id, request(HIDDEN, positions=[1, 2]), payload, NOTHING_KEPT),
        hash_of_batch(FORWARD.id, request(tensor(3, 6, 64)), payload, NOTHING_KEPT),
    ]
    assert len(set(hashes)) == len(hashes)


def test_a_number_says_nothing_of_what_is_kept() -> None:
    same = wire.Keep(number=9, names=PROMPTS.names, tensors=PROMPTS.tensors)
    assert hash_of_keep(same, b"h" * 32) == hash_of_keep(PROMPTS, b"h" * 32)
    assert hash_of_payloads([b"ab"]) == hash_of_payloads([b"a", b"b"])
