"""How often servers tell and ask, and how long an announcement holds, by how many announcements a node knows. Pure.

Where everybody tells everybody, each node's traffic grows with the swarm. Up to `PACE.quick` announcements they are
spread as quickly as that. Beyond, they hold longer for each that is known, up to an hour, so that each is sent more
seldom; and who asks takes answers of `PACE.answer_bytes` only, in the end one a minute, which are samples of the
swarm: a node's traffic is bounded, whatever is announced. What does not hold that long (load, free cache) is asked
of the server itself by who measures the way to it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ...protocols.announcement import ANNOUNCEMENT


@dataclass(frozen=True)
class RefreshPolicy:
    """From what size of a swarm on its announcements last longer, and what is asked in a round."""

    quick: int = 32  # Announcements known up to which everything goes as quickly as it can
    whole: int = 128
    """Announcements in an answer to a server or a bootstrap node. Who knows no more than that gives all."""
    answer_bytes: int = 48 * 1024  # Of announcements in an answer, to clients and in swarms that are not small
    longest_round: float = 60.0
    most_asked: int = 5
    """In a small swarm, a node that 16 peers tell and that asks 5 in every third of a lifetime knows nearly all
    announcements of a round one round later: spreading by asking multiplies the knowing by e^5 in a round."""


PACE: Final = RefreshPolicy()


@dataclass(frozen=True)
class RefreshRate:
    """Times in seconds.

    Attributes:
        lifetime: of the own announcement.
        round: between two times that others are asked for what they know.
        asked: how many of them.
        max_bytes: of announcements in an answer; 0: as many as there are.
    """

    lifetime: float
    round: float
    asked: int
    max_bytes: int

    @property
    def renewal(self) -> float:
        """Seconds after which an announcement is renewed: two may get lost before it expires."""
        return self.lifetime / 3

    def pause(self, received: int) -> float:
        """Seconds from a round of questions, of whose answers `received` bytes came, to the next: who answers more than
        he was asked for gets more time, not more traffic."""
        most = self.asked * self.max_bytes
        return self.round * max(received / most, 1.0) if most else self.round

    @property
    def quick(self) -> bool:
        """Whether the swarm is so small that everybody is told everything, at once."""
        return not self.max_bytes


def refresh_rate(known: int, ttl: float) -> RefreshRate:
    """For a node that knows `known` announcements; `ttl` is how long they hold in a small swarm, in seconds.

    A flood of keys makes it slower, as a swarm of as many servers would: less is sent, and a server that was killed is
    noticed by who tries it. What changes in an announcement is told at once in any case.
    """
    lifetime = max(ttl, min(ttl * (2 * known / PACE.quick - 1), ANNOUNCEMENT.max_lifetime))
    pause = max(ttl / 3, min(lifetime / 3, PACE.longest_round))
    asked = min(max(round(PACE.most_asked * PACE.quick / max(known, 1)), 1), PACE.most_asked)
    return RefreshRate(lifetime, pause, asked, 0 if known <= PACE.quick else PACE.answer_bytes)
