"""Drafts in steps that are under way side by side: right, quicker over a wide area, and slower nowhere."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from petalnode.node.client.api.row_drafts import ROWS, draft_apart
from petalnode.node.client.generation.decoding import is_inline
from petalnode.node.client.generation.draft_model import Draft
from petalnode.node.client.generation.drafting import BY_MODEL, DraftCounts, DraftPlan, PipelineSpeed
from tests.unit.simulated_chain import (
    Line,
    SimulatedModel,
    answer,
    guessable,
    meaningless,
    ordinary,
    repeated,
    seconds_of_rows,
    without_threads,
)


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    without_threads(monkeypatch)


WIDE = Line(0.05, 3, 0.008, 0.001)


def test_only_a_lone_short_token_is_inline() -> None:
    assert is_inline(1, short=True, beside=0)
    assert not is_inline(1, short=False, beside=0)
    assert not is_inline(2, short=True, beside=0)  # a prompt, a draft, or rows
    assert not is_inline(1, short=True, beside=1)


@pytest.mark.parametrize("servers", [2, 4])
def test_repetition_is_many_times_quicker_over_wide_areas(no_threads: None, servers: int) -> None:
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


FAR = ((0.0, 2), (0.0, 4), (0.02, 3), (0.05, 2), (0.05, 3), (0.1, 4), (0.2, 4), (0.2, 2))
"""Round trips and numbers of servers: each of the least and the most of one with those of the other."""


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
    for rtt, servers in FAR:
        line = Line(rtt / 2, servers, fixed, each)
        plain, drafted = (answer(text, prompt, line, drafts) for drafts in (False, True))
        assert drafted.tokens == plain.tokens == text
        assert plain.seconds / drafted.seconds > times, line


@pytest.mark.parametrize("wrong_in", [1, 3])
@pytest.mark.parametrize("seconds", [0.005, 0.03])
def test_wrong_model_guesses_cost_under_3_percent(no_threads: None, wrong_in: int, seconds: float) -> None:
    text, prompt = guessable(2, 0.0, 30)
    for number, (rtt, servers) in enumerate(FAR):
        line = Line(rtt / 2, servers, *((0.008, 0.001), (0.0, 0.02))[number % 2])
        plain = answer(text, prompt, line, drafts=False)
        drafted = answer(text, prompt, line, drafts=True, model=SimulatedModel(text, seconds, wrong_in))
        assert drafted.tokens == plain.tokens == text
        assert plain.seconds / drafted.seconds > (1.5 if wrong_in > 1 and rtt >= 0.1 and servers > 2 else 0.97), line


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("step", [0.004, 0.02])
def test_drafting_rows_are_as_quick_as_batches(no_threads: None, share: float, step: float) -> None:
    """Where the decision lets them, by what it takes a step of several rows to cost."""
    far = 0
    for rtt, servers, rows in itertools.product((0.02, 0.1, 0.2), (1, 3), (2, 4, 8)):
        line = Line(rtt / 2, servers, 0.8 * step + 0.0015, 0.2 * step)
        if draft_apart(rows, [step] * servers, (servers + 1) * rtt / 2, ROWS.first_gain):
            texts = [guessable(seed, share, 20)[0] for seed in range(rows)]
            apart = seconds_of_rows(texts, 60, line)
            batch = (len(texts[0]) - 61) * (servers * line.cost(rows) + (servers + 1) * line.one_way)
            assert batch / apart > (1.3 if share > 0.5 and rtt > 0.05 else 0.97), (line, rows)
            far += rtt >= 0.1
    assert far


def test_loss_by_wrong_drafts_ends(no_threads: None) -> None:
    """A text that misled is followed by one that repeats what was said."""
    misleading, prompt = guessable(3, 0.0, 6)
    said, _ = repeated(random.Random(5))
    text = [*misleading, *said]
    plain, drafted = (answer(text, prompt, WIDE, drafts) for drafts in (False, True))
    assert drafted.tokens == text
    assert plain.seconds - drafted.seconds > 150 * 0.2


def test_vain_steps_delay_is_known() -> None:
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
def test_draft_model_guesses_while_its_guesses_are_checked(no_threads: None, wrong_in: int, times: float) -> None:
    text, prompt = ordinary(random.Random(1))
    plain = answer(text, prompt, WIDE, drafts=False)
    drafted = answer(text, prompt, WIDE, drafts=True, model=SimulatedModel(text, 0.025, wrong_in))
    assert drafted.tokens == plain.tokens == text
    assert plain.seconds / drafted.seconds > times
    assert drafted.most_under_way >= 3


def never_twice(tokens: int) -> tuple[list[int], int]:
    """No two of the tokens are the same: nothing can be looked up."""
    return list(range(0, 2 * tokens, 2)), 60


def test_prompts_reading_is_no_guesss_time(no_threads: None) -> None:
    """The first guess comes after 60 tokens that the model has to read, and takes nearly as long as the chain does."""
    text, prompt = never_twice(140)
    plain = answer(text, prompt, WIDE, drafts=False)
    drafted = answer(text, prompt, WIDE, drafts=True, model=SimulatedModel(text, 0.0135, 1000))
    assert drafted.tokens == plain.tokens == text
    assert plain.seconds / drafted.seconds > 6


def test_held_back_draft_model_goes_on(no_threads: None) -> None:
    text, prompt = never_twice(160)
    slow = SimulatedModel(text, 0.04, 1000, slow=range(80, 90))
    plain = answer(text, prompt, WIDE, drafts=False)
    drafted = answer(text, prompt, WIDE, drafts=True, model=slow)
    assert drafted.tokens == plain.tokens == text
    assert plain.seconds / drafted.seconds > 2.5
    assert drafted.counts.accepted == drafted.counts.drafted  # and nothing was taken for what stands in the text


def test_meaningless_matches_leave_a_good_draft_model_guessing(no_threads: None) -> None:
    text, prompt = guessable(1, 0.1, 6)
    plain = answer(text, prompt, WIDE, drafts=False)
    for seconds, times in ((0.03, 5), (0.06, 3)):
        drafted = answer(text, prompt, WIDE, drafts=True, model=SimulatedModel(text, seconds, 1000))
        assert drafted.tokens == plain.tokens == text
        assert plain.seconds / drafted.seconds > times


class Broken(SimulatedModel):
    """Runs out of memory once it has read 80 tokens."""

    def guess(self, line: Sequence[int], ahead: object) -> int:
        if len(line) > 80:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        return super().guess(line, ahead)


def test_answer_goes_on_without_a_broken_draft_model(no_threads: None, caplog: pytest.LogCaptureFixture) -> None:
    text, prompt = never_twice(140)
    drafted = answer(text, prompt, WIDE, drafts=True, model=Broken(text, 0.0135, 1000))
    assert drafted.tokens == text and drafted.counts.accepted > 0
    assert "guesses no more in this conversation: DefaultCPUAllocator" in caplog.text


def test_guesses_that_were_right_were_drafted(no_threads: None) -> None:
    """Also those whose tokens are chosen while their step is made ready."""
    text, prompt = never_twice(160)
    line = Line(0.0002, 2, 0.008, 0.001, embedding=0.002)
    drafted = answer(text, prompt, line, drafts=True, model=SimulatedModel(text, 0.01, 1000))
    assert drafted.tokens == text
    assert drafted.counts.accepted == drafted.counts.drafted > 50


@pytest.mark.parametrize("late", [range(3, 7), range(12, 16)], ids=["at-the-beginning", "later"])
def test_network_delays_are_not_blamed_on_drafts(no_threads: None, late: range) -> None:
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


def test_short_match_precedes_models_only_after_success() -> None:
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


def test_one_draft_source_pays_nothing_for_another() -> None:
    plan, text = measured(), [Draft((1,) * 8, 9)]
    assert plan.model_depth(20) > 1 and plan.choose(iter(text), 20).tokens
    plan.settle(1, -10.0)
    assert plan.model_depth(20) > 1 and not plan.choose(iter(text), 20).tokens
    plan = measured()
    assert plan.model_depth(20) > 1
    plan.settle(1, -10.0, by_model=True)
    assert not plan.model_depth(20) and plan.choose(iter(text), 20).tokens


def test_second_draft_source_allows_no_more_losses() -> None:
    alone, both = measured(), measured()
    assert both.model_depth(20) and both.model_budget is not None
    for plan in (alone, both):
        plan.settle(30)
    assert both.budget == pytest.approx(both.model_budget, abs=0.02)
    assert both.budget + both.model_budget == pytest.approx(alone.budget)


def test_what_stands_in_text_needs_no_draft_model(no_threads: None) -> None:
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


def test_draft_is_cut_so_that_all_servers_work() -> None:
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
