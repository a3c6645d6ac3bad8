"""Convolutions and gated delta rules of hybrids by the compiled kernels, where blocks call transformers' functions.

The blocks' own forward passes stay in charge: some functions that they call are others, for these blocks alone. A delta
rule is computed token by token, however many come. Torch pads a few tokens to 64, and takes longer for many, too.
Gradients, and what is not float32 on a CPU, stay with transformers' functions.
"""

from __future__ import annotations

import ctypes
import inspect
import logging
from collections.abc import Iterable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, ClassVar, Final

import torch
from torch import nn

from ..caches.states import StateInputs
from .library import Convolution, DeltaRule, Library, usable_threads

_log = logging.getLogger(__name__)

_TOLERANCE: Final = 1e-4
"""Largest relative rms difference from transformers' functions on random input; 1e-6 is usual."""


def use_recurrent_kernels(blocks: Iterable[nn.Module], found: Library | None) -> None:
    """Has the kernels compute what they know of the modules within `blocks`, and compute as transformers does."""
    if found is None:
        return
    chosen: dict[Any, Any] = {}
    modules: list[Any] = [module for block in blocks for module in [*block.modules()][1:]]
    for module in modules:
        forward: Any = inspect.unwrap(type(module).forward)  # what is around it moves weights between devices
        called = _REPLACED.keys() & forward.__globals__.keys() & set(forward.__code__.co_names)
        functions = {name: forward.__globals__[name] for name in called}
        for name, function in functions.items():
            if function not in chosen:
                ours = _REPLACED[name](found.functions, usable_threads(), function)
                chosen[function] = ours if ours.agrees() else function
        if functions:
            own = forward.__globals__ | {name: chosen[function] for name, function in functions.items()}
            changed = FunctionType(forward.__code__, own, None, forward.__defaults__, forward.__closure__)
            changed.__kwdefaults__ = forward.__kwdefaults__
            module.forward = MethodType(changed, module)


@dataclass(frozen=True)
class DeltaInputs(StateInputs):
    """Keys and values [rows, tokens, heads, ..], logarithms of decays and betas [rows, tokens, heads, ..] of a rule."""

    kernels: ctypes.CDLL
    threads: int
    normed: bool

    def behind(self, state: torch.Tensor, tokens: int) -> torch.Tensor:
        given = [one[:, :tokens].contiguous() for one in self.given]
        self.lead(given[0], *given, state)  # what the queries would give is not used
        return state

    def lead(self, *given: torch.Tensor) -> torch.Tensor | None:
        """What queries in front of such inputs give, and `state` behind these, which becomes that at their end. All are
        contiguous. None: the kernels do not compute it."""
        _, key, value, decay, *_ = given
        output, sizes = torch.empty_like(value), (*value.shape[:3], *key.shape[2:], value.shape[3])
        told = (decay[0, 0, 0].numel(), int(self.normed), key[0, 0].numel(), value[0, 0].numel())
        run = DeltaRule(*(one.data_ptr() for one in (*given, output)), *sizes, *told)
        return output if self.kernels.petalnode_delta(run, self.threads) else None


@dataclass(frozen=True)
class _Replacement:
    """Called in the place of `original`, a function of transformers, which it calls where kernels do not compute."""

    kernels: ctypes.CDLL
    threads: int
    original: Any

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError

    def agrees(self) -> bool:
        """Whether both compute the same on random input."""
        try:
            with torch.inference_mode():
                pairs = list(zip(self._tried(self), self._tried(self.original), strict=True))
            difference = max(float((one - other).norm() / other.norm()) for one, other in pairs)  # NaN if the first is
        except Exception as error:  # another version of transformers may want to be called otherwise
            _log.debug("torch computes %s: %s", self.original, error)
            return False
        if not difference <= _TOLERANCE:
            _log.warning("torch computes %s: the compiled kernels differ by %.1g", self.original, difference)
        return difference <= _TOLERANCE

    def _tried(self, function: Any) -> list[torch.Tensor]:
        """What `function` makes of random input, states included, in several calls; the same input each time."""
        raise NotImplementedError


class _OfChannels(_Replacement):
    """A causal convolution of each channel: `hidden` [rows, channels, tokens] with `weight` [channels, taps]."""

    def _run(self, hidden: Any, state: Any, weight: Any, bias: Any, activation: Any) -> Any:
        """What comes behind `state` [rows, channels, held], which takes `hidden` in; None: not for the kernels."""
        known = activation in (None, "silu", "swish") and (state is None or state.is_contiguous())
        if not known or not _computes(hidden, weight, *(one for one in (state, bias) if one is not None)):
            return None
        rows, channels, tokens = hidden.shape
        output = hidden.new_empty(rows, tokens, channels)
        given = [None if one is None else one.contiguous() for one in (hidden, weight, bias, state, output)]
        held, silu = 0 if state is None else state.shape[2], int(activation is not None)
        pointers = (None if one is None else one.data_ptr() for one in given)
        run = Convolution(*pointers, rows, channels, tokens, weight.shape[1], held, silu)
        return output.transpose(1, 2) if self.kernels.petalnode_convolve(run, self.threads) else None


class _Convolution(_OfChannels):
    """`causal_conv1d_fn`: nothing came before."""

    def __call__(self, hidden: Any, weight: Any, bias: Any = None, activation: Any = None, **kwargs: Any) -> Any:
        output = self._run(hidden, None, weight, bias, activation)
        return self.original(hidden, weight, bias, activation, **kwargs) if output is None else output

    def _tried(self, function: Any) -> list[torch.Tensor]:
        hidden, weight, bias = _drawn((2, 24, 5), (24, 4), (24,))
        return [function(hidden, weight, bias, activation="silu"), function(hidden, weight)]


class _Update(_OfChannels):
    """`causal_conv1d_update`: of what comes behind a state, which takes it in."""

    def __call__(self, hidden: Any, conv_state: Any, weight: Any, bias: Any = None, activation: Any = None) -> Any:
        output = self._run(hidden, conv_state, weight, bias, activation)
        return self.original(hidden, conv_state, weight, bias, activation) if output is None else output

    def _tried(self, function: Any) -> list[torch.Tensor]:
        hidden, state, weight, bias = _drawn((2, 24, 1), (2, 24, 4), (24, 4), (24,))
        return [function(hidden, state, weight, bias, "silu"), function(hidden, state, weight), state]


class _DeltaRule(_Replacement):
    """A gated delta rule, as `torch_chunk_gated_delta_rule` has it; `initial_state` becomes the state at its end."""

    decays: ClassVar[tuple[int, ...]] = ()
    """Behind its heads, in the shape of `g`."""

    def __call__(self, query: Any, key: Any, value: Any, g: Any, beta: Any, *args: Any, **options: Any) -> Any:
        (rows, _, heads, dim), state = value.shape, options.get("initial_state")
        if state is None:
            state = value.new_zeros(rows, heads, key.shape[3], dim, dtype=torch.float32)
        given = [one.contiguous() for one in (query, key, value, g, beta, state)]
        if not args and options.get("cu_seqlens") is None and _computes(*given):
            inputs = DeltaInputs(given[1:5], self.kernels, self.threads, bool(options.get("use_qk_l2norm_in_kernel")))
            if (output := inputs.lead(*given)) is not None:
                vars(given[5])["inputs"] = inputs  # for `StateView`
                return output, given[5] if options.get("output_final_state") else None
        return self.original(query, key, value, g, beta, *args, **options)

    def _tried(self, function: Any) -> list[torch.Tensor]:
        heads = (2, 3, 2)
        query, key, value, beta, state = _drawn(*[(*heads, 24)] * 3, heads, (2, 2, 24, 24))
        given = query, key, value, -_drawn((*heads, *self.decays))[0].abs(), beta.sigmoid()
        afresh = function(*given, initial_state=None, output_final_state=True)
        return [*afresh, *function(*given, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True)]


class _DeltaRuleByChannel(_DeltaRule):
    """One in which each value of a key decays by itself (Kimi Delta Attention, arXiv 2510.26692)."""

    decays = (24,)


_REPLACED: Final[dict[str, type[_Replacement]]] = {
    "causal_conv1d_fn": _Convolution,
    "causal_conv1d_update": _Update,
    "chunk_kimi_delta_attention": _DeltaRuleByChannel,
    "recurrent_kimi_delta_attention": _DeltaRuleByChannel,
    "torch_chunk_gated_delta_rule": _DeltaRule,
    "torch_recurrent_gated_delta_rule": _DeltaRule,
}
"""By the names of the functions that transformers' blocks call."""


def _computes(*tensors: torch.Tensor) -> bool:
    """Whether the kernels compute with these."""
    differentiated = torch.is_grad_enabled() and any(one.requires_grad for one in tensors)
    return not differentiated and all(one.dtype == torch.float32 and one.device.type == "cpu" for one in tensors)


def _drawn(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for shape in shapes]
