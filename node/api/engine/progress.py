"""What a choice is doing while it is made: the hops of its last step, and what it waits for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import trio

from ...client.generation.conversation import Conversation
from .generation import AnswerProgress, Event, HopReport, WaitingFor


@dataclass(frozen=True)
class ProgressTimes:
    """How often a client that waits is told what its answer waits for."""

    look_seconds: float = 0.1
    every_seconds: float = 0.5
    silence: float = 1.5
    """Seconds without a word from a server, after which that is told."""


PROGRESS: Final = ProgressTimes()


def waiting_of(conversation: Conversation, now: float) -> WaitingFor | None:
    """What the step is held up by, if that is worth telling at `now` (seconds of trio's clock)."""
    trouble = conversation.trouble
    if trouble is None or not (trouble.lost or now - trouble.since > PROGRESS.silence):
        return None
    blocks = (trouble.hop.span.start, trouble.hop.span.end)
    return WaitingFor(trouble.hop.peer_id, blocks, trouble.lost, trouble.reason, trouble.waits)


def is_news(told: AnswerProgress | None, now: AnswerProgress, since: float) -> bool:
    """Whether `now` is to be told, `since` seconds after `told`: at once that a server is missed or was replaced, the
    milliseconds of hops every now and then."""
    if not now.hops and now.waiting is None:
        return False
    if told is None or (told.waiting, told.recoveries) != (now.waiting, now.recoveries) or route(told) != route(now):
        return True
    return since >= PROGRESS.every_seconds and told.tokens != now.tokens


def route(progress: AnswerProgress) -> list[tuple[str, tuple[int, int]]]:
    return [(hop.peer_id, hop.blocks) for hop in progress.hops]


async def tell(
    look: Callable[[], AnswerProgress], send: trio.MemorySendChannel[Event], scope: trio.CancelScope
) -> None:
    """Sends what is news until `scope` is cancelled. Of a reader that is behind, no more than one stands in the
    channel."""
    told, since = None, 0.0
    with scope:
        while True:
            await trio.sleep(PROGRESS.look_seconds)
            since += PROGRESS.look_seconds
            now = look()
            if is_news(told, now, since) and not send.statistics().current_buffer_used:
                send.send_nowait(now)
                told, since = now, 0.0


def traffic_of(conversation: Conversation) -> dict[str, tuple[int, int]]:
    """Tensor bytes to and from each server so far."""
    return {timing.peer_id: (sent, received) for timing, sent, received in conversation.hops}


def hops_of(conversation: Conversation, before: Mapping[str, tuple[int, int]]) -> tuple[HopReport, ...]:
    """The servers of its chain; bytes since there were so many `before`."""
    reports = []
    for hop, (timing, sent, received) in zip(conversation.route, conversation.hops, strict=False):
        old_sent, old_received = before.get(timing.peer_id, (0, 0))
        reports.append(
            HopReport(
                hop.peer_id,
                (hop.span.start, hop.span.end),
                round(timing.total * 1000, 3),
                max(0, sent - old_sent),
                max(0, received - old_received),
            )
        )
    return tuple(reports)


def progress_fields(progress: AnswerProgress) -> dict[str, Any]:
    """`x_petalnode` of a chunk in the middle of an answer."""
    waiting = progress.waiting
    return {
        "progress": {
            "index": progress.choice,
            "tokens": progress.tokens,
            "recoveries": progress.recoveries,
            "waiting": None
            if waiting is None
            else {
                "peer_id": waiting.peer_id,
                "blocks": list(waiting.blocks),
                "lost": waiting.lost,
                "reason": waiting.reason,
                "seconds": waiting.seconds,
            },
            "hops": [hop.fields() for hop in progress.hops],
        }
    }
