"""Tokens that are guessed before the chain is asked, and how many of them are worth asking about.

Speculative decoding (Leviathan et al., arXiv 2211.17192, section 2): a step carries the next token and a draft of those
after it; the chain answers for all of them at once, and the draft is kept as far as it is what is chosen anyhow. The
draft is a single guess for each place, so that comparing it with the token that the sampler chooses there *is* the
rejection rule of section 2.3, whatever the sampling: the answer is the same as without drafts, with the same seed.

Drafts come from the text itself: what followed the last few tokens where they stood before ("prompt lookup decoding",
Saxena 2023; suffix matching as in REST, arXiv 2311.08252, section 3.2). Pure: no clock, no network.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

MOST_DRAFTED: Final = 48
"""Tokens of one draft: more gains little where they are right, and costs the servers much where they are not."""
SHORTEST_MATCH: Final = 2
LONGEST_MATCH: Final = 6
"""Tokens that have to stand elsewhere, too, for a draft."""
_LONG_MATCH: Final = 4
"""From so many tokens on, a match is no coincidence: its first draft may be twice as long as itself."""
_FIRST_CHANCE: Final = 0.5
"""That a drafted token is right, before anything was drafted after a match of this length."""
_SURE: Final = 4.0
"""Drafted tokens for which that first guess counts."""
_FORGETS: Final = 0.97
"""What an observation still counts for after one more."""
_LONGEST_BREAK: Final = 256
"""Steps after which a kind of draft that has gained nothing is tried again."""
_OUTLIER: Final = 4.0
"""A step that takes so many times longer than expected says something of the network, not of its tokens."""


@dataclass(frozen=True)
class DraftCounts:
    """How many tokens were drafted, how many of them were right, and in how many steps."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return DraftCounts(self.drafted - other.drafted, self.accepted - other.accepted, self.steps - other.steps)

    def __str__(self) -> str:
        return f", {self.accepted} of {self.drafted} drafted tokens right in {self.steps} steps" if self.steps else ""

    def fields(self) -> dict[str, int]:
        """As JSON has it."""
        return {"drafted": self.drafted, "accepted": self.accepted, "steps": self.steps}


@dataclass(frozen=True)
class Draft:
    """Tokens that may come next; `match`: how many tokens before them stood elsewhere."""

    tokens: tuple[int, ...] = ()
    match: int = 0


class LookupDrafter:
    """Finds what followed the last tokens of a text where they stood before in it."""

    def __init__(self) -> None:
        self._after: dict[tuple[int, ...], int] = {}
        self._known: list[int] = []

    def matches(self, tokens: Sequence[int]) -> Iterator[Draft]:
        """What may come after `tokens`, the longest match first, each up to `MOST_DRAFTED` tokens."""
        self._learn(tokens)
        for length in range(min(LONGEST_MATCH, len(tokens) - 1), SHORTEST_MATCH - 1, -1):
            place = self._after.get(tuple(tokens[-length:]))
            if place is not None:
                yield Draft(tuple(_repeated(tokens, place)), length)

    def _learn(self, tokens: Sequence[int]) -> None:
        """Notes the newest place of every few tokens but the last ones, which nothing follows yet."""
        if list(tokens[: len(self._known)]) != self._known:
            self._after, self._known = {}, []
        for end in range(max(SHORTEST_MATCH, len(self._known)), len(tokens)):
            for length in range(SHORTEST_MATCH, min(LONGEST_MATCH, end) + 1):
                self._after[tuple(tokens[end - length : end])] = end
        self._known = list(tokens)


def _repeated(tokens: Sequence[int], place: int) -> list[int]:
    """What stands from `place` on; a text that ends there goes on as if it repeated itself."""
    period = len(tokens) - place
    return [tokens[place + index % period] for index in range(MOST_DRAFTED)]


class StepCost:
    """Seconds of a step by its tokens: a line through the last observations, weighted by age."""

    def __init__(self) -> None:
        self._count = self._tokens = self._seconds = self._squares = self._products = 0.0

    @property
    def is_known(self) -> bool:
        return self._count > 0

    def note(self, tokens: int, seconds: float) -> None:
        """A step of so many tokens took so long."""
        if self.is_known:
            seconds = min(seconds, _OUTLIER * self.of(tokens))
        self._count = _FORGETS * self._count + 1
        self._tokens = _FORGETS * self._tokens + tokens
        self._seconds = _FORGETS * self._seconds + seconds
        self._squares = _FORGETS * self._squares + tokens**2
        self._products = _FORGETS * self._products + tokens * seconds

    def of(self, tokens: int) -> float:
        """The seconds that a step of so many tokens takes. Only after a first observation."""
        mean_tokens, mean_seconds = self._tokens / self._count, self._seconds / self._count
        spread = self._squares / self._count - mean_tokens**2
        slope = 0.0
        if spread > 1e-9:
            slope = max(0.0, (self._products / self._count - mean_tokens * mean_seconds) / spread)
        # Far from what was seen the line may go below zero.
        return max(mean_seconds + slope * (tokens - mean_tokens), 0.05 * mean_seconds)


@dataclass
class _Chance:
    """How often drafted tokens were right. `rest`: steps until they are tried again, after so many `breaks`."""

    right: float = _FIRST_CHANCE * _SURE
    tried: float = _SURE
    rest: int = 0
    breaks: int = 0

    @property
    def share(self) -> float:
        return self.right / self.tried


@dataclass
class DraftPlan:
    """Decides how long drafts are, from what they have gained so far.

    Attributes:
        counts: of all drafts so far.
        deepest: of the drafts that were right so far; the next may be twice as deep.
    """

    counts: DraftCounts = DraftCounts()
    deepest: int = 1
    cost: StepCost = field(default_factory=StepCost)
    _chances: dict[int, _Chance] = field(default_factory=lambda: defaultdict(_Chance))

    def choose(self, drafts: Iterator[Draft], most: int) -> Draft:
        """What to ask about beside the next token: an empty draft where none is worth it."""
        for chance in self._chances.values():
            chance.rest = max(0, chance.rest - 1)
        if not self.cost.is_known:
            return Draft()
        for draft in drafts:
            chance = self._chances[draft.match]
            if chance.rest:
                continue
            trusted = draft.match if draft.match >= _LONG_MATCH else 1
            depth = self.depth(chance.share, min(most, len(draft.tokens), 2 * max(self.deepest, trusted)))
            if not depth and chance.breaks:
                depth = 1  # its break is over
            if depth and most:
                return Draft(draft.tokens[:depth], draft.match)
        return Draft()

    def depth(self, share: float, most: int) -> int:
        """How many tokens to draft, each of which is right with this probability if those before it are."""
        best, found = 1.0 / self.cost.of(1), 0
        for depth in range(1, most + 1):
            rate = expected_tokens(share, depth) / self.cost.of(1 + depth)
            if rate > best:
                best, found = rate, depth
        return found

    def note(self, draft: Draft, accepted: int, seconds: float) -> None:
        """A step with this draft, of which so many tokens were right, took so long."""
        self.cost.note(1 + len(draft.tokens), seconds)
        if not draft.tokens:
            return
        before = self.counts
        self.counts = DraftCounts(before.drafted + len(draft.tokens), before.accepted + accepted, before.steps + 1)
        if accepted == len(draft.tokens):
            self.deepest = max(self.deepest, min(MOST_DRAFTED, len(draft.tokens)))
        chance = self._chances[draft.match]
        # The first wrong token ends the draft: those after it say nothing.
        tried = min(len(draft.tokens), accepted + 1)
        for index in range(tried):
            chance.right = _FORGETS * chance.right + (index < accepted)
            chance.tried = _FORGETS * chance.tried + 1
        if accepted:
            chance.breaks = 0
        elif not self.depth(chance.share, len(draft.tokens)):
            chance.breaks += 1
            chance.rest = min(_LONGEST_BREAK, 8 << min(chance.breaks, 5))


def expected_tokens(share: float, depth: int) -> float:
    """Tokens that a step with a draft of this depth brings on average (arXiv 2211.17192, equation 1)."""
    if share >= 1.0 - 1e-9:
        return depth + 1.0
    return (1.0 - math.pow(share, depth + 1)) / (1.0 - share)
