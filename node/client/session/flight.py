"""Several steps of a session under way at once, before it is known whether the later ones are wanted.

The servers push a step on while the client sends the next one, so that each computes another step and the way there and
back is waited for once (asynchronous verification of drafts). A step that turns out not to be wanted is rolled back
without a message of its own: the next one names the position from which it goes on, and the answers to those between
are skipped when they come.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ...errors import ServerFailed
from ...swarm.routing import Hop
from ..request import WireTensor
from .chain import Chain
from .history import Input
from .step import UNWATCHED_BYTES, StepRun

MOST_BYTES: Final = 3 * UNWATCHED_BYTES
"""Of the steps under way together: they fit the least window of a stream (256 KiB), so that sending does not wait."""


class Flight:
    """Steps under way through one chain. One task may ask while another one waits for the oldest answer.

    Made by `ClientSession.flight`. When a server fails, the step that is waited for goes on as any other one does;
    those behind it are asked once more, one after another, and no more are taken.

    Attributes:
        position: tokens of a row that the session holds after the last answer.
        smooth: the servers may push, and nothing has failed so far.
    """

    def __init__(self, chain: Chain, position: int, *, may_push: bool = True) -> None:
        self.position = position
        self.smooth = may_push
        self._chain = chain
        self._under_way: deque[tuple[Input, StepRun | None]] = deque()

    def __len__(self) -> int:
        """Steps that are under way and wanted."""
        return len(self._under_way)

    @property
    def route(self) -> tuple[Hop, ...]:
        """The servers that the steps go through."""
        return self._chain.route

    @property
    def may_ask(self) -> bool:
        """Whether the servers take one more step now, and nobody waits for the session to be changed between steps."""
        return (
            self.smooth
            and not self._chain.between_steps.statistics().tasks_waiting
            and not any(link.standby_ready for link in self._chain.links)
            and all(link.server.spare_credits > 0 for link in self._chain.links)
            and sum(len(step.chunk.payload) for step, _ in self._under_way) < MOST_BYTES
        )

    async def ask(self, chunk: WireTensor, position: int) -> bool:
        """Sends a step with `position` tokens of a row before it; at most as many as there are after the step before.

        Returns whether it is under way: not if it is too large, or the servers cannot push to each other.
        """
        if not self.smooth or len(chunk.payload) > UNWATCHED_BYTES:
            return False
        step = Input(position, (), chunk)
        before = sum(other.chunk.tokens for other, _ in self._under_way)
        run = StepRun(self._chain, self._chain.links, step, push=True, before=before)
        self._under_way.append((step, run))
        try:
            sent = await run.send_ahead()
        except ServerFailed:
            self._stop_asking()  # whoever waits for the answer to a step before learns why
            return True
        if not sent:
            self._under_way.remove((step, run))
        return sent

    async def answer(self) -> WireTensor:
        """What leaves the last server for the oldest step; it is held then.

        Raises:
            NoChainError: servers failed, and no others hold their blocks.
            SwarmError: several servers in a row failed at this step.
        """
        step, run = self._under_way[0]
        if run is None:  # its numbers are used up at some servers and not at others
            run = StepRun(self._chain, self._chain.links, step, push=False)
        out = await run.run()
        self._under_way.popleft()
        self.position = step.end
        if not run.smooth:
            self._stop_asking()
        return out

    def drop(self) -> None:
        """Wants no answer to any step that is under way."""
        self._under_way.clear()

    def _stop_asking(self) -> None:
        self.smooth = False
        self._under_way = deque((step, None) for step, _ in self._under_way)
