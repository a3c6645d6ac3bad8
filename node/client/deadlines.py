"""How long a client waits, for whom, and why: all of its deadlines, in seconds.

A dead connection is noticed by itself, a killed server's at once and a frozen one's after about 4 s; what stands here
is for peers that are connected and silent.
"""

from __future__ import annotations

from typing import Final

REFRESH_TIMEOUT: Final = 5.0
"""For peers to say which servers they know."""
RTT_TIMEOUT: Final = 3.0
"""For an answer to a ping, connection included. Who takes longer is not considered for the chain that is looked for."""
MEASURE_TIMEOUT: Final = 10.0
"""For the same in the background, so that a peer far away is connected when it is looked at again."""
RTT_LIFETIME: Final = 60.0
"""After which a round trip is measured anew before a route is made."""
OPEN_TIMEOUT: Final = 10.0
"""For a stream to a server, connection included."""
SEND_TIMEOUT: Final = 30.0
"""For a server to read a step, and beyond its cache queue to answer an Open."""
CLOSE_TIMEOUT: Final = 1.0
"""For a Close to leave this machine."""
RECOVERY_TIMEOUT: Final = 30.0
"""Of looking for other servers, before the caller gets an error."""
REOPEN_TIMEOUT: Final = 10.0
"""The same for a new session, when servers that should be there are not."""
RETRY_INTERVAL: Final = 0.5
"""Between two looks."""
SUSPECT_SECONDS: Final = 15.0
"""For which a server that failed is a last resort only."""
PATH_KEEP: Final = 15.0
"""For which servers are asked to keep a session whose stream was lost. Whoever needs the cache gets it before."""
KEEP_GRACE: Final = 5.0
"""By which a server may notice a loss later than the client."""
MOVE_TIMEOUT: Final = 3.0
"""For a session to change to another stream between two steps, while the old one lives."""
MOVE_RETRY: Final = 20.0
"""After which that is tried again where it has failed."""
NOT_ALLOWED_SECONDS: Final = 600.0
"""For which a server whose owner has not listed this client is a last resort only."""
STANDBY_POLL: Final = 0.05
"""Between two looks whether a standby has overtaken a late server."""
STANDBY_RETRY: Final = 30.0
"""After which a standby is tried again where none could be had."""
PUSH_PATIENCE: Final = 2.0
"""At least, until a step that a server was pushed is sent by the client too. Harmless when it was not lost: a repeated
step is answered once."""
PUSH_RETRY: Final = 60.0
"""After which two servers between which a push was lost may push again."""

SLOW_FACTOR: Final = 10.0
SLOW_AT_LEAST: Final = 1.0
SLOW_AT_FIRST: Final = 15.0
POOR_BYTES_PER_SECOND: Final = 1 << 19
"""Of a line through a busy relay, where none was measured."""


def patience(usual: float | None, tokens: int, nbytes: int, round_trip: float) -> float:
    """Seconds after which the answer to a step of `tokens` positions is late, and a standby is prepared.

    Ten times what such a step usually takes, but at least a second: `round_trip`, and `usual` for each position beyond
    that (both in seconds). While nothing is known of the server's speed, 15 s and what `nbytes` take there and back on
    a poor line.
    """
    if usual is None:
        return SLOW_AT_FIRST + 2 * nbytes / POOR_BYTES_PER_SECOND
    return max(SLOW_AT_LEAST, SLOW_FACTOR * (round_trip + usual * tokens))


def push_patience(round_trip: float, nbytes: int) -> float:
    """Seconds after which a step of `nbytes` that one server should have pushed to the next is taken for lost.

    The client does not know the way between the servers, and makes room for one that is a few times as long as its own
    to the second of them (`round_trip`, in seconds).
    """
    return PUSH_PATIENCE + 4 * min(round_trip, 1.0) + nbytes / POOR_BYTES_PER_SECOND


BATCH_FACTOR: Final = 10.0
BATCH_AT_LEAST: Final = 60.0


def batch_patience(usual: float) -> float:
    """Seconds for the answer to one micro-batch that should take `usual` seconds there.

    Chats and other clients' micro-batches go before it, so a long time says little: ten times that, and a minute.
    """
    return BATCH_AT_LEAST + BATCH_FACTOR * usual
