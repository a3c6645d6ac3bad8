"""Sessions of honest servers of the exact kind, in any batches and by every kind of instructions here.

    python -m tests.exact_sessions STEPS [--seconds S] [--seed N]

judges so many steps of tiny models of all families by equality, by instructions that are chosen by chance, until
S seconds of processor time are used.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from pathlib import Path
from random import Random

import torch

from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.kernels.library import ISAS, Library, library
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.verification.observed import Observed
from petalnode.node.verification.recomputation import RecordedStep, SessionQuestion
from petalnode.node.verification.verdicts import Judge
from petalnode.protocols.ids import Span
from petalnode.protocols.tensors import decode, encode
from tests.tiny_models import HIDDEN

SPAN = Span(1, 3)
LONGEST = 90
EXACT = "none/exact-1"


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


def exact_blocks(folder: Path) -> BlockSpan:
    return load_span(folder, SPAN, device="cpu", dtype="float32", quantisation=EXACT)


def served(blocks: BlockSpan, kernels: Library, random: Random, rounds: int, codec: str = "none") -> list[Observed]:
    """What honest servers of every kind of instructions here answered, some sessions in one batch."""
    seen = []
    for _ in filter(kernels.select, ISAS[1:]):
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


def main() -> None:
    from tests.parity.kernel_spans import KNOWN, saved

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", type=int)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    kernels = library()
    assert kernels is not None
    torch.set_num_threads(1)
    sets = [isa for isa in ISAS[1:] if kernels.select(isa)]
    verdicts, steps, seed = Counter[str](), 0, options.seed
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PETALNODE_CACHE"] = scratch
        folders = [saved(name, Path(scratch) / name) for name in KNOWN]
        loaded = {folder: exact_blocks(folder) for folder in folders}
        while steps < options.steps and time.process_time() < options.seconds:
            random = Random(seed)
            folder, codec = random.choice(folders), random.choice(("none", "bfloat16"))
            seen = served(loaded[folder], kernels, random, rounds=1000, codec=codec)
            by = random.choice(sets)
            kernels.select(by)
            for verdict in Judge(folder).verdicts(seen):
                verdicts[verdict.verdict] += 1
                if verdict.verdict != "ok":
                    print(f"seed {seed}, {folder.name}, judged by {by}: {verdict}")
            steps += sum(len(one.claimed) for one in seen)
            seed += 1
            print(f"{steps} steps of {sets}, seeds {options.seed} .. {seed - 1}: {dict(verdicts)} sessions", flush=True)
    print(f"{steps} steps, {time.process_time():.0f} s of the processor: {dict(verdicts)}")


if __name__ == "__main__":
    main()
