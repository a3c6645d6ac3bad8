"""Gated delta rules in a step of the compiled kernels: what they need of a block's modules, and a session's states."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn

from ..cache import SpanCache
from ..caches.states import StateInputs, StateRing, StateSpec
from .library import Block, Delta, Matrix, Unsuitable, Values, usable_threads
from .recurrent import DeltaInputs
from .tiles import LANES, pointer


@dataclass(frozen=True)
class DeltaLayout:
    """How a family names and orders what a gated delta rule needs, within the module in the place of attention.

    Attributes:
        projections: paths of linear layers, each with what its outputs are: queries, keys, values, gates of what comes
            out (z), betas, and what decays come from (a), one letter each.
        norm, output: paths of the norm of what comes out, and of the last layer.
        by_head: whether all outputs of a projection for one head of keys stand together.
        of: projections that take the outputs of another one before them, whose path this is, and not the block's input.
        decay: path of the module that decays belong to.
    """

    projections: Mapping[str, str]
    norm: str
    output: str
    by_head: bool = False
    of: Mapping[str, str] = field(default_factory=dict)
    decay: str = ""


_LAYOUTS: Final = (
    DeltaLayout({"in_proj_qkvz": "qkvz", "in_proj_ba": "ba"}, "norm", "out_proj", by_head=True),
    DeltaLayout({"in_proj_qkv": "qkv", "in_proj_z": "z", "in_proj_b": "b", "in_proj_a": "a"}, "norm", "out_proj"),
    DeltaLayout(
        {"q_proj": "q", "k_proj": "k", "v_proj": "v", "g_proj": "z", "b_proj": "b", "a_proj": "a"}, "o_norm", "o_proj"
    ),
    DeltaLayout(
        {
            "q_proj": "q",
            "k_proj": "k",
            "v_proj": "v",
            "b_proj": "b",
            "forget_gate.f_a_proj": "",
            "g_a_proj": "",
            "forget_gate.f_b_proj": "a",
            "g_b_proj": "z",
        },
        "o_norm",
        "o_proj",
        of={"forget_gate.f_b_proj": "forget_gate.f_a_proj", "g_b_proj": "g_a_proj"},
        decay="forget_gate",
    ),
)
"""Of Qwen3-Next, Qwen3.5, OLMo Hybrid and Kimi Linear."""


def layout_of(module: nn.Module) -> DeltaLayout | None:
    """None if the module is none with a gated delta rule."""
    paths = {path for path, _ in module.named_modules()}
    return next((layout for layout in _LAYOUTS if paths.issuperset(layout.projections)), None)


def describe_delta(
    module: Any, layout: DeltaLayout, states: Sequence[StateSpec], matrices: Sequence[Matrix]
) -> tuple[Delta, list[torch.Tensor]]:
    """The rule for the kernels, with the `matrices` of its projections, in order; and the tensors that it points into.

    Raises:
        Unsuitable: the kernels do not compute such a rule.
    """
    norm, decay = module.get_submodule(layout.norm), module.get_submodule(layout.decay)
    (channels, _, taps), bias = module.conv1d.weight.shape, module.conv1d.bias
    heads, value_dim = decay.A_log.numel(), norm.weight.numel()
    key_heads, decays, values = getattr(module, "num_k_heads", heads), decay.dt_bias.numel() // heads, heads * value_dim
    keys = (channels - values) // 2
    key_dim, kept = keys // key_heads, {state.kind: state.shape for state in states if state.dtype == torch.float32}
    held = kept.get("conv", (0, 0))[1]
    if kept != {"conv": (channels, held), "recurrent": (heads, key_dim, value_dim)} or not taps - 1 <= held <= 15:
        raise Unsuitable("states of another kind")
    if key_dim % LANES or value_dim % LANES or key_dim > 256 or heads % key_heads or decays not in (1, key_dim):
        raise Unsuitable("heads of other sizes")
    gate = {"silu": 1, "sigmoid": 3}.get(norm.activation)  # as `enum activation` counts them
    if module.activation != "silu" or gate is None:
        raise Unsuitable("other activations")
    paths, groups = list(layout.projections), key_heads if layout.by_head else 1
    sizes = {"q": keys, "k": keys, "v": values, "z": values, "b": heads, "a": heads * decays}
    found = Delta(len(paths), key_heads, heads, key_dim, value_dim, decays, taps, held, gate)
    found.most, found.eps = 2.0 if getattr(module, "allow_neg_eigval", False) else 1.0, float(norm.variance_epsilon)
    weights = [module.conv1d.weight, decay.A_log, decay.dt_bias, norm.weight, *([] if bias is None else [bias])]
    found.taps_of, found.rates, found.moved, found.norm, *biases = map(pointer, weights)
    found.bias = next(iter(biases), None)
    for number, (path, matrix) in enumerate(zip(paths, matrices, strict=True)):
        found.projection[number] = matrix
        found.of[number] = paths.index(layout.of[path]) if path in layout.of else -1
        widths = [sizes[letter] // groups for letter in layout.projections[path]]
        if widths and found.projection[number].out != groups * sum(widths):
            raise Unsuitable("matrices of other shapes")
        for place, letter in enumerate(layout.projections[path]):
            found.parts[list(sizes).index(letter)] = Values(number, sum(widths[:place]), widths[place], sum(widths))
    return found, weights


def mixing_floats(delta: Delta) -> int:
    """float32 that a step needs for each row between the block's input and its last layer."""
    keys, values = delta.key_heads * delta.key_dim, delta.heads * delta.value_dim
    outputs = sum(matrix.out for matrix in delta.projection[: delta.projections])
    return int(outputs + 2 * keys + 3 * values + delta.heads * (1 + delta.decays))


@dataclass(frozen=True)
class _RuleInputs(StateInputs):
    """Of a rule, in one tensor: values of these sizes for each token, in the order that `_entering` has."""

    sizes: Sequence[tuple[int, ...]]
    kernels: ctypes.CDLL

    def behind(self, state: torch.Tensor, tokens: int) -> torch.Tensor:
        given = self.given[0]
        parts = torch.split(given, [math.prod(size) for size in self.sizes], dim=2)
        shapes = (given.shape[:2] + size for size in self.sizes)
        key, value, beta, decay = (part.view(shape) for part, shape in zip(parts, shapes, strict=True))
        return DeltaInputs((key, value, decay, beta), self.kernels, usable_threads(), True).behind(state, tokens)


def _entering(delta: Delta) -> Sequence[tuple[int, ...]]:
    """Sizes of what enters a rule with a token, as `struct row` has it: keys, values, betas and decays."""
    return (delta.key_heads, delta.key_dim), (delta.heads, delta.value_dim), (delta.heads,), (delta.heads, delta.decays)


def entering_states(
    cache: SpanCache, blocks: ctypes.Array[Block], kernels: ctypes.CDLL, tokens: int
) -> tuple[Any, list[torch.Tensor | None]]:
    """What `struct row` points to for the rows of a session: its states before a step of `tokens` tokens, and new ones
    to be filled, which are put into its ring; and where what enters them is kept. The tensors are to be kept while the
    kernels compute."""
    tensors: list[torch.Tensor | None] = []
    ring = cache.states or StateRing()
    for block, spec in enumerate(cache.specs, cache.first):
        if not spec.states:
            continue
        conv_and_rule = sorted(spec.states, key=lambda state: state.kind)
        inputs: list[StateInputs | None] = [None, None]
        kept = None
        if tokens <= ring.rewound:
            sizes, channels = _entering(Delta.from_address(blocks[block].delta)), conv_and_rule[0].shape[0]
            kept = torch.empty(cache.batch, tokens, channels + sum(map(math.prod, sizes)))
            inputs = [StateInputs([kept[..., :channels]]), _RuleInputs([kept[..., channels:]], sizes, kernels)]
        for state, entering in zip(conv_and_rule, inputs, strict=True):
            name = (block, state.kind, state.index)
            before = behind = ring.computed().get(name)
            if behind is None:
                before, behind = ring.last(name), torch.empty(cache.batch, *state.shape)
                ring.put(name, behind, entering)
            tensors += [None if before is None else before.contiguous(), behind]
        tensors.append(kept)
    pointers = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
    return (ctypes.c_void_p * len(pointers))(*pointers), tensors
