"""What chosen blocks of a model make of a prompt: hidden states, for those who look into models."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

import torch
import trio

from ....protocols.ids import Span
from ....protocols.tensors import dtype_name
from ...blocks.client_part import ClientModel
from ...client.chunks import from_chunks, to_chunks
from ...client.core import SwarmClient
from ...client.session.stream import SessionSpec
from ...client.session_adapter import SessionAdapter


async def block_outputs(
    client: SwarmClient,
    local: ClientModel,
    prompt: Sequence[int],
    blocks: Sequence[int],
    adapter: SessionAdapter | None = None,
    soft_prompt: torch.Tensor | None = None,
) -> dict[int, torch.Tensor]:
    """The output of each of `blocks` (ascending), [tokens, hidden size] in the client's dtype.

    The blocks up to each of them run in a session of their own, so that its output comes back to the client, and none
    runs twice. A soft prompt stands before the tokens; its own positions are left out.

    Raises:
        SwarmError: no chain of servers can serve.
    """
    virtual = 0 if soft_prompt is None else len(soft_prompt)
    tokens = [local.any_token] * virtual + list(prompt)

    hidden = await trio.to_thread.run_sync(_embedded, local, tokens, soft_prompt)
    found = {}
    for start, end in pairwise([0, *(block + 1 for block in blocks)]):
        spec = SessionSpec(
            model_version=client.model.version,
            span=Span(start, end),
            batch=1,
            max_length=len(tokens),
            dtype=dtype_name(local.dtype),
            adapter=adapter,
        )
        async with client.session(spec) as session:
            size = session.chunk_tokens(*hidden.shape[1:])
            chunks = await trio.to_thread.run_sync(to_chunks, hidden, session.spec.codec, size)
            hidden = await trio.to_thread.run_sync(from_chunks, await session.step(chunks))
        found[end - 1] = hidden[0, virtual:]
    return found


def _embedded(local: ClientModel, tokens: Sequence[int], soft_prompt: torch.Tensor | None) -> torch.Tensor:
    with nullcontext() if soft_prompt is None else local.prompted(soft_prompt):
        return local.embed(torch.tensor([tokens]), 0)
