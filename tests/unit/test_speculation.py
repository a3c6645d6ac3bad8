"""Drafts in steps that are under way side by side: right, quicker over a wide area, and slower nowhere.

The chain is a model in virtual time: each server takes one step after another, and the way between any two is as long.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import trio
from trio.testing import MockClock

from petalnode.node.client.api.row_groups import FIRST_GAIN, draft_apart
from petalnode.node.client.draft_model import Draft, LookupDrafter, ModelDrafter
from petalnode.node.client.drafting import BY_MODEL, DraftCounts, DraftPlan, PipelineSpeed
from petalnode.node.client.request import WireTensor
from petalnode.node.client.sampling import Sampler
from petalnode.node.client.session.flight import Flight
from petalnode.node.client.session.prefixes import common_prefix
from petalnode.node.client.session.recovery import Receive, Send, begin_step
from petalnode.node.client.speculation import Answering, Speculation

CREDITS = 8
MOST_STEP = 28  # tokens


@dataclass(frozen=True)
class Line:
    """Seconds of the way between two hosts, and of a step at each of so many servers: `fixed` and `each` per token. The
    answers to the steps with the numbers `late` come 0.2 s later, whatever the chain is asked."""

    one_way: float
    servers: int
    fixed: float
    each: float
    late: frozenset[int] = frozenset()

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


class SimulatedFlight:
    """As `Flight`."""

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

    def __init__(self, text: Sequence[int]) -> None:
        self._text = text

    def prepare(self, *, draw: bool) -> None:
        pass

    def next(self, tokens: Sequence[int], row: object) -> int:
        assert list(tokens) == list(self._text[: len(tokens)])
        return self._text[len(tokens)]


class SimulatedModel:
    """In the place of a `ModelDrafter`: guesses what the text says, but for one token in so many. A guess takes so many
    seconds, a quarter of that more for each further token that has to be read, and ten times as long at the places
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


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Virtual time does not wait for threads."""

    async def direct(function: Callable[..., Any], *arguments: Any) -> Any:
        owner = getattr(function, "__self__", None)
        await trio.sleep(owner.seconds(*arguments) if isinstance(owner, SimulatedModel) else 0.0)
        return function(*arguments)

    monkeypatch.setattr("petalnode.node.client.speculation.trio.to_thread.run_sync", direct)
    monkeypatch.setattr("petalnode.node.client.speculation.from_chunks", lambda chunks: chunks[0])
    monkeypatch.setattr("petalnode.node.client.speculation.time", SimpleNamespace(perf_counter=trio.current_time))


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
    going = Answering(list(text[:prompt]), len(text), sampler, said.append, trio.Event(), frozenset())

    async def embed(tokens: list[int], position: int) -> WireTensor:
        assert tokens and position + len(tokens) < len(text)
        return cast(WireTensor, Tokens(len(tokens)))

    def head(hidden: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, [[0] * cast(Tokens, hidden).tokens])

    await chain.answered(chain.send(prompt), prompt)
    plan.speed.note_work(prompt, chain.compute, 0.0)
    going.take(text[prompt])
    begun = trio.current_time()
    while not going.is_over:
        most = len(text) - len(going.tokens) - 1
        draft = plan.choose(lookup.matches(going.tokens), most) if drafts else Draft()
        if draft.tokens or (model is not None and plan.model_depth(most)):
            flight = cast(Flight, SimulatedFlight(chain))
            made, stages = len(going.tokens), lambda: chain.compute
            guesses = cast("ModelDrafter | None", model)
            await Speculation(going, flight, plan, lookup, embed, head, stages, MOST_STEP, guesses).run(draft)
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


def guessable(seed: int, share: float, vocabulary: int) -> tuple[list[int], int]:
    """What a look into the text finds comes next with this probability, and never otherwise."""
    rng, drafter = random.Random(seed), LookupDrafter()
    tokens = [rng.randrange(vocabulary) for _ in range(60)]
    while len(tokens) < 160:
        found = next(drafter.matches(tokens), Draft((-1,)))
        others = [token for token in range(vocabulary) if token != found.tokens[0]]
        tokens.append(found.tokens[0] if found.match and rng.random() < share else rng.choice(others))
    return tokens, 60


WIDE = Line(0.05, 3, 0.008, 0.001)


@pytest.mark.parametrize("servers", [2, 4])
def test_what_is_said_once_more_is_many_times_quicker_over_a_wide_area(no_threads: None, servers: int) -> None:
    text, prompt = repeated(random.Random(servers))
    line = Line(0.05, servers, 0.008, 0.001)
    plain, drafted = (answer(text, prompt, line, drafts) for drafts in (False, True))
    assert drafted.tokens == plain.tokens == text
    assert plain.seconds / drafted.seconds > 5
    assert drafted.most_under_way >= 3 and plain.most_under_way == 1
    assert drafted.counts.gained == pytest.approx(plain.seconds - drafted.seconds, rel=0.1)


@pytest.mark.parametrize("text", [repeated, ordinary, meaningless])
@pytest.mark.parametrize(
    "line",
    [WIDE, Line(0.01, 2, 0.008, 0.001), Line(0.0002, 1, 0.0, 0.02), Line(0.0002, 3, 0.02, 0.01)],
    ids=["wide", "near", "every-token-costs-as-much", "no-way"],
)
def test_drafts_make_nothing_slower(
    no_threads: None, text: Callable[[random.Random], tuple[list[int], int]], line: Line
) -> None:
    tokens, prompt = text(random.Random(3))
    plain, drafted = (answer(tokens, prompt, line, drafts) for drafts in (False, True))
    assert drafted.tokens == plain.tokens == tokens
    assert plain.seconds / drafted.seconds > 0.97


ROUND_TRIPS = (0.0, 0.02, 0.05, 0.1, 0.2)
SERVERS = (2, 3, 4)


@pytest.mark.parametrize(("fixed", "each"), [(0.008, 0.001), (0.02, 0.004), (0.0, 0.02)])
@pytest.mark.parametrize(
    ("share", "vocabulary", "times"),
    [(0.0, 6, 0.97), (0.2, 6, 0.97), (0.6, 6, 1.01), (0.0, 30, 0.97)],
    ids=["always-wrong", "mostly-wrong", "mostly-right", "seldom-found"],
)
def test_wrong_drafts_cost_less_than_3_percent(
    no_threads: None, share: float, vocabulary: int, times: float, fixed: float, each: float
) -> None:
    """At every distance and number of servers, however often drafts are right and whatever they cost."""
    text, prompt = guessable(1, share, vocabulary)
    for rtt, servers in itertools.product(ROUND_TRIPS, SERVERS):
        line = Line(rtt / 2, servers, fixed, each)
        plain, drafted = (answer(text, prompt, line, drafts) for drafts in (False, True))
        assert drafted.tokens == plain.tokens == text
        assert plain.seconds / drafted.seconds > times, line


@pytest.mark.parametrize("wrong_in", [1, 3])
@pytest.mark.parametrize("seconds", [0.005, 0.03])
def test_wrong_guesses_of_a_draft_model_cost_less_than_3_percent(
    no_threads: None, wrong_in: int, seconds: float
) -> None:
    text, prompt = guessable(2, 0.0, 30)
    for rtt, servers, (fixed, each) in itertools.product(ROUND_TRIPS, (2, 4), [(0.008, 0.001), (0.0, 0.02)]):
        line = Line(rtt / 2, servers, fixed, each)
        plain = answer(text, prompt, line, drafts=False)
        drafted = answer(text, prompt, line, drafts=True, model=SimulatedModel(text, seconds, wrong_in))
        assert drafted.tokens == plain.tokens == text
        assert plain.seconds / drafted.seconds > (1.5 if wrong_in > 1 and rtt >= 0.1 and servers > 2 else 0.97), line


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("step", [0.004, 0.02])
def test_rows_that_take_drafts_are_as_quick_as_one_batch(no_threads: None, share: float, step: float) -> None:
    """Where the decision lets them, by what it takes a step of several rows to cost."""
    far = 0
    for rtt, servers, rows in itertools.product((0.02, 0.1, 0.2), (1, 3), (2, 4, 8)):
        line = Line(rtt / 2, servers, 0.8 * step + 0.0015, 0.2 * step)
        if draft_apart(rows, [step] * servers, (servers + 1) * rtt / 2, FIRST_GAIN):
            texts = [guessable(seed, share, 20)[0] for seed in range(rows)]
            apart = seconds_of_rows(texts, 60, line)
            batch = (len(texts[0]) - 61) * (servers * line.cost(rows) + (servers + 1) * line.one_way)
            assert batch / apart > (1.3 if share > 0.5 and rtt > 0.05 else 0.97), (line, rows)
            far += rtt >= 0.1
    assert far


def test_what_was_lost_by_wrong_drafts_is_not_lost_forever(no_threads: None) -> None:
    """A text that misled is followed by one that repeats what was said."""
    misleading, prompt = guessable(3, 0.0, 6)
    said, _ = repeated(random.Random(5))
    text = [*misleading, *said]
    plain, drafted = (answer(text, prompt, WIDE, drafts) for drafts in (False, True))
    assert drafted.tokens == text
    assert plain.seconds - drafted.seconds > 150 * 0.2


def test_the_delay_by_steps_that_were_sent_in_vain_is_known() -> None:
    speed = PipelineSpeed()
    speed.note_work(4, [0.04, 0.04], 0.0)
    speed.note_alone(4, 0.3)
    assert speed.note_vain([(4, 1.0), (4, 1.0), (4, 1.01)], now=1.3) == 0.0
    assert speed.note_vain([(4, 1.0), (4, 1.0), (4, 1.01)], now=1.1) == pytest.approx(0.02)
    speed.note_alone(4, 0.32)
    assert speed.alone == pytest.approx(0.3) and speed.delay == 0.0
    speed.note_vain([(4, 1.0), (4, 1.0)], now=1.07)
    speed.note_alone(4, 0.4)  # by more than the estimate: nothing is learnt of the servers
    assert speed.alone == pytest.approx(0.3)
    assert speed.risk(4, 4) == 0.0 and speed.risk(80, 4) == pytest.approx(20 * 0.04 - 0.3)


@pytest.mark.parametrize(("wrong_in", "times"), [(20, 3.5), (3, 1.5)])
def test_a_draft_model_guesses_while_its_guesses_are_checked(no_threads: None, wrong_in: int, times: float) -> None:
    text, prompt = ordinary(random.Random(1))
    plain = answer(text, prompt, WIDE, drafts=False)
    drafted = answer(text, prompt, WIDE, drafts=True, model=SimulatedModel(text, 0.025, wrong_in))
    assert drafted.tokens == plain.tokens == text
    assert plain.seconds / drafted.seconds > times
    assert drafted.most_under_way >= 3


def never_twice(tokens: int) -> tuple[list[int], int]:
    """No two of so many tokens are the same: nothing can be looked up."""
    return list(range(0, 2 * tokens, 2)), 60


def test_the_time_to_read_the_prompt_is_not_that_of_a_guess(no_threads: None) -> None:
    """The first guess comes after 60 tokens that the model has to read, and takes nearly as long as the chain does."""
    text, prompt = never_twice(140)
    plain = answer(text, prompt, WIDE, drafts=False)
    drafted = answer(text, prompt, WIDE, drafts=True, model=SimulatedModel(text, 0.0135, 1000))
    assert drafted.tokens == plain.tokens == text
    assert plain.seconds / drafted.seconds > 6


def test_a_draft_model_that_was_kept_from_guessing_for_a_while_goes_on(no_threads: None) -> None:
    text, prompt = never_twice(160)
    slow = SimulatedModel(text, 0.04, 1000, slow=range(80, 90))
    plain = answer(text, prompt, WIDE, drafts=False)
    drafted = answer(text, prompt, WIDE, drafts=True, model=slow)
    assert drafted.tokens == plain.tokens == text
    assert plain.seconds / drafted.seconds > 2.5
    assert drafted.counts.accepted == drafted.counts.drafted  # and nothing was taken for what stands in the text


def test_matches_that_mean_nothing_do_not_keep_a_good_draft_model_from_guessing(no_threads: None) -> None:
    text, prompt = guessable(1, 0.1, 6)
    plain = answer(text, prompt, WIDE, drafts=False)
    for seconds, times in ((0.03, 5), (0.06, 3)):
        drafted = answer(text, prompt, WIDE, drafts=True, model=SimulatedModel(text, seconds, 1000))
        assert drafted.tokens == plain.tokens == text
        assert plain.seconds / drafted.seconds > times


@pytest.mark.parametrize("late", [range(3, 7), range(12, 16)], ids=["at-the-beginning", "later"])
def test_delays_of_the_network_are_not_blamed_on_a_draft_model(no_threads: None, late: range) -> None:
    text, prompt = guessable(4, 0.0, 30)
    line = replace(WIDE, late=frozenset(late))
    plain = answer(text, prompt, line, drafts=False)
    drafted = answer(text, prompt, line, drafts=True, model=SimulatedModel(text, 0.04, 1000))
    assert drafted.tokens == plain.tokens == text
    assert plain.seconds / drafted.seconds > 3


def measured() -> DraftPlan:
    """A plan for three servers and 100 ms of round trip that has seen a few steps without drafts."""
    plan = DraftPlan(speed=PipelineSpeed())
    assert plan.speed is not None
    for tokens in (1, 9, 1):
        plan.speed.note_work(tokens, [0.008 + 0.001 * tokens] * 3, 0.0)
        plan.speed.note_alone(tokens, 0.227 + 0.003 * tokens)
    plan.note(Draft(), 0, 0.23)
    return plan


def test_a_short_match_is_preferred_to_a_draft_model_only_after_it_was_right() -> None:
    plan = measured()
    for _ in range(20):
        plan.note_guess(0.06)
        plan.note_seen(BY_MODEL, 1, 1)
    short, long = (Draft((1,) * 40, match) for match in (3, 20))
    assert plan.beats_model(long) and not plan.beats_model(short)
    for _ in range(20):
        plan.note_seen(3, 5, 5)  # nobody was asked about them
    assert plan.beats_model(short) and plan.counts == DraftCounts()
    for _ in range(60):
        plan.note_seen(3, 1, 0)
        plan.note_seen(20, 1, 0)
    assert not plan.beats_model(short) and not plan.beats_model(long)


def test_what_one_source_of_drafts_loses_the_other_does_not_pay() -> None:
    plan, text = measured(), [Draft((1,) * 8, 9)]
    assert plan.model_depth(20) > 1 and plan.choose(iter(text), 20).tokens
    plan.settle(1, -10.0)
    assert plan.model_depth(20) > 1 and not plan.choose(iter(text), 20).tokens
    plan = measured()
    assert plan.model_depth(20) > 1
    plan.settle(1, -10.0, by_model=True)
    assert not plan.model_depth(20) and plan.choose(iter(text), 20).tokens


def test_a_second_source_of_drafts_does_not_make_more_losses_possible() -> None:
    alone, both = measured(), measured()
    assert both.model_depth(20) and both.model_budget is not None
    for plan in (alone, both):
        plan.settle(30)
    assert both.budget == pytest.approx(both.model_budget, abs=0.02)
    assert both.budget + both.model_budget == pytest.approx(alone.budget)


def test_what_stands_in_the_text_needs_no_draft_model(no_threads: None) -> None:
    text, prompt = repeated(random.Random(4))
    plain = answer(text, prompt, WIDE, drafts=False)
    drafted = answer(text, prompt, WIDE, drafts=True, model=SimulatedModel(text, 0.04, 20))
    assert drafted.tokens == plain.tokens == text
    assert plain.seconds / drafted.seconds > 5 and drafted.counts.accepted <= drafted.counts.drafted


@pytest.mark.parametrize(
    ("line", "seconds", "wrong_in"),
    [(Line(0.0002, 3, 0.008, 0.001), 0.05, 20), (Line(0.01, 2, 0.008, 0.001), 0.2, 20), (WIDE, 0.025, 1)],
    ids=["no-way", "slower-than-the-chain", "always-wrong"],
)
def test_a_draft_model_makes_nothing_slower(no_threads: None, line: Line, seconds: float, wrong_in: int) -> None:
    text, prompt = ordinary(random.Random(2))
    plain = answer(text, prompt, line, drafts=False)
    drafted = answer(text, prompt, line, drafts=True, model=SimulatedModel(text, seconds, wrong_in))
    assert drafted.tokens == plain.tokens == text
    assert plain.seconds / drafted.seconds > 0.97


def test_a_draft_is_cut_so_that_all_servers_work() -> None:
    speed = PipelineSpeed()
    for tokens in (1, 9, 17):
        speed.note_work(tokens, [0.008 + 0.002 * tokens] * 3, 0.0)
    speed.note_alone(1, 0.43)
    assert speed.alone == pytest.approx(0.43)
    assert speed.step_tokens(1) == 1 and 4 <= speed.step_tokens(48) <= 24
    cut = speed.step_tokens(48)
    assert speed.seconds(48) < 0.43 + 3 * 47 * 0.002 < speed.seconds(48 * cut)
    one = PipelineSpeed()
    for tokens in (1, 9):
        one.note_work(tokens, [0.008 + 0.002 * tokens], 0.0)
    one.note_alone(1, 0.2)
    assert one.step_tokens(48) == 48  # a single server has nothing to wait for


def test_a_step_that_was_sent_is_waited_for() -> None:
    assert begin_step(2)[1] == Send(anew=True)
    state, action = begin_step(2, sent=True)
    assert (state.servers, state.phase, action) == (2, "sent", Receive("sent"))
