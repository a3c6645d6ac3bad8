"""Tokens that are guessed before the chain is asked, and how many of them are worth asking about.

Speculative decoding (Leviathan et al., arXiv 2211.17192, section 2): a step carries the next token and a draft of those
after it. The chain answers for all of them at once. The draft is kept as far as it is what is chosen anyhow. The draft
is a single guess for each place. So comparing it with the token that the sampler chooses there *is* the rejection rule
of section 2.3. Whatever the sampling, the answer is the same as without drafts, with the same seed.

Where the servers push to each other, a draft is cut into several steps that are under way at once. Then all servers
work, and the way is waited for once. Whether a text or a draft model is asked follows from what each has shown. Each
has a budget of its own for being wrong. Pure: no clock, no network.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from ...swarm.cost import Estimate, LineEstimate
from .draft_model import MOST_DRAFTED as MOST_DRAFTED
from .draft_model import Draft as Draft
from .draft_model import FixedDrafts
from .draft_model import LookupDrafter as LookupDrafter

BY_MODEL: Final = 0
"""The match of what a draft model guesses."""
REALIGNED: Final = 1
"""The match of a draft that goes on behind its only wrong token."""
_KINDS: Final = (0, 1, 2, 3, 4, 5, 6, 9, 14, 24)
"""Lengths of matches, each with those up to the next one, whose drafts are counted together."""
_FIRST_CHANCES: Final = (0.7, 0.4, 0.5, 0.5, 0.6, 0.7, 0.75, 0.85, 0.9, 0.95)
"""That a drafted token is right, before anything was drafted after matches of these lengths."""
_STEP_SIZES: Final = (1, 2, 3, 4, 6, 8, 12, 16, 24)
"""Of which a draft may be cut into steps."""


@dataclass(frozen=True, slots=True)
class DraftPolicy:
    """What decides whether a draft is worth asking about.

    Attributes:
        long_match: tokens from which on a match is no coincidence: its first draft may be twice as long as itself, and
            it says more than that the text went on as before behind a wrong token.
        sure_match, sure_share: this share of right drafts after matches this long needs no draft model in its place.
        sure: drafted tokens for which the first guess of a chance counts.
        remembered: what an observation still counts for after one more.
        least_used: chance that a draft model's guess is used, from which on it waits until those before are checked.
        least_likely: chance that a token that was looked up is right, up to which it is drafted: servers shall not
            compute for nothing.
        model_steps: steps with guesses of a draft model that are under way.
        sure_model, sure_model_steps: fewer, larger ones, from which share of right guesses on.
        reading: of a draft model's time for a guess, that each further token takes which it reads with it.
        first_break, first_model_break, longest_break: steps after which a kind of draft that gained nothing is tried
            again.
        least_gain: times as quick that a draft has to make the answer: less is within the error of what is known.
        allowed_loss: of the time of an answer, that drafts which turn out to be wrong may take.
        first_budget, largest_budget, deepest_debt: what drafts may lose before they gained anything, at once of what
            they gained, and by one accident. In tokens answered one after the other.
    """

    long_match: int = 4
    sure_match: int = 9
    sure_share: float = 0.8
    sure: float = 4.0
    remembered: float = 0.97
    least_used: float = 0.15
    least_likely: float = 0.01
    model_steps: int = 4
    sure_model_steps: int = 2
    sure_model: float = 0.9
    reading: float = 0.25
    first_break: int = 16
    first_model_break: int = 2
    longest_break: int = 256
    least_gain: float = 1.05
    allowed_loss: float = 0.015
    first_budget: float = 0.5
    largest_budget: float = 2.0
    deepest_debt: float = 1.0


DRAFTING: Final = DraftPolicy()


@dataclass(frozen=True)
class DraftCounts:
    """How many tokens were drafted, how many of them were right, and in how many steps. `gained`: about how many
    seconds less the answer took than one token after the other."""

    drafted: int = 0
    accepted: int = 0
    steps: int = 0
    gained: float = 0.0

    def plus(self, *, drafted: int = 0, accepted: int = 0, steps: int = 0, gained: float = 0.0) -> DraftCounts:
        return DraftCounts(self.drafted + drafted, self.accepted + accepted, self.steps + steps, self.gained + gained)

    def __sub__(self, other: DraftCounts) -> DraftCounts:
        return self.plus(drafted=-other.drafted, accepted=-other.accepted, steps=-other.steps, gained=-other.gained)

    def __str__(self) -> str:
        if not self.steps:
            return ""
        steps = "1 step" if self.steps == 1 else f"{self.steps} steps"
        right = f", {self.accepted} of {self.drafted} drafted tokens right in {steps}"
        return right + (f", about {self.gained:.1f} s gained" if self.gained >= 0.05 else "")

    def fields(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "drafted": self.drafted,
            "accepted": self.accepted,
            "steps": self.steps,
            "gained_seconds": round(self.gained, 3),
        }


@dataclass
class _Chance:
    """How often drafted tokens were right: a first guess, and what `seen` tokens have shown. `rest`: steps until they
    are tried again, after `breaks`; `due`: they are to be tried once, whatever is known of them.

    No `Estimate`: it counts successes, of which the first guess weighs as much as some tokens, and no seconds."""

    right: float
    tried: float = DRAFTING.sure
    seen: int = 0
    rest: int = 0
    breaks: int = 0
    due: bool = False

    @property
    def share(self) -> float:
        return self.right / self.tried

    def note(self, is_right: bool) -> None:
        """Of one more token."""
        self.right = DRAFTING.remembered * self.right + is_right
        self.tried = DRAFTING.remembered * self.tried + 1
        self.seen += 1

    def pause(self, first: int) -> None:
        """For `first` steps, and twice as long each time."""
        self.breaks += 1
        self.rest = min(DRAFTING.longest_break, first << self.breaks - 1)


def _first_chances() -> dict[int, _Chance]:
    return {kind: _Chance(share * DRAFTING.sure) for kind, share in zip(_KINDS, _FIRST_CHANCES, strict=True)}


def kind_of(match: int) -> int:
    """The length of a match that stands for this one."""
    return _KINDS[max(0, bisect_right(_KINDS, match) - 1)]


@dataclass
class DraftPlan:
    """Decides how long drafts are, and in how many steps they are checked, by what they gained so far.

    Attributes:
        counts: of all drafts so far.
        deepest: of the drafts that were right so far; the next may be twice as deep.
        cost: of a step that is under way alone, from when it is sent until its tokens are chosen.
        speed: of the servers of a chain; None where steps are not under way side by side.
        budget: what wrong drafts that were looked up may cost now, in tokens that are answered one after the other. It
            grows with each token and with what they gain, and bounds what a conversation loses by them.
        model_budget: the same for guesses of a draft model: neither pays for what the other has lost. Once there is a
            draft model, each has a half of what may be lost without a gain.
        sharing: answers, this one included, that keep the servers busy at once.
        fixed: how long drafts are, where what they gain does not decide.
    """

    counts: DraftCounts = DraftCounts()
    deepest: int = 1
    cost: LineEstimate = field(default_factory=LineEstimate)
    speed: PipelineSpeed | None = None
    budget: float = DRAFTING.first_budget
    model_budget: float | None = None
    sharing: int = 1
    fixed: FixedDrafts | None = None
    _chances: dict[int, _Chance] = field(default_factory=_first_chances)

    def of_rows(self, rows: int) -> list[DraftPlan]:
        """Of `rows` answers to be made at once: what one learns of the text is known to all, and to this plan."""
        return [DraftPlan(sharing=rows, _chances=self._chances) for _ in range(rows)]

    def choose(self, drafts: Iterator[Draft], most: int) -> Draft:
        """What to ask about beside the next token: an empty draft where none is worth it."""
        for chance in self._chances.values():
            chance.rest = max(0, chance.rest - 1)
        if self.fixed is not None:
            return self.fixed.cut(next(drafts, Draft()), most)
        if not self.cost.is_known:
            return Draft()
        for draft in drafts:
            chance = self._chances[kind_of(draft.match)]
            if chance.rest:
                continue
            longest = min(most, len(draft.tokens))
            if self.speed is None:
                longest = min(longest, 2 * max(self.deepest, draft.match if draft.match >= DRAFTING.long_match else 1))
            depth = self.depth(draft.match, longest)
            if not depth and chance.breaks:
                depth = min(1, longest)  # its break is over
            while depth and not self._affords(1 + depth):
                depth = self.depth(draft.match, depth // 2)
            if depth:
                return Draft(draft.tokens[:depth], draft.match, draft.place)
        return Draft()

    def depth(self, match: int, most: int) -> int:
        """How many tokens to draft after a match; 0 where that makes nothing quicker."""
        return self._best(match, most)[0]

    def _best(self, match: int, most: int) -> tuple[int, float]:
        """(how many tokens to draft after a match, tokens a second then): each that is right makes the match longer,
        and the next one likelier."""
        best, found = DRAFTING.least_gain / self._seconds(1), 0
        tokens, likely = 1.0, 1.0
        for depth in range(1, most + 1):
            likely *= self._chances[kind_of(match + depth - 1 if match > REALIGNED else match)].share
            if likely < DRAFTING.least_likely:
                break
            tokens += likely
            rate = tokens / self._seconds(1 + depth)
            if rate > best:
                best, found = rate, depth
            elif tokens + likely * (most - depth) < best * self._seconds(1 + depth):
                break  # not even if all the others were right
        return found, best

    def model_depth(self, most: int) -> int:
        """How many guesses of a draft model may be unchecked; 0 where it makes nothing quicker, or takes a break.

        It guesses while the steps are under way. So an answer takes the way once for each wrong guess.
        """
        if self.fixed is not None:
            return min(most, self.fixed.guessed) if self.speed is not None else 0
        if self.model_budget is None:
            self.model_budget = DRAFTING.first_budget / 2
            self.budget -= self.model_budget
        chance, speed = self._chances[BY_MODEL], self.speed
        if speed is None or not speed.is_known or chance.rest or most < 1:
            return 0
        depth, rate = self._model_rate(most)
        while depth and not self._affords(1 + depth, speed.model_step(), by_model=True):
            depth, rate = self._model_rate(depth // 2) if depth > 1 else (0, rate)
        if depth and rate * speed.alone < DRAFTING.least_gain:
            if chance.due:
                return 1
            chance.pause(DRAFTING.first_model_break)
            chance.due, speed.guesses = True, Estimate()  # it may have been something else that kept it
            return 0
        return depth

    def _model_rate(self, most: int) -> tuple[int, float]:
        """(how many guesses may be unchecked, tokens a second then), for a draft model. Only if the speed is known."""
        share, speed = self._chances[BY_MODEL].share, self.speed
        assert speed is not None
        depth = 1
        while depth < most and share ** (depth + 1) >= DRAFTING.least_used:
            depth += 1
        tokens = expected_tokens(share, depth)
        paced = max(speed.guesses.value, speed.stage.of(2) - speed.stage.of(1))
        return depth, tokens / (speed.alone + (tokens - 1) * paced)

    def beats_model(self, draft: Draft) -> bool:
        """Whether checking it brings more tokens a second than a draft model's guesses, or nearly none is wrong. It
        takes no time of this machine. A short match has to have shown that: most texts have some that mean nothing."""
        chance = self._chances[kind_of(draft.match)]
        sure = draft.match >= DRAFTING.sure_match and chance.share >= DRAFTING.sure_share
        if sure or self.speed is None or not self.speed.is_known:
            return True
        if chance.seen < DRAFTING.sure:
            return False
        most = len(draft.tokens)
        return self._best(draft.match, most)[1] >= self._model_rate(most)[1]

    def step_tokens(self, tokens: int) -> int:
        """How many of `tokens` tokens to send in the next step."""
        if self.fixed is not None:
            return min(tokens, self.fixed.step_tokens)
        return tokens if self.speed is None else self.speed.step_tokens(tokens)

    def model_step(self) -> int:
        """How many guesses of a draft model to send together."""
        if self.fixed is not None:
            return self.fixed.step_tokens
        return 1 if self.speed is None else self.speed.model_step()

    def _affords(self, tokens: int, size: int | None = None, *, by_model: bool = False) -> bool:
        """Whether the budget bears that of `tokens` tokens, in steps of this size, none that was drafted is right."""
        budget = self.model_budget if by_model and self.model_budget is not None else self.budget
        if self.speed is not None:
            return self.speed.risk(tokens, size) <= budget * self.speed.alone
        return self.cost.of(tokens) - self.cost.of(1) <= budget * self.cost.of(1)

    def settle(self, tokens: int, gained: float = 0.0, *, by_model: bool = False) -> None:
        """`tokens` tokens were answered, `gained` seconds sooner than without drafts of the text or of a model. Only
        once a step was noted."""
        alone = self._seconds(1)
        allowed, won = DRAFTING.allowed_loss * tokens, gained / alone if alone > 0 else 0.0
        if self.model_budget is not None:
            allowed /= 2
            self.model_budget = _within(self.model_budget + allowed + by_model * won)
        self.budget = _within(self.budget + allowed + (not by_model) * won)

    def _seconds(self, tokens: int) -> float:
        """Until `tokens` tokens are answered that are sent now."""
        if self.speed is None or not self.speed.is_known:
            return self.cost.of(tokens)
        return self.speed.seconds(tokens)

    def note(self, draft: Draft, accepted: int, seconds: float) -> None:
        """A step with this draft, of which `accepted` tokens were right, took `seconds`."""
        alone = self.cost.of(1) if self.cost.is_known else seconds
        self.cost.note(1 + len(draft.tokens), seconds)
        if draft.tokens:
            gained = (1 + accepted) * alone - seconds
            self.counts = self.counts.plus(drafted=len(draft.tokens), steps=1, gained=gained)
            self.settle(1 + accepted, gained)
            self.note_tokens(draft.match, len(draft.tokens), accepted)
        else:
            self.settle(1)

    def note_tokens(self, match: int, drafted: int, accepted: int) -> None:
        """`drafted` tokens were drafted after a match, and the first `accepted` of them were right."""
        self.counts = self.counts.plus(accepted=accepted)
        if accepted == drafted:
            self.deepest = max(self.deepest, min(MOST_DRAFTED, drafted))
        self.note_seen(match, drafted, accepted)
        first = self._chances[kind_of(match)]
        if accepted:
            first.breaks = 0
        elif match != BY_MODEL and self.cost.is_known and not self.depth(match, drafted):
            first.pause(DRAFTING.first_break)

    def note_seen(self, match: int, drafted: int, accepted: int) -> None:
        """The same of tokens that nobody was asked about, but that have been answered."""
        # The first wrong token ends the draft: those after it say nothing.
        for index in range(min(drafted, accepted + 1)):
            self._chances[kind_of(match + index if match > REALIGNED else match)].note(index < accepted)
        if self.speed is not None:
            self.speed.sure = self._chances[BY_MODEL].share >= DRAFTING.sure_model

    def note_guess(self, seconds: float, read: int = 1) -> None:
        """A draft model has read `read` tokens and guessed the next one."""
        self._chances[BY_MODEL].due = False
        if self.speed is not None:
            self.speed.guesses.note(seconds / (1 + DRAFTING.reading * (read - 1)))


def _within(budget: float) -> float:
    return min(max(budget, -DRAFTING.deepest_debt), DRAFTING.largest_budget)


@dataclass
class PipelineSpeed:
    """What a draft of any length takes in steps under way side by side, through servers that work simultaneously. It
    follows from an `Estimate` of a lone step and lines by size of all others.

    Attributes:
        work: seconds of computing of a step by its tokens, all servers and the head together.
        stage: the same at the server that takes longest.
        sure: nearly all guesses of the draft model are right.
        delay: seconds that the next step waits for those that were sent in vain.
        sharing: answers that take turns at these servers, each with steps like these.
        alone: seconds of a step of one token when nothing else is under way (`steps`), until its token is chosen.
        guesses: seconds of a draft model for a token.
    """

    work: LineEstimate = field(default_factory=LineEstimate)
    stage: LineEstimate = field(default_factory=LineEstimate)
    sure: bool = False
    delay: float = 0.0
    sharing: int = 1
    steps: Estimate = field(default_factory=Estimate)
    guesses: Estimate = field(default_factory=Estimate)

    @property
    def alone(self) -> float:
        return self.steps.value

    @property
    def is_known(self) -> bool:
        return self.alone > 0 and self.work.is_known

    def note_work(self, tokens: int, stages: Sequence[float], head: float) -> None:
        """A step of `tokens` tokens took each server the seconds of `stages`, and the head here `head`."""
        self.work.note(tokens, sum(stages) + head)
        self.stage.note(tokens, max([*stages, head]))

    def note_alone(self, tokens: int, seconds: float) -> None:
        """A step of `tokens` tokens, with no other that is wanted under way, took `seconds`. Only after `note_work`."""
        seconds = max(seconds - self.delay - (self.work.of(tokens) - self.work.of(1)), 0.1 * seconds)
        if self.delay:  # an estimate: too small a one would make the next drafts look better than they are
            seconds = min(seconds, self.alone or seconds)
        self.delay = 0.0
        self.steps.note(seconds)

    def model_step(self) -> int:
        """Guesses of a draft model that are sent together: no more steps than the servers can do meanwhile."""
        steps = DRAFTING.sure_model_steps if self.sure else DRAFTING.model_steps
        pause, size, guess = self.alone / steps, 1, self.guesses.value
        while guess and size < _STEP_SIZES[-1] and size * guess < max(pause, self.stage.of(size)):
            size += 1
        return size

    def note_vain(self, steps: Iterable[tuple[int, float]], now: float) -> float:
        """Steps of these numbers of tokens were sent at these times, and only the first was wanted. Returns the seconds
        for which servers are busy with the others when what is sent now comes."""
        done = 0.0
        for tokens, sent in steps:
            done = max(done, sent) + self.stage.of(tokens)
        self.delay = max(0.0, done - now)
        return self.delay

    def risk(self, tokens: int, size: int | None = None) -> float:
        """Seconds that are lost if of `tokens` tokens, in steps of this size, only the first is right. They last until
        its step is answered and the servers are done with the others."""
        size = min(size or self.step_tokens(tokens), tokens)
        first = self.work.of(size) - self.work.of(1)
        busy = self.sharing * math.ceil(tokens / size) * self.stage.of(size)
        return first + max(0.0, busy - self.alone - first)

    def seconds(self, tokens: int) -> float:
        """Until all of `tokens` tokens are answered."""
        return self._of_steps(tokens, self.step_tokens(tokens))

    def step_tokens(self, tokens: int) -> int:
        """Into steps of how many tokens to cut `tokens`: the answers are all there soonest."""
        sizes = [size for size in _STEP_SIZES if size < tokens]
        return min((*sizes, tokens), key=lambda size: self._of_steps(tokens, size))

    def _of_steps(self, tokens: int, size: int) -> float:
        """The first step passes all servers. Each further one is done as long after it as the slowest server takes,
        which takes all answers' steps in turn."""
        first, steps = self.alone + self.work.of(size) - self.work.of(1), math.ceil(tokens / size)
        seconds = first + (steps - 1) * self.stage.of(size)
        return seconds if self.sharing == 1 else max(seconds, self.sharing * steps * self.stage.of(size))


def expected_tokens(share: float, depth: int) -> float:
    """Tokens that a step with a draft of this depth brings on average (arXiv 2211.17192, equation 1)."""
    if share >= 1.0 - 1e-9:
        return depth + 1.0
    return (1.0 - math.pow(share, depth + 1)) / (1.0 - share)
