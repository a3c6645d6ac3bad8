"""Sessions of honest servers of the exact kind, in any batches and by every kind of instructions here, and what a
validator says of them.

    python -m tests.exact_sessions STEPS [--seconds S] [--seed N]

Servers of tiny models of all families sign what they answer. A validator judges each answer by the clients' receipts,
by instructions that are chosen by chance as the servers' are. So many steps are judged, or as many as S seconds of
processor time are enough for. Those without vectors take ten times as long, and get one seed of sixteen on each side.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from random import Random

import torch

from petalnode.crypto.identity import Identity
from petalnode.node.blocks.kernels.library import ISAS, Library, library
from petalnode.node.trust.bundle import session_bundle
from petalnode.node.trust.statement import SessionClaim, check_statement
from petalnode.node.verification.observed import Observed, observed_session
from petalnode.node.verification.verdicts import Judge
from petalnode.protocols.ids import Span
from tests.signing_server import SignedSession, SigningServer
from tests.tiny_models import HIDDEN

SPAN = Span(1, 3)
LONGEST = 90
NUMERICS = ("none", "int8", "none/activations=int8", "none/cache=int8")
CODECS = ("none", "bfloat16")
CLIENT = Identity.from_seed(bytes(range(32)))


class Talk(SignedSession):
    """A session at an honest server, with steps as they come: prompts, tokens, drafts, rollbacks, reorders."""

    def __init__(self, server: SigningServer, random: Random, codec: str = "none") -> None:
        self.rows = random.choice((1, 1, 1, 2, 5))
        self._blocks, self._random = server.blocks, random
        self._drafted = 0
        self._generator = torch.Generator().manual_seed(random.getrandbits(32))
        super().__init__(server, self.rows, tuple(random.choice((0, 0, 3)) for _ in range(self.rows)), codec)

    def next(self) -> torch.Tensor:
        """The next step's input; the cache is where it starts."""
        random, position = self._random, self.cache.length
        if position > LONGEST - 20 or (position and random.random() < 0.02):
            position = random.randrange(min(position, LONGEST - 20))
        elif self._drafted:
            position -= random.randrange(self._drafted)  # drafts of which some were wrong
        reorder = tuple(random.randrange(self.rows) for _ in range(self.rows)) if random.random() < 0.02 else ()
        tokens = random.choice((1,) * 12 + (4, 19)) if position else random.randint(4, 60)
        self._drafted = tokens if tokens == 4 else 0
        scale = random.choice((1e-20, 1e-3, 1.0, 1.0, 30.0))
        return self.asked(position, scale * torch.randn(self.rows, tokens, HIDDEN, generator=self._generator), reorder)

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
        """What a validator reads in the receipts, whose signatures are checked."""
        claim = check_statement(session_bundle(CLIENT, self.log, len(self.log.entries) - 1))
        seen = observed_session(self.log, "cpu")
        assert isinstance(claim, SessionClaim) and seen is not None
        return seen


def exact_server(folder: Path, numerics: str = "none") -> SigningServer:
    return SigningServer(folder, bytes(32), SPAN, quant=f"{numerics}/exact-1")


def served(
    server: SigningServer,
    kernels: Library,
    random: Random,
    *,
    rounds: int,
    codec: str = "none",
    sets: Iterable[str] = ISAS[1:],
    sessions: int = 6,
) -> list[Observed]:
    """What an honest server with each kind of these instructions answered, some sessions in one batch."""
    seen = []
    for _ in filter(kernels.select, sets):
        talks = [Talk(server, random, codec) for _ in range(sessions)]
        for _ in range(rounds):
            together = []
            for talk in random.sample(talks, random.randint(1, len(talks))):
                hidden = talk.next()
                if hidden.shape[1] > 1:
                    talk.prefilled(hidden)
                else:
                    together.append((hidden, talk))
            outputs = server.blocks.decode([(hidden, talk.cache) for hidden, talk in together]) if together else []
            for (_, talk), output in zip(together, outputs, strict=True):
                talk.answered(output)
        seen += [talk.observed for talk in talks if talk.log.entries]
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
    slow, *quick = (isa for isa in ISAS[1:] if kernels.select(isa))
    verdicts, pairs, seed = Counter[str](), Counter[str](), options.seed
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["PETALNODE_CACHE"] = scratch
        folders = [saved(name, Path(scratch) / name) for name in KNOWN]
        opened = cache(exact_server)
        while pairs.total() < options.steps and time.process_time() < options.seconds:
            random = Random(seed)
            folder, numerics, codec = random.choice(folders), random.choice(NUMERICS), random.choice(CODECS)
            serving, by = (slow if random.random() < 1 / 16 else random.choice(quick or [slow]) for _ in range(2))
            seen = served(
                opened(folder, numerics), kernels, random, rounds=1000, codec=codec, sets=[serving], sessions=32
            )
            kernels.select(by)
            for verdict in Judge(folder).verdicts(seen):
                verdicts[verdict.verdict] += 1
                if verdict.verdict != "ok":
                    print(f"seed {seed}, {folder.name}, {numerics}, {serving} judged by {by}: {verdict}")
            pairs[f"{serving} judged by {by}"] += sum(len(one.claimed) for one in seen)
            print(f"seed {seed}: {pairs.total()} steps, {dict(verdicts)} sessions", flush=True)
            seed += 1
    print(f"{dict(pairs)} steps, {time.process_time():.0f} s of the processor: {dict(verdicts)} sessions")


if __name__ == "__main__":
    main()
