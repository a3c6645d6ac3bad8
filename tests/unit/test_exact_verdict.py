"""Servers of the exact kind are judged by equality: one bit convicts, and an honest one is never called faulty."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from random import Random

import pytest
import torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.kernels import choice
from petalnode.node.blocks.kernels.library import ISAS, Library
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.verification.observed import Observed
from petalnode.node.verification.recomputation import RecordedStep, SessionQuestion
from petalnode.node.verification.verdicts import Judge
from petalnode.protocols.ids import Span
from petalnode.protocols.tensors import decode, encode
from tests.tiny_models import HIDDEN, save_tiny

SPAN = Span(1, 3)
LONGEST = 90
EXACT = "none/exact-1"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    return save_tiny("llama", tmp_path / "model")


class Conversation:
    """A session at an honest server, with steps as they come: prompts, tokens, drafts, rollbacks, reorders."""

    def __init__(self, blocks: BlockSpan, random: Random, codec: str = "none") -> None:
        self._blocks, self._random, self._codec = blocks, random, codec
        self.rows = random.choice((1, 1, 2, 5))
        self._padding = tuple(random.choice((0, 0, 3)) for _ in range(self.rows))
        self.cache: SpanCache = blocks.make_cache(self.rows, LONGEST, list(self._padding))
        self._steps: list[RecordedStep] = []
        self._claimed: list[torch.Tensor] = []
        self._generator = torch.Generator().manual_seed(random.getrandbits(32))

    def next(self) -> torch.Tensor:
        """The next step's input; the cache is where it starts."""
        random, cache = self._random, self.cache
        if cache.length and (random.random() < 0.1 or cache.length > LONGEST - 20):
            cache.rollback(random.randrange(cache.length))
        reorder = tuple(random.randrange(self.rows) for _ in range(self.rows)) if random.random() < 0.05 else ()
        if reorder:
            cache.reorder(reorder)
        tokens = random.choice((1, 1, 1, 1, 1, 4, 19)) if cache.length else random.randint(4, 60)
        tokens = min(tokens, LONGEST - cache.length)
        scale = random.choice((1e-20, 1e-3, 1.0, 1.0, 30.0))
        hidden = scale * torch.randn(self.rows, tokens, HIDDEN, generator=self._generator)
        self._steps.append(RecordedStep(cache.length, hidden, reorder))
        return hidden

    def answered(self, output: torch.Tensor) -> None:
        self._claimed.append(decode(*encode(output, self._codec)))

    def prefilled(self, hidden: torch.Tensor) -> None:
        """In pieces of any sizes."""
        parts, left = [], hidden
        while left.shape[1]:
            size = self._random.randint(1, left.shape[1])
            parts.append(self._blocks.forward(left[:, :size], self.cache))
            left = left[:, size:]
        self.answered(torch.cat(parts, dim=1))

    @property
    def observed(self) -> Observed:
        question = SessionQuestion(SPAN, tuple(self._steps), self._padding)
        return Observed("server", SPAN, "float32", EXACT, question, tuple(self._claimed), "cpu", self._codec)


def exact_blocks(folder: Path, _: str = "") -> BlockSpan:
    return load_span(folder, SPAN, device="cpu", dtype="float32", quantisation=EXACT)


def served(folder: Path, kernels: Library, random: Random, rounds: int, codec: str = "none") -> list[Observed]:
    """What honest servers of every kind of instructions here answered, some sessions in one batch."""
    seen = []
    for blocks in map(partial(exact_blocks, folder), filter(kernels.select, ISAS[1:])):
        talks = [Conversation(blocks, random, codec) for _ in range(6)]
        for _ in range(rounds):
            together = []
            for talk in random.sample(talks, random.randint(1, len(talks))):
                hidden = talk.next()
                if hidden.shape[1] > 1:
                    talk.prefilled(hidden)
                else:
                    together.append((hidden, talk))
            outputs = blocks.decode([(hidden, talk.cache) for hidden, talk in together]) if together else []
            for (_, talk), output in zip(together, outputs, strict=True):
                talk.answered(output)
        seen += [talk.observed for talk in talks]
    kernels.select(kernels.isa)
    return seen


def test_an_honest_server_is_right_to_the_bit_over_thousands_of_steps(folder: Path, kernels: Library) -> None:
    seen = served(folder, kernels, Random(1), rounds=160)
    assert sum(len(one.claimed) for one in seen) > 1500
    assert {verdict.verdict for verdict in Judge(folder).verdicts(seen)} == {"ok"}


@pytest.mark.parametrize("codec", ["none", "bfloat16", "int8-block64"])
def test_one_bit_convicts(folder: Path, kernels: Library, codec: str) -> None:
    random = Random(codec)
    honest = served(folder, kernels, random, rounds=6, codec=codec)
    lying = []
    for one in honest:
        claimed = [answer.clone() for answer in one.claimed]
        bits = random.choice(claimed).view(torch.int32).view(-1)
        bits[random.randrange(len(bits))] ^= 1 << random.choice((16, 20, 31) if codec != "none" else (0, 1, 22, 31))
        lying.append(replace(one, claimed=tuple(claimed)))
    judge = Judge(folder)
    if codec == "int8-block64" and HIDDEN % 64:
        assert not any(one.arrives_by_token for one in honest)  # judged by the tolerance
        return
    assert {verdict.verdict for verdict in judge.verdicts(honest)} == {"ok"}
    for verdict in judge.verdicts(lying):
        assert verdict.verdict == "faulty" and verdict.tolerance == 0 and "differs in 1 of" in verdict.reason
        assert verdict.one_bit and "memory" in verdict.reason
    worse = [replace(one, claimed=tuple(-answer for answer in one.claimed)) for one in lying]
    assert not any(verdict.one_bit for verdict in judge.verdicts(worse))


def test_nobody_is_called_faulty_where_the_kernels_are_missing(
    folder: Path, kernels: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = served(folder, kernels, Random(2), rounds=3)
    wrong = [replace(one, claimed=tuple(1.01 * answer for answer in one.claimed)) for one in honest]
    monkeypatch.setattr(choice, "library", lambda: None)
    verdicts = Judge(folder).verdicts(honest + wrong)
    assert {verdict.verdict for verdict in verdicts} == {"inconclusive"}
    assert all("exact-1" in verdict.reason for verdict in verdicts)
