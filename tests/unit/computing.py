"""A compute thread, and steps for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import torch
import trio
import trio.testing

from petalnode.node.blocks.span import BlockSpan
from petalnode.node.server.compute_thread import ComputeThread
from petalnode.node.server.steps import StepInput
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import SessionTerms
from petalnode.protocols.tensors import encode
from tests.tiny_models import HIDDEN, NUM_BLOCKS

ALL = Span(0, NUM_BLOCKS)
TIMEOUT = 60.0


def terms(max_length: int) -> SessionTerms:
    return SessionTerms(bytes(32), ALL, max_length, 1, (), "none", bytes(16), 0, "float32")


def step(position: int, tokens: int = 1) -> StepInput:
    tensor, payload = encode(torch.zeros(1, tokens, HIDDEN), "none")
    return StepInput(position, (), tensor, payload)


@asynccontextmanager
async def computing(blocks: BlockSpan) -> AsyncIterator[Any]:
    compute = ComputeThread(blocks)
    compute.start()
    try:
        with trio.fail_after(TIMEOUT):
            yield compute
    finally:
        await compute.stop()
