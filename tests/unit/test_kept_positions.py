"""Blocks that look up where the tokens of their cache stand: a later session with the same picture answers the same."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from petalnode.node.blocks.caches.states import SNAPSHOT
from petalnode.node.blocks.span import load_span
from petalnode.node.blocks.split import SplitSpan
from petalnode.node.server.prefixes import PrefixUse
from petalnode.node.server.steps import StepInput
from petalnode.protocols.ids import AXES, PLAIN, Layout, Span
from petalnode.protocols.prefix import PrefixNames
from petalnode.protocols.tensors import encode
from tests.tiny_models import save_tiny
from tests.unit.computing import ALL, computing, terms

TOKENS, MORE = SNAPSHOT, 4


@pytest.mark.parametrize("cuts", [(ALL,), (Span(0, 3), Span(3, ALL.end))], ids=["whole", "split"])
@pytest.mark.parametrize("picture", [False, True])
async def test_kept_blocks_have_their_tokens_positions(picture: bool, cuts: tuple[Span, ...], tmp_path: Path) -> None:
    folder = save_tiny("qwen4_exp", tmp_path / "model")
    blocks, *others = [load_span(folder, cut) for cut in cuts]
    blocks = SplitSpan([blocks, *others]) if others else blocks
    hidden = torch.randn(1, TOKENS + MORE, blocks.stack.width(), generator=torch.Generator().manual_seed(0))
    number = torch.arange(TOKENS + MORE)
    positions = torch.stack([number // 4, number % 8, number // 2]).view(AXES, -1)

    def step(start: int, end: int) -> StepInput:
        tensor, payload = encode(hidden[:, start:end], "none")
        layout = Layout(tuple(positions[:, start:end].flatten().tolist())) if picture else PLAIN
        return StepInput(start, (), tensor, payload, layout=layout)

    async with computing(blocks) as compute:
        compute.limit_prefixes(10 * TOKENS)
        prefix, last = tuple[bytes, ...](), list[Any]()
        for keeps in (True, False):
            names = PrefixNames(b"root")
            wanted = replace(terms(TOKENS + MORE), prefix=prefix)
            session = await compute.open(wanted, shared=PrefixUse("peer", names, keeps))
            assert session.begun == (0 if keeps or picture else TOKENS)
            if session.begun < TOKENS:
                await compute.step(session, step(session.begun, TOKENS))
            last.append(await compute.step(session, step(TOKENS, TOKENS + MORE)))
            prefix = tuple(names.names)
        assert last[0].payload == last[1].payload
