"""States that blocks keep beside keys and values, or in their place: what a convolution has seen last, and what linear
attention sums up. A step replaces them, so that going back takes copies of what was.

A session keeps a few states of the past (`STATES`, the newest among them). With each it keeps what entered the blocks
behind it, while that is few tokens. It goes back to any token between by computing those few once more: together with
the next step, or before it. So what drafts need, `WINDOW` tokens at least, costs no state for each of them. A step
makes one state, however many parts it is computed in, and only when it is done: one that fails leaves no trace.

Where kernels compute the states, a session also keeps what entered these with the last tokens (`StateRing.rewound`).
The state behind any of them follows from the one before without the blocks ("The Mamba in the Llama", arXiv 2408.15237,
section 4).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import torch
from transformers.cache_utils import Cache

STATES: Final = 4
WINDOW: Final = 128
"""Tokens that a session can go back at least, unless a longer step is among them: then to the start of that step. More
than a client drafts (`MOST_DRAFTED`), however many steps that is sent in."""

SNAPSHOT: Final = 256
"""Tokens from one position to the next whose states later sessions may begin with."""
STATE_TOKENS: Final = 512
"""As how many cache tokens the states of a row count, in a span whose blocks keep nothing else."""
STATE_CHUNK: Final = 64
"""Tokens of a piece of a gated delta rule."""

StateName = tuple[int, str, int]
"""The block's place in the hosted span, what it is ("conv", "recurrent", or "inputs": what has entered a convolution,
padding too), and the number of the state among those of its kind."""
States = Mapping[StateName, torch.Tensor]


@dataclass(frozen=True)
class HeldTokens:
    """What one device holds of some tokens of every row: `values`, flat, in the dtype of its memory, and the `states`
    behind the last one. None: these were not kept; empty: there are none."""

    values: torch.Tensor
    states: States | None

    def counted(self, tokens: int) -> int:
        """As how many cache tokens all of it counts, of which `tokens` are those of all rows."""
        states = list((self.states or {}).values())
        if states and not self.values.nbytes:
            return tokens + STATE_TOKENS // STATES * states[0].shape[0]
        return tokens - (-sum(state.nbytes for state in states) * tokens // max(1, self.values.nbytes))


@dataclass(frozen=True)
class StateInputs:
    """What has entered one state with the tokens of a step: tensors [rows, tokens, ..]. This is of a convolution."""

    given: Sequence[torch.Tensor]

    @property
    def tokens(self) -> int:
        return self.given[0].shape[1]

    @property
    def nbytes(self) -> int:
        return sum(one.nbytes for one in self.given)

    def behind(self, state: torch.Tensor, tokens: int) -> torch.Tensor:
        """What `state`, which may be changed in place, becomes with the first `tokens` of them."""
        seen = torch.cat([state, self.given[0][:, :tokens].movedim(1, -1)], dim=-1)
        return seen[..., tokens:].contiguous()


@dataclass(frozen=True)
class StateSpec:
    """One state of a block: `shape` for each row. `entering`: bytes of `StateInputs` for a token, 0 where only blocks
    lead from state to state."""

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    entering: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StatesLost(ValueError):
    """A session cannot go back so far: its inputs have to be computed again from the first token."""


_Inputs = tuple[int, Mapping[StateName, StateInputs]]
"""How many of the first tokens of a step are left, and what has entered each state with the step."""


@dataclass
class _Kept:
    """`states` at `position`, where a rollback led if it is `chosen`. Behind it, as far as the next that is kept:
    `entered` [rows, tokens, hidden size], and what entered the states; None and empty where these are not kept."""

    position: int
    states: dict[StateName, torch.Tensor]
    entered: torch.Tensor | None = None
    inputs: list[_Inputs] = field(default_factory=list)
    chosen: bool = False

    def reach(self) -> int:
        return self.position + (0 if self.entered is None else self.entered.shape[1])

    def behind(self, tokens: int) -> dict[StateName, torch.Tensor] | None:
        """The states `tokens` tokens behind it, and no inputs are kept of those farther on; None: only the blocks lead
        there."""
        given, self.inputs = self.inputs, []
        for count, inputs in given:
            if tokens:
                self.inputs.append((min(count, tokens), inputs))
                tokens -= self.inputs[-1][0]
        if tokens:
            self.inputs = []
            return None
        states = {name: state.clone() for name, state in self.states.items()}
        for count, inputs in self.inputs:
            states = {name: inputs[name].behind(state, count) for name, state in states.items()}
        return states

    def leads_past(self, behind: _Kept) -> list[_Inputs]:
        """What leads from it past the next one; nothing if that is chosen, or it is too much."""
        inputs = self.inputs + behind.inputs
        short = sum(count for count, _ in inputs) <= StateRing.rewound and not behind.chosen
        return inputs if short and self.inputs and behind.inputs else []


class StateRing:
    """The states of one session. Not thread-safe: the compute thread owns it.

    Attributes:
        rewound: tokens at the most, of which what entered the states is kept.
        snapshots: of the step that was computed last, states by their positions, which are multiples of `SNAPSHOT`: no
            more than fit beside the others into what is counted for a session. Nobody changes them.
    """

    rewound: ClassVar[int] = 16

    def __init__(self) -> None:
        self.snapshots: dict[int, States] = {}
        self._kept = [_Kept(0, {})]
        self._next: dict[StateName, torch.Tensor] = {}
        self._inputs: dict[StateName, StateInputs] = {}
        self._step = range(0)

    @property
    def nbytes(self) -> int:
        """Of all that is kept now."""
        tensors = [state for kept in self._kept for state in kept.states.values()]
        tensors += [kept.entered for kept in self._kept if kept.entered is not None]
        inputs = [one for kept in self._kept for _, inputs in kept.inputs for one in inputs.values()]
        return sum(tensor.nbytes for tensor in tensors) + sum(one.nbytes for one in inputs)

    @classmethod
    def bytes_per_row(cls, specs: Sequence[StateSpec]) -> int:
        """What is kept at once, at the most, of a block with these states."""
        entering = sum(spec.entering for spec in specs) if all(spec.entering for spec in specs) else 0
        return STATES * sum(spec.nbytes for spec in specs) + cls.rewound * entering

    # --- for a model

    def get(self, name: StateName) -> torch.Tensor | None:
        """A state as the step that is computed has it so far, which may be changed in place; None: there is none."""
        if name not in self._next and name in self._kept[-1].states:
            self._next[name] = self._kept[-1].states[name].clone()
        return self._next.get(name)

    def last(self, name: StateName) -> torch.Tensor | None:
        """A state as the last step has left it, which nobody may change."""
        return self._kept[-1].states.get(name)

    def put(self, name: StateName, state: torch.Tensor, inputs: StateInputs | None = None) -> None:
        """`inputs`: what has made it of the state as the last step has left it."""
        self._next[name] = state
        if inputs is not None:
            self._inputs[name] = inputs

    def computed(self) -> dict[StateName, torch.Tensor]:
        """What was put since the last `begin`."""
        return self._next

    def specs(self, block: int) -> tuple[StateSpec, ...]:
        """What the block at this place of the span keeps, as it has put it in the first step, of one token of a row."""
        found = []
        for (place, kind, index), state in self._next.items():
            inputs = self._inputs.get((place, kind, index))
            entering = state.nbytes // state.shape[-1] if kind == "conv" else 0 if inputs is None else inputs.nbytes
            if place == block:
                found.append(StateSpec(kind, index, tuple(state.shape[1:]), state.dtype, entering))
        return tuple(found)

    def blank(self, rows: Sequence[int]) -> None:
        """As if nothing had entered these rows."""
        for (_, kind, _), state in self._next.items():
            if kind != "inputs":
                state[list(rows)] = 0

    # --- for a session

    def mark(self, position: int, tokens: int) -> None:
        """What is computed of the next `tokens` tokens, behind `position`, is one step."""
        self._step, self.snapshots = range(position, position + tokens), {}

    def begin(self, position: int) -> torch.Tensor | None:
        """What is to be computed once more, ahead of what follows behind `position`, where a rollback led."""
        self.abandon()
        last = self._kept[-1]
        if last.position >= position:
            return None
        if (states := last.behind(position - last.position)) is None:
            return last.entered
        self._kept.append(_Kept(position, states, chosen=True))
        return None

    def abandon(self) -> None:
        self._next, self._inputs = {}, {}

    def commit(self, position: int, entered: torch.Tensor) -> None:
        """The states that were put are those at `position`, where `entered` has led from the ones before."""
        last, tokens = self._kept[-1], entered.shape[1]
        last.entered = entered.clone() if tokens <= WINDOW else None
        whole = {inputs.tokens for inputs in self._inputs.values()} == {tokens}  # and not of its last part alone
        known = whole and last.states.keys() == self._next.keys() == self._inputs.keys()
        last.inputs = [(tokens, self._inputs)] if known and tokens <= self.rewound else []
        self._kept.append(_Kept(position, {**last.states, **self._next}))
        self.abandon()
        if position % SNAPSHOT == 0:
            self.snapshots[position] = self._kept[-1].states
            while len(self.snapshots) > STATES - 2:
                del self.snapshots[min(self.snapshots)]
        if last.position in self._step[1:]:
            self._join(len(self._kept) - 2)
        elif len(self._kept) > STATES:
            self._thin()
        left = self.rewound
        for kept in reversed(self._kept):
            left -= sum(count for count, _ in kept.inputs)
            kept.inputs = kept.inputs if left >= 0 else []

    def rollback(self, position: int) -> None:
        """Forgets what came behind `position`.

        Raises:
            StatesLost: the states there are not kept; nothing has changed.
        """
        places = [place for place, kept in enumerate(self._kept) if kept.position <= position]
        if not position:
            self._kept = [_Kept(0, {})]
        elif places and (position <= self._kept[places[-1]].reach()):
            del self._kept[places[-1] + 1 :]
            last = self._kept[-1]
            tokens = position - last.position
            last.entered = last.entered[:, :tokens] if last.entered is not None and tokens else None
            last.chosen = last.chosen or not tokens
        else:
            raise StatesLost(
                f"the states at {position} tokens are not kept: send again what led there, from the first token on"
            )

    def restore(self, snapshots: Mapping[int, States]) -> None:
        """Begins with `snapshots` of other sessions, at the last of their positions."""
        self._kept += [_Kept(position, dict(states)) for position, states in sorted(snapshots.items())]
        del self._kept[:-STATES]

    def reorder(self, rows: Sequence[int]) -> None:
        """Row r continues what row `rows[r]` held."""

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.index_select(0, torch.tensor(list(rows), device=tensor.device))

        for kept in self._kept:
            kept.states = {name: moved(state) for name, state in kept.states.items()}
            kept.entered, kept.inputs = None if kept.entered is None else moved(kept.entered), []

    def _join(self, place: int) -> None:
        """Drops a state; from the one before it what entered behind it leads on."""
        before, dropped = self._kept[place - 1], self._kept.pop(place)
        before.inputs = before.leads_past(dropped)
        parts = [part for part in (before.entered, dropped.entered) if part is not None]
        short = len(parts) == 2 and sum(part.shape[1] for part in parts) <= 2 * WINDOW
        before.entered = torch.cat(parts, dim=1) if short else None

    def _thin(self) -> None:
        """A state goes for a newer one: that before the last step if the one before it leads past it; else one of the
        two oldest, once the other is `WINDOW` tokens back."""
        if self._kept[-3].leads_past(self._kept[-2]):
            self._join(len(self._kept) - 2)
            return
        second, third = self._kept[1:3]
        near = second.entered is not None and second.entered.shape[1] < WINDOW
        if near and third.entered is not None:
            self._join(2)
        else:
            del self._kept[0]


class JoinedStates:
    """Those of several sessions, row behind row, for one step of one token of all of them."""

    def __init__(self, rings: Sequence[StateRing], rows: Sequence[int]) -> None:
        self._rings, self._rows = rings, list(rows)
        self._joined: dict[StateName, torch.Tensor] = {}

    def get(self, name: StateName) -> torch.Tensor | None:
        if name not in self._joined:
            states = [state for ring in self._rings if (state := ring.last(name)) is not None]
            if states and len(states) < len(self._rings):
                raise ValueError("a session without states among others: it has to be computed alone")
            if states:
                self._joined[name] = torch.cat(states)
        return self._joined.get(name)

    def put(self, name: StateName, state: torch.Tensor, inputs: StateInputs | None = None) -> None:
        self._joined[name] = state

    def part(self) -> None:
        """Gives each session what its rows have come to."""
        for name, joined in self._joined.items():
            for ring, state in zip(self._rings, torch.split(joined, self._rows), strict=True):
                ring.put(name, state.clone())


class StateView(Cache):  # type: ignore[misc]  # transformers is untyped here
    """The states as transformers' models see them; as `LinearAttentionLayer` of its caches, but for many at once."""

    def __init__(self, states: StateRing | JoinedStates | None) -> None:
        super().__init__(layers=[])
        self._states = states

    @property
    def _ring(self) -> StateRing | JoinedStates:
        if self._states is None:
            raise ValueError("this session's blocks keep no states")
        return self._states

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._ring.get((layer_idx, "conv", state_idx))

    def update_conv_state(
        self,
        conv_states: torch.Tensor,
        layer_idx: int,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Keeps the end of what has entered a convolution, and returns all of it that this step needs."""
        name = (layer_idx, "conv", state_idx)
        before = self._ring.get(name)
        if before is None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            seen = torch.nn.functional.pad(conv_states, (max(size - conv_states.shape[-1], 0), 0))
        else:
            size = before.shape[-1]
            seen = torch.cat([before, conv_states], dim=-1)
        inputs = None if before is None else StateInputs([conv_states.movedim(-1, 1)])
        self._ring.put(name, seen[..., -size:].clone(), inputs)
        return seen

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._ring.get((layer_idx, "recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        name = (layer_idx, "recurrent", state_idx)
        before = self._ring.get(name)
        state = recurrent_states.to(recurrent_states.dtype if before is None else before.dtype)
        inputs = vars(recurrent_states).pop("inputs", None)  # of a kernel that has computed it
        self._ring.put(name, state, inputs if state is recurrent_states else None)
        return state

    def kept(self, layer_idx: int, kind: str) -> torch.Tensor | None:
        return self._ring.get((layer_idx, kind, 0))

    def keep(self, layer_idx: int, kind: str, state: torch.Tensor) -> None:
        """Keeps a state as a whole."""
        self._ring.put((layer_idx, kind, 0), state)

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """As `MiniMaxCache` has it."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        """As `MiniMaxCache` has it."""
        self.keep(layer_idx, "recurrent", linear_cache)

    def is_recording_past(self, layer_idx: int) -> bool:
        return False
