"""States that blocks keep beside keys and values, or in their place: what a convolution has seen last, and what linear
attention sums up. A step replaces them, so that going back takes copies of what was.

A session keeps a few states of the past (`STATES`, the newest among them) with what entered the blocks behind each, as
long as these are few tokens. It goes back to any token between by computing those few once more, together with the next
step, or before it where they are many. So what drafts need, `WINDOW` tokens at least, costs no state for each of them.
A step makes one state, however many parts it is computed in, and only when it is done: one that fails leaves no trace.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

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
class StateSpec:
    """One state of a block: `shape` for each row."""

    kind: str
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


class StatesLost(ValueError):
    """A session cannot go back so far: its inputs have to be computed again from the first token."""


@dataclass
class _Kept:
    """`states` at `position`; `entered`: [rows, tokens, hidden size] behind it, None where these are not kept."""

    position: int
    states: dict[StateName, torch.Tensor]
    entered: torch.Tensor | None = None

    def reach(self) -> int:
        return self.position + (0 if self.entered is None else self.entered.shape[1])


class StateRing:
    """The states of one session. Not thread-safe: the compute thread owns it.

    Attributes:
        snapshots: of the step that was computed last, states by their positions, which are multiples of `SNAPSHOT`: no
            more than fit beside the others into what is counted for a session. Nobody changes them.
    """

    def __init__(self) -> None:
        self.snapshots: dict[int, States] = {}
        self._kept = [_Kept(0, {})]
        self._next: dict[StateName, torch.Tensor] = {}
        self._step = range(0)

    @property
    def nbytes(self) -> int:
        """Of all that is kept now."""
        tensors = [state for kept in self._kept for state in kept.states.values()]
        tensors += [kept.entered for kept in self._kept if kept.entered is not None]
        return sum(tensor.nbytes for tensor in tensors)

    # --- for a model

    def get(self, name: StateName) -> torch.Tensor | None:
        """A state as the step that is computed has it so far, which may be changed in place; None: there is none."""
        if name not in self._next and name in self._kept[-1].states:
            self._next[name] = self._kept[-1].states[name].clone()
        return self._next.get(name)

    def last(self, name: StateName) -> torch.Tensor | None:
        """A state as the last step has left it, which nobody may change."""
        return self._kept[-1].states.get(name)

    def put(self, name: StateName, state: torch.Tensor) -> None:
        self._next[name] = state

    def computed(self) -> dict[StateName, torch.Tensor]:
        """What was put since the last `begin`."""
        return self._next

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
        self._next = {}
        last = self._kept[-1]
        return last.entered if last.position < position else None

    def abandon(self) -> None:
        self._next = {}

    def commit(self, position: int, entered: torch.Tensor) -> None:
        """The states that were put are those at `position`, where `entered` has led from the ones before."""
        last = self._kept[-1]
        last.entered = entered.clone() if entered.shape[1] <= WINDOW else None
        self._kept.append(_Kept(position, {**last.states, **self._next}))
        self._next = {}
        if position % SNAPSHOT == 0:
            self.snapshots[position] = self._kept[-1].states
            while len(self.snapshots) > STATES - 2:
                del self.snapshots[min(self.snapshots)]
        if last.position in self._step[1:]:
            self._join(len(self._kept) - 2)
        elif len(self._kept) > STATES:
            self._thin()

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
            kept.entered = None if kept.entered is None else moved(kept.entered)

    def _join(self, place: int) -> None:
        """Drops a state; from the one before it what entered behind it leads on."""
        before, dropped = self._kept[place - 1], self._kept.pop(place)
        parts = [part for part in (before.entered, dropped.entered) if part is not None]
        short = len(parts) == 2 and sum(part.shape[1] for part in parts) <= 2 * WINDOW
        before.entered = torch.cat(parts, dim=1) if short else None

    def _thin(self) -> None:
        """Of the two oldest states one goes for a newer one, once the other is `WINDOW` tokens back."""
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

    def put(self, name: StateName, state: torch.Tensor) -> None:
        self._joined[name] = state

    def computed(self) -> dict[StateName, torch.Tensor]:
        return self._joined

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
        self._ring.put(name, seen[..., -size:].clone())
        return seen

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._ring.get((layer_idx, "recurrent", state_idx))

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> torch.Tensor:
        name = (layer_idx, "recurrent", state_idx)
        before = self._ring.get(name)
        state = recurrent_states.to(recurrent_states.dtype if before is None else before.dtype)
        self._ring.put(name, state)
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

    @property
    def states(self) -> dict[StateName, torch.Tensor]:
        """Those that the blocks have put since the last step."""
        return self._ring.computed()

    def is_recording_past(self, layer_idx: int) -> bool:
        return False


def specs_of(states: dict[StateName, torch.Tensor], block: int) -> tuple[StateSpec, ...]:
    """What the block at this place of the span keeps."""
    return tuple(
        StateSpec(kind, index, tuple(state.shape[1:]), state.dtype)
        for (place, kind, index), state in states.items()
        if place == block
    )
