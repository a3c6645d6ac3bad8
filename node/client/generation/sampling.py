"""How the next token is chosen from logits."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Protocol, runtime_checkable

import torch
import trio
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from ...errors import BadInput

MAX_BIASES: Final = 1024
"""Tokens that may have a bias of their own."""
_LIKELIEST: Final = 512
"""Tokens that are sorted before all of a large vocabulary are."""
_COLDEST: Final = 1e-10
"""A temperature or top-p that leaves the likeliest token only. Of less, float32 may not hold logits or shares."""
_DRAWN_AHEAD: Final = 1 << 16
"""Random numbers of a token that are drawn before its logits are there: 49,152 take half a millisecond."""

Token = Any
"""A token id; of rows that go on together in one session, the tuple of theirs."""


class Constraint(Protocol):
    """What an answer has to look like, such as a grammar."""

    def apply(self, scores: torch.Tensor) -> None:
        """Sets to -inf, in place, what may not follow the tokens so far; `scores` is float [vocabulary]."""

    def accept(self, token: int) -> None:
        """`token` was chosen."""


@runtime_checkable
class PreparedConstraint(Constraint, Protocol):
    """One that computes what may follow before the logits are there.

    Attributes:
        is_ready: what may follow is known: `apply` and `accept` are short.
        is_quick: `prepare` will be short, too, as far as can be told.
        only: the one token that may follow; None if there are several, or that is not known.
    """

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_quick(self) -> bool: ...

    @property
    def only(self) -> int | None: ...

    def prepare(self) -> None:
        """Computes what may follow the tokens so far, in any thread. Never raises."""


class TokenSampler(Protocol):
    """Chooses the tokens of one answer. Logits are [vocabulary], or [rows, vocabulary].

    Attributes:
        is_over: the last accepted token ends the answer.
        is_ready: `choose` and `accept` are short, and may be called on the trio thread.
        only: the token that is chosen whatever the logits are; None if they say it, or that is not known.
    """

    @property
    def is_over(self) -> bool: ...

    @property
    def is_ready(self) -> bool: ...

    @property
    def only(self) -> Token | None: ...

    def prepare(self, *, draw: bool) -> None:
        """Makes ready what the next token takes beside its logits. `draw`: random numbers, too. Never raises."""

    def next(self, tokens: Sequence[Token], logits: torch.Tensor) -> Token:
        """The token after `tokens`."""

    def choose(self, tokens: Sequence[Token], logits: torch.Tensor) -> Token:
        """As `next`, but nothing is settled: called again before `accept`, it chooses anew by the same random numbers.

        Raises:
            RuntimeError: the logits leave nothing to choose from.
        """

    def accept(self, token: Token) -> None:
        """The next token is the one that was chosen."""

    def ahead(self) -> AheadSampler:
        """One that chooses as this one will, as far as that can be known."""


class AheadSampler(Protocol):
    """Chooses a draft model's guesses."""

    def next(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        """The token after `tokens`, from logits [vocabulary]."""

    def skip(self, vocabulary: int) -> None:
        """Uses up the random numbers of one token, for logits of this size."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen. Temperature 0 is greedy, and so is `top_p` 0; `seed` makes sampling repeatable.

    Attributes:
        top_k: number of likeliest tokens that are chosen from; 0 is all.
        min_p: only tokens at least so likely, as a part of the likeliest one's probability.
        repetition_penalty: divides the logits of tokens of prompt and answer (CTRL, arXiv 1909.05858, section 4.1).
        presence_penalty, frequency_penalty: subtracted from the logits of tokens of the answer, once and per
            occurrence, as OpenAI's API has them.
        logit_bias: is added to the logits of these tokens.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise BadInput(f"{self.max_new_tokens} new tokens are none: ask for 1 or more")
        if not 0 <= self.temperature < 100:
            raise BadInput(f"a temperature of {self.temperature} is out of range: 0 is greedy, 0.7 is usual")
        if self.seed is not None and not -(1 << 63) <= self.seed < 1 << 64:
            raise BadInput(f"a seed of {self.seed} is out of range: give a number of at most 64 bits")
        if self.top_k < 0:
            raise BadInput(f"a top-k of {self.top_k} is out of range: 1 or more, or 0 for all")
        for name, value, low, high in (
            ("top-p", self.top_p, 0, 1),
            ("min-p", self.min_p, 0, 1),
            ("repetition penalty", self.repetition_penalty, 0.01, 100),
            ("presence penalty", self.presence_penalty, -2, 2),
            ("frequency penalty", self.frequency_penalty, -2, 2),
        ):
            if not low <= value <= high:
                raise BadInput(f"a {name} of {value} is out of range: from {low} to {high}")
        if len(self.logit_bias) > MAX_BIASES:
            raise BadInput(f"{len(self.logit_bias)} logit biases are too many: {MAX_BIASES} at most")
        for token, bias in self.logit_bias.items():
            if token < 0 or not -100 <= bias <= 100 or math.isnan(bias):
                raise BadInput(f"a logit bias of {bias} for token {token} is out of range: from -100 to 100")

    @property
    def changes_logits(self) -> bool:
        """Whether greedy decoding is changed by it, too."""
        penalties = (self.repetition_penalty - 1, self.presence_penalty, self.frequency_penalty)
        return any(penalties) or bool(self.logit_bias)


class TopP(TopPLogitsWarper):  # type: ignore[misc]  # transformers is untyped here
    """transformers' own, which sorts the whole vocabulary at each token; here the likeliest tokens alone, where these
    make up `top_p`.
    """

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """Scores [1, vocabulary], -inf where a token is not among those that make up `top_p`."""
        if scores.shape[-1] > 2 * _LIKELIEST:
            likeliest, places = scores.topk(_LIKELIEST)
            shares = (likeliest - scores.logsumexp(-1, keepdim=True)).exp()
            before = shares.cumsum(-1) - shares
            if bool((before[:, -1] >= self.top_p).all()):
                kept = likeliest.masked_fill(before >= self.top_p, self.filter_value)
                return torch.full_like(scores, self.filter_value).scatter_(1, places, kept)
        rest: torch.Tensor = super().__call__(input_ids, scores)
        return rest


class Sampler:
    """Chooses the tokens of one answer from logits, with transformers' own processors.

    Biases and penalties come first, then the constraint, then temperature, top-k, top-p and min-p.

    Args:
        nursery: where a worker thread makes ready what takes long; it is left behind when the nursery ends.
    """

    is_over: Final = False

    def __init__(
        self,
        sampling: Sampling,
        constraint: Constraint | None = None,
        nursery: trio.Nursery | None = None,
    ) -> None:
        self._sampling = sampling
        self._constraint = constraint
        self._prepared = constraint if isinstance(constraint, PreparedConstraint) else None
        self._nursery = nursery
        self._greedy = sampling.temperature == 0
        self._plain = self._greedy and constraint is None and not sampling.changes_logits
        self._warpers = LogitsProcessorList()
        if not self._greedy:
            self._warpers.append(TemperatureLogitsWarper(max(sampling.temperature, _COLDEST)))
            if sampling.top_k:
                self._warpers.append(TopKLogitsWarper(sampling.top_k))
            if sampling.top_p < 1:
                self._warpers.append(TopP(max(sampling.top_p, _COLDEST)))
            if sampling.min_p:
                self._warpers.append(MinPLogitsWarper(sampling.min_p))
        self._repetition = (
            RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty) if sampling.repetition_penalty != 1 else None
        )
        self._biased = torch.tensor(list(sampling.logit_bias), dtype=torch.long)
        self._biases = torch.tensor(list(sampling.logit_bias.values()), dtype=torch.float32)
        self._prompt: int | None = None
        self._vocabulary = 0
        self._drawn: torch.Tensor | None = None  # for the token that is not accepted yet
        self._generator = torch.Generator()
        if sampling.seed is not None:
            self._generator.manual_seed(sampling.seed)
        else:
            self._generator.seed()
        self._before_draw = self._generator.get_state()

    @property
    def is_ready(self) -> bool:
        """Whether `choose` and `accept` are short: they wait for nothing that another thread computes."""
        return self._prepared is None or self._prepared.is_ready

    @property
    def only(self) -> int | None:
        """The token that is chosen whatever the logits are; None if they say it, or that is not known."""
        if self._prepared is None or not (self._greedy or self._vocabulary):  # its random numbers are used up, too
            return None
        return self._prepared.only

    def prepare(self, *, draw: bool) -> None:
        """Makes ready what the next token takes beside its logits, while these are computed: in this thread what is
        short, in another one what is not. `draw`: random numbers, too. Never raises."""
        prepared = self._prepared
        if prepared is not None and not prepared.is_ready:
            if prepared.is_quick:
                prepared.prepare()
            elif self._nursery is not None:
                self._nursery.start_soon(partial(trio.to_thread.run_sync, prepared.prepare, abandon_on_cancel=True))
        if draw and not self._greedy and 0 < self._vocabulary <= _DRAWN_AHEAD:
            self._draw(self._vocabulary)

    def next(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        """The token after `tokens`, from logits [vocabulary]. The tokens of the first call are the prompt."""
        token = self.choose(tokens, logits)
        self.accept(token)
        return token

    def choose(self, tokens: Sequence[int], logits: torch.Tensor) -> int:
        """As `TokenSampler.choose`."""
        if self._prompt is None:
            self._prompt = len(tokens)
        if self._plain:
            return int(logits.argmax())
        scores = logits.float().cpu().clone()
        self._penalise(tokens, scores)
        if self._constraint is not None:
            self._constraint.apply(scores)
        if self._greedy:
            return int(scores.argmax())
        shares = self._warpers(torch.tensor([tokens[-1:]]), scores.unsqueeze(0)).softmax(-1)[0]
        self._vocabulary = len(shares)
        # What torch.multinomial does for one sample, token for token.
        token = int((shares / self._draw(len(shares))).argmax())
        if not shares[token] > 0:
            raise RuntimeError("no token has a probability: the logits are not finite, or all are forbidden")
        return token

    def accept(self, token: int) -> None:
        """The next token is the one that was chosen."""
        if not self._greedy and self._drawn is None and self._vocabulary:
            self._draw(self._vocabulary)  # by `only`
        self._drawn = None
        if self._constraint is not None:
            self._constraint.accept(token)

    def ahead(self) -> Sampler:
        """One that chooses as this one will, with the same random numbers, but knows no constraint."""
        other = Sampler(self._sampling)
        other._prompt = self._prompt
        other._generator.set_state(self._generator.get_state() if self._drawn is None else self._before_draw)
        return other

    def skip(self, vocabulary: int) -> None:
        """Uses up the random numbers of one token, for logits of this size."""
        if not self._greedy:
            self._draw(vocabulary)
            self._drawn = None

    def _draw(self, vocabulary: int) -> torch.Tensor:
        """The random numbers of the next token, float32 [vocabulary], of an exponential distribution."""
        if self._drawn is None:
            self._before_draw = self._generator.get_state()
            self._drawn = torch.empty(vocabulary).exponential_(1, generator=self._generator)
        return self._drawn

    def _penalise(self, tokens: Sequence[int], scores: torch.Tensor) -> None:
        asked = self._sampling
        if len(self._biased):
            known = self._biased < len(scores)
            scores[self._biased[known]] += self._biases[known]
        if self._repetition is not None:
            scores.copy_(
                self._repetition(torch.tensor([[token for token in tokens if token >= 0]]), scores.unsqueeze(0))[0]
            )
        if asked.presence_penalty or asked.frequency_penalty:
            for token, count in Counter(tokens[self._prompt :]).items():
                scores[token] -= asked.presence_penalty + asked.frequency_penalty * count
