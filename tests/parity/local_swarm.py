"""Spans in this process in place of servers: what the client's code does to sessions, without a network."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path

import torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.client_part import ClientModel, load_client
from petalnode.node.blocks.remote_cache import RemoteCall
from petalnode.node.blocks.span import load_span
from petalnode.protocols.ids import Span

MAX_LENGTH = 64

loaded = functools.cache(load_span)
"""A span for tests that change nothing in it: loading takes as long as most of them."""


class LocalSwarm:
    """Serves a `ClientModel`: a session is one cache per span, kept in the `RemoteCache`."""

    def __init__(self, folder: Path, cuts: Sequence[Span]) -> None:
        self.spans = [loaded(folder, cut) for cut in cuts]
        self.calls: list[tuple[int, int]] = []  # (position, tokens) of every step

    def __call__(self, hidden: torch.Tensor, call: RemoteCall) -> torch.Tensor:
        self.calls.append((call.position, hidden.shape[1]))
        caches = self._caches(hidden, call)
        for span, cache in zip(self.spans, caches, strict=True):
            hidden = span.decode([(hidden, cache)])[0] if hidden.shape[1] == 1 else span.forward(hidden, cache)
        return hidden

    def _caches(self, hidden: torch.Tensor, call: RemoteCall) -> list[SpanCache]:
        if call.cache is None or call.cache.session is None:
            caches = [span.make_cache(len(hidden), MAX_LENGTH, call.left_padding) for span in self.spans]
            if call.cache is not None:
                call.cache.session = caches
                call.cache.take_reorder()
            return caches
        caches = call.cache.session
        rows = call.cache.take_reorder()
        for cache in caches:
            cache.rollback(call.position)
            if rows is not None:
                cache.reorder(rows)
        return caches


_client = functools.cache(load_client)
"""A client's part, which is bound to another swarm by each test."""


def open_client(folder: Path, cuts: Sequence[Span], *, fresh: bool = False) -> tuple[ClientModel, LocalSwarm]:
    """`fresh`: one that no other test has used."""
    client, swarm = load_client(folder) if fresh else _client(folder), LocalSwarm(folder, cuts)
    client.bind(swarm)
    return client, swarm
