"""Adapters in the blocks: LoRA (Hu et al. 2021) and deep prompts, added by hooks for the time of a pass.

`with_lora` changes one block for a batch, with gradients; `with_adapters` the blocks for several sessions in one pass.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.nn.functional import linear, pad
from transformers.pytorch_utils import Conv1D

from ...protocols.training import LORA_PARTS, LoraName
from .cache import SpanCache
from .stack import BlockStack, of_each_stream

LoraPair = tuple[torch.Tensor, torch.Tensor]
"""A [rank, in] and B [out, rank], any factor included."""


def linear_shapes(block: nn.Module) -> dict[str, tuple[int, int]]:
    """(values in, values out) of every linear layer of a block, by its path there; quantised ones too."""
    shapes: dict[str, tuple[int, int]] = {}
    for path, module in block.named_modules():
        if isinstance(module, Conv1D):
            shapes[path] = (module.nx, module.nf)
        elif hasattr(module, "n_groups"):  # each group of values has a matrix of its own
            continue
        elif isinstance(getattr(module, "in_features", None), int) and next(module.children(), None) is None:
            shapes[path] = (int(module.in_features), int(module.out_features))
    return shapes


@contextmanager
def with_lora(block: nn.Module, pairs: Mapping[str, LoraPair]) -> Iterator[None]:
    """Within it, the layers of `block` at these paths return B A x more than their own."""
    with ExitStack() as hooks:
        for path, pair in pairs.items():
            hooks.callback(block.get_submodule(path).register_forward_hook(_lora_hook(*pair)).remove)
        yield


def _lora_hook(a: torch.Tensor, b: torch.Tensor) -> Any:
    def add(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        given = args[0]
        return output + linear(linear(given, a.to(given.dtype)), b.to(given.dtype)).to(output.dtype)

    return add


class NotByRow(Exception):
    """A layer does not get one row of values for each row of the batch: adapters cannot be assigned to rows."""


@dataclass(frozen=True, eq=False)
class SpanAdapter:
    """An adapter's part for hosted blocks, on their device and in their dtype.

    Attributes:
        pairs: the layers that it changes.
        prompts: by the block's number, [prefix, hidden size] added to the first positions of what enters it; the same
            prefix for all.
    """

    pairs: tuple[tuple[nn.Module, LoraPair], ...]
    prompts: Mapping[int, torch.Tensor]

    @property
    def prefix(self) -> int:
        """Positions to which prompts are added."""
        return next((prompt.shape[0] for prompt in self.prompts.values()), 0)


def make_span_adapter(
    tensors: Mapping[str, torch.Tensor], blocks: Mapping[int, nn.Module], dtype: torch.dtype, device: torch.device
) -> SpanAdapter:
    """What `tensors`, checked and named as in protocols/adapter.py, change of `blocks`."""
    pairs = []
    prompts = {}
    for key, tensor in tensors.items():
        name = LoraName.parse(key)
        if name is None:
            prompts[int(key.partition(".")[0])] = tensor.to(device, dtype)
        elif name.part == LORA_PARTS[0]:
            b = tensors[str(replace(name, part=LORA_PARTS[1]))]
            module = blocks[name.block].get_submodule(name.path)
            pairs.append((module, (tensor.to(device, dtype), b.to(device, dtype))))
    return SpanAdapter(tuple(pairs), prompts)


@dataclass(frozen=True)
class AdapterRows:
    """An adapter and its rows in a pass: `start` .. `end - 1` of `rows`."""

    adapter: SpanAdapter
    start: int
    end: int
    rows: int


@contextmanager
def with_adapters(adapter_rows: Sequence[AdapterRows]) -> Iterator[None]:
    """Within it, the layers return for the rows of each use what its adapter makes of them. For inference only.

    Layers that no use changes are left alone, and without any use nothing is done.

    Raises:
        NotByRow: in the pass, if not all rows have the same adapter.
    """
    changes: dict[nn.Module, list[tuple[AdapterRows, LoraPair]]] = {}
    for use in adapter_rows:
        for module, pair in use.adapter.pairs:
            changes.setdefault(module, []).append((use, pair))
    with ExitStack() as hooks:
        for module, of_module in changes.items():
            hooks.callback(module.register_forward_hook(_adapter_hook(of_module)).remove)
        yield


def _adapter_hook(changes: list[tuple[AdapterRows, LoraPair]]) -> Any:
    def add(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        given = args[0]
        for use, (a, b) in changes:
            rows, changed = given, output
            if use.end - use.start < use.rows:
                if given.shape[0] != use.rows:
                    raise NotByRow
                rows, changed = given[use.start : use.end], output[use.start : use.end]
            changed += linear(linear(rows.to(a.dtype), a), b)
        return output

    return add


@contextmanager
def with_prompts(
    stack: BlockStack, prompts: Sequence[tuple[int, torch.Tensor]], places: torch.Tensor
) -> Iterator[None]:
    """Within it, prompts [prefix, hidden] are added to what enters their blocks, which are named by their indices.

    `places` int64 [rows, tokens]: which of the prefix is added to each token; outside of it, none.
    """
    with ExitStack() as hooks:
        for index, prompt in prompts:
            meant = ((places >= 0) & (places < len(prompt))).unsqueeze(2)
            added = torch.where(meant, prompt[places.clamp(0, len(prompt) - 1)], 0)
            hook = _prompt_hook(of_each_stream(stack.boundaries, added))
            hooks.callback(stack.blocks[index].register_forward_pre_hook(hook, with_kwargs=True).remove)
        yield


@contextmanager
def with_added(stack: BlockStack, index: int, prompt: torch.Tensor, tokens: int) -> Iterator[None]:
    """Within it, `prompt` [1 or rows, prefix, hidden] is added to the first of `tokens` tokens that enter a block."""
    added = pad(prompt, (0, 0, 0, tokens - prompt.shape[1]))
    hook = _prompt_hook(of_each_stream(stack.boundaries, added))
    handle = stack.blocks[index].register_forward_pre_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def _prompt_hook(added: torch.Tensor) -> Any:
    def put(block: nn.Module, args: Any, kwargs: Any) -> Any:
        if args:
            return (args[0] + added, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"] + added}

    return put


@dataclass(frozen=True)
class Member:
    """One session's step in a batch of decode steps."""

    index: int
    hidden: torch.Tensor
    cache: SpanCache
    adapter: SpanAdapter | None


def rows_of_adapters(batch: Sequence[Member]) -> list[AdapterRows]:
    """The rows of each adapter in the batch, where members of one adapter are neighbours."""
    rows = sum(member.cache.batch for member in batch)
    adapter_rows: list[AdapterRows] = []
    start = 0
    for adapter, members in groupby(batch, lambda member: member.adapter):
        end = start + sum(member.cache.batch for member in members)
        if adapter is not None:
            adapter_rows.append(AdapterRows(adapter, start, end, rows))
        start = end
    return adapter_rows
