"""A chain in virtual time: each server takes one step after another, and the way between any two is as long.

What is drafted, sent and taken is the client's own code; the servers, their network and the texts are models.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, cast

import pytest
import torch
import trio
from trio.testing import MockClock

from petalnode.node.client.generation.draft_model import Draft, LookupDrafter, ModelDrafter
from petalnode.node.client.generation.drafting import DraftCounts, DraftPlan, PipelineSpeed
from petalnode.node.client.generation.sampling import Sampler
from petalnode.node.client.generation.speculation import Answering, Speculation
from petalnode.node.client.request import WireTensor
from petalnode.node.client.session.pipeline import Pipeline
from petalnode.node.client.session.prefixes import common_prefix

CREDITS = 8
MOST_STEP = 28  # tokens


@dataclass(frozen=True)
class Line:
    """Seconds of the way between two hosts, and of a step at each server: `fixed` and `each` per token. The
    answers to the steps with the numbers `late` come 0.2 s later, whatever the chain is asked. `embedding`: seconds
    before a step of a draft is sent."""

    one_way: float
    servers: int
    fixed: float
    each: float
    late: frozenset[int] = frozenset()
    embedding: float = 0.0

    def cost(self, tokens: int) -> float:
        return self.fixed + self.each * tokens


class SimulatedChain:
    """When the steps that are sent are answered."""

    def __init__(self, line: Line, beside: SimulatedChain | None = None) -> None:
        self.line = line
        self.compute: list[float] = []
        self.most_under_way = 0
        self._steps = 0
        self._free = [0.0] * line.servers if beside is None else beside._free  # the same servers
        self._out: list[float] = []

    def send(self, tokens: int) -> float:
        """When a step that is sent now is answered."""
        at = trio.current_time()
        self._steps += 1
        for server, free in enumerate(self._free):
            at = max(at + self.line.one_way, free) + self.line.cost(tokens)
            self._free[server] = at
        at += 0.2 if self._steps in self.line.late else 0.0
        self._out = [due for due in self._out if due > trio.current_time()] + [at + self.line.one_way]
        self.most_under_way = max(self.most_under_way, len(self._out))
        return at + self.line.one_way

    @property
    def spare(self) -> int:
        return CREDITS - sum(due > trio.current_time() for due in self._out)

    async def answered(self, due: float, tokens: int) -> None:
        await trio.sleep_until(due)
        self.compute = [self.line.cost(tokens)] * self.line.servers


class SimulatedPipeline:
    """As `Pipeline`."""

    def __init__(self, chain: SimulatedChain) -> None:
        self._chain = chain
        self._steps: list[tuple[WireTensor, float]] = []

    @property
    def may_ask(self) -> bool:
        return self._chain.spare > 0

    async def ask(self, chunk: WireTensor, position: int) -> bool:
        if chunk.tokens > MOST_STEP:
            return False
        self._steps.append((chunk, self._chain.send(chunk.tokens)))
        return True

    async def answer(self) -> WireTensor:
        chunk, due = self._steps[0]
        await self._chain.answered(due, chunk.tokens)
        self._steps.pop(0)
        return chunk

    def drop(self) -> None:
        self._steps.clear()


@dataclass(frozen=True)
class Tokens:
    """In the place of hidden states."""

    tokens: int


class Oracle:
    """Chooses what the text says."""

    is_over = False

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def prepare(self, *, draw: bool) -> None:
        pass

    def next(self, tokens: Sequence[int], row: object) -> int:
        assert list(tokens) == list(self._text[: len(tokens)])
        return self._text[len(tokens)]


class SimulatedModel:
    """In the place of a `ModelDrafter`: guesses what the text says, but for every `wrong_in`-th token. A guess takes
    `seconds`, a quarter of that more for each further token that has to be read, and ten times as long at the places
    `slow`."""

    max_length = 1 << 20

    def __init__(self, text: Sequence[int], seconds: float, wrong_in: int, slow: Collection[int] = ()) -> None:
        self._seconds = seconds
        self._text = text
        self._wrong_in = wrong_in
        self._slow = slow
        self._held: list[int] = []

    def seconds(self, line: Sequence[int], ahead: object) -> float:
        """Of a guess."""
        unread = len(line) - min(common_prefix(self._held, line), len(line) - 1)
        self._held = list(line)
        return self._seconds * (1 + 0.25 * (unread - 1)) * (10 if len(line) in self._slow else 1)

    def note(self, line: Sequence[int], hidden: object) -> None:
        """It reads tokens alone."""

    def ahead(self, length: int) -> object:
        return object()

    def guess(self, line: Sequence[int], ahead: object) -> int:
        return self._text[len(line)] + (len(line) % self._wrong_in == 0)


@dataclass(frozen=True)
class Outcome:
    tokens: list[int]
    seconds: float
    counts: DraftCounts
    most_under_way: int


def without_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time does not wait for threads."""

    async def direct(function: Callable[..., Any], *arguments: Any) -> Any:
        owner = getattr(function, "__self__", None)
        await trio.sleep(owner.seconds(*arguments) if isinstance(owner, SimulatedModel) else 0.0)
        return function(*arguments)

    monkeypatch.setattr("petalnode.node.client.generation.speculation.trio.to_thread.run_sync", direct)


@dataclass(frozen=True)
class SimulatedText:
    text: Sequence[int]
    chain: SimulatedChain

    async def embed(self, tokens: list[int], position: int, steps: int = 0) -> list[WireTensor]:
        assert tokens and position + len(tokens) < len(self.text)
        await trio.sleep(self.chain.line.embedding)
        return [cast(WireTensor, Tokens(len(tokens)))]

    async def first(
        self, answer: Answering, hidden: list[WireTensor], count: int, steps: int = 0
    ) -> tuple[float, int, torch.Tensor]:
        await trio.lowlevel.checkpoint()
        return 0.0, answer.sampler.next(answer.tokens, torch.empty(0)), cast(torch.Tensor, [0] * (count - 1))

    def compute_seconds(self) -> Sequence[float]:
        return self.chain.compute


async def answered(
    text: Sequence[int],
    prompt: int,
    chain: SimulatedChain,
    plan: DraftPlan,
    drafts: bool,
    model: SimulatedModel | None = None,
) -> Outcome:
    """As `Conversation.answer` does it."""
    lookup = LookupDrafter()
    plan.speed = PipelineSpeed(sharing=plan.sharing)
    sampler = cast(Sampler, Oracle(text))
    said: list[int] = []
    going = Answering(list(text[:prompt]), len(text), sampler, said.append)

    await chain.answered(chain.send(prompt), prompt)
    plan.speed.note_work(prompt, chain.compute, 0.0)
    going.take(text[prompt])
    begun = trio.current_time()
    while not going.is_over:
        most = len(text) - len(going.tokens) - 1
        draft = plan.choose(lookup.matches(going.tokens), most) if drafts else Draft()
        if draft.tokens or (model is not None and plan.model_depth(most)):
            pipeline = cast(Pipeline, SimulatedPipeline(chain))
            made, drafted = len(going.tokens), SimulatedText(text, chain)
            guesses = cast("ModelDrafter | None", model)
            await Speculation(going, pipeline, plan, lookup, drafted, MOST_STEP, guesses).run(draft)
            if len(going.tokens) > made:
                continue
        sent = trio.current_time()
        await chain.answered(chain.send(1), 1)
        going.take(text[len(going.tokens)])
        plan.speed.note_work(1, chain.compute, 0.0)
        plan.note(Draft(), 0, trio.current_time() - sent)
        plan.speed.note_alone(1, trio.current_time() - sent)
    assert going.tokens[prompt:] == said
    return Outcome(going.tokens, trio.current_time() - begun, plan.counts, chain.most_under_way)


def answer(text: Sequence[int], prompt: int, line: Line, drafts: bool, model: SimulatedModel | None = None) -> Outcome:
    async def run() -> Outcome:
        return await answered(text, prompt, SimulatedChain(line), DraftPlan(), drafts, model)

    return trio.run(run, clock=MockClock(autojump_threshold=0))


def seconds_of_rows(texts: Sequence[Sequence[int]], prompt: int, line: Line) -> float:
    """From a row's first token to its last, each in a session of its own with drafts: of the row that takes longest."""
    outcomes: list[Outcome] = []

    async def run() -> None:
        servers, plans = SimulatedChain(line), DraftPlan().of_rows(len(texts))

        async def row(text: Sequence[int], plan: DraftPlan) -> None:
            outcomes.append(await answered(text, prompt, SimulatedChain(line, servers), plan, True))
            assert outcomes[-1].tokens == text

        async with trio.open_nursery() as nursery:
            for text, plan in zip(texts, plans, strict=True):
                nursery.start_soon(row, text, plan)

    trio.run(run, clock=MockClock(autojump_threshold=0))
    return max(outcome.seconds for outcome in outcomes)


def repeated(rng: random.Random) -> tuple[list[int], int]:
    """A text that is said once more with a token changed here and there."""
    given = [rng.randrange(2000) for _ in range(200)]
    again = [rng.randrange(2000) if index % 60 == 40 else token for index, token in enumerate(given)]
    return [*given, 5000, 5001, given[0], *again], 202


def ordinary(rng: random.Random) -> tuple[list[int], int]:
    """Words out of which now and then two follow each other once more."""
    words = [rng.randrange(120) for _ in range(300)]
    return words, 60


def meaningless(rng: random.Random) -> tuple[list[int], int]:
    """So few tokens that there are matches, which mean nothing."""
    return [rng.randrange(6) for _ in range(300)], 20


@cache
def guessable(seed: int, share: float, vocabulary: int) -> tuple[list[int], int]:
    """What a look into the text finds comes next with this probability, and never otherwise."""
    rng, drafter = random.Random(seed), LookupDrafter()
    tokens = [rng.randrange(vocabulary) for _ in range(60)]
    while len(tokens) < 160:
        found = next(drafter.matches(tokens), Draft((-1,)))
        others = [token for token in range(vocabulary) if token != found.tokens[0]]
        tokens.append(found.tokens[0] if found.match and rng.random() < share else rng.choice(others))
    return tokens, 60
