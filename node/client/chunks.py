"""Hidden states to chunks for the wire and back. Runs in the caller's or a worker thread, never on the trio thread."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from ...protocols.framing import CODECS, INT8_BLOCK, TensorError
from ...protocols.ids import next_cut
from ...protocols.inference import STEP_TOKENS
from ...protocols.tensors import arrives_finite, decode, encode
from ..blocks.images.layout import TEXT, TokenLayout
from ..errors import BadInput, SwarmError
from ..verification.judging import JUDGING, token_errors
from .request import WireTensor

PIPELINE_TOKENS: Final = 512
"""Rows times positions of one chunk of a long prompt, at most."""

_HEADROOM: Final = 8.0
"""How many times as large as those that were seen values may become under a codec that was chosen for those."""


def to_chunks(hidden: torch.Tensor, codec: str, size: int, layout: TokenLayout = TEXT) -> list[WireTensor]:
    """Cuts hidden states [batch, tokens, hidden] along the tokens, in chunks of up to `size` tokens of a row. They have
    more where a group of tokens that see each other would be cut.

    Raises:
        BadInput: another shape, no tokens, a dtype that does not travel, or a group that is too long.
    """
    if hidden.dim() != 3 or not hidden.numel():
        raise BadInput(f"hidden states have shape [batch, tokens, hidden], not {list(hidden.shape)}")
    size = min(size, max(1, PIPELINE_TOKENS // hidden.shape[0]))
    try:
        if layout.is_text:
            return [WireTensor(*encode(part, codec)) for part in torch.split(hidden, size, dim=1)]
        layout.check(hidden)
        chunks, most = [], max(STEP_TOKENS // hidden.shape[0], 1)
        for start, end in _pieces(layout.on_wire().cuts(*hidden.shape[:2]), size, most):
            of_chunk = layout.part(start, end - start)
            described, payload = encode(of_chunk.widened(hidden[:, start:end]), codec)
            chunks.append(WireTensor(described, payload, of_chunk.on_wire()))
        return chunks
    except TensorError as error:
        raise BadInput(str(error)) from None


def _pieces(cuts: Sequence[int], size: int, most: int) -> Iterator[tuple[int, int]]:
    start = 0
    while start < cuts[-1]:
        end = max(cut for cut in cuts if cut <= start + size)
        end = end if end > start else next_cut(cuts, start + 1)
        if end - start > most:
            raise BadInput(f"{end - start} tokens of pictures see each other: {most} of a row at once are the most")
        yield start, end
        start = end


def from_chunks(chunks: Sequence[WireTensor], dim: int = 1) -> torch.Tensor:
    """The hidden states [batch, tokens, hidden] of all chunks, on the CPU; `dim` is what they were cut along.

    Raises:
        SwarmError: bytes that are no tensor.
    """
    try:
        parts = [decode(chunk.tensor, chunk.payload) for chunk in chunks]
    except TensorError as error:
        raise SwarmError(f"a server answered with something that is no tensor: {error}") from None
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)


def rounding_errors(chunks: Sequence[WireTensor]) -> dict[str, float]:
    """By codec, the worst relative error that it makes of a token's hidden states in these uncoded chunks; `BEYOND`
    where values `_HEADROOM` times as large do not arrive finite. A chunk that cannot be read does not count.

    The largest value of each block of `INT8_BLOCK` does not count where the error is larger without it: where an
    architecture has outliers in a few features of every token, as larger models do (Dettmers et al. 2022, LLM.int8(),
    section 3), they are most of a token's norm. Of the 63 values beside each int8 leaves nothing."""
    worst = dict.fromkeys(CODECS, 0.0)
    for chunk in chunks:
        try:
            hidden = decode(chunk.tensor, chunk.payload)
        except TensorError:
            continue
        for codec in CODECS:
            if not arrives_finite(_HEADROOM * hidden, codec, hidden.dtype):
                worst[codec] = JUDGING.beyond
                continue
            arrived = decode(*encode(hidden, codec))
            usual = _without_largest(hidden)
            errors = token_errors(arrived, hidden), token_errors(arrived * usual, hidden * usual)
            error = max(float(found.max()) for found in errors)
            worst[codec] = max(worst[codec], error if error == error else JUDGING.beyond)
    return worst


def _without_largest(hidden: torch.Tensor) -> torch.Tensor:
    """0 at the largest value of each block that has one scale under int8, else 1; of the shape of `hidden`."""
    flat = hidden.detach().abs().reshape(-1)
    blocks = torch.nn.functional.pad(flat, (0, -flat.numel() % INT8_BLOCK)).view(-1, INT8_BLOCK)
    usual = torch.ones_like(blocks).scatter_(1, blocks.argmax(dim=1, keepdim=True), 0.0)
    return usual.view(-1)[: flat.numel()].reshape(hidden.shape)
