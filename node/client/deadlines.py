"""How long a client waits, for whom, and why: all of its deadlines, in seconds.

A dead connection is noticed by itself, a killed server's at once and a frozen one's after about 4 s; what stands here
is for peers that are connected and silent.
"""

from __future__ import annotations

from typing import Final

REFRESH_TIMEOUT: Final = 5.0
"""For peers to say which servers they know."""
RTT_TIMEOUT: Final = 3.0
"""For an answer to a ping. Who takes longer is no server for a chain."""
RTT_LIFETIME: Final = 60.0
"""After which a round trip is measured anew before a route is made."""
OPEN_TIMEOUT: Final = 10.0
"""For a stream to a server, connection included."""
SEND_TIMEOUT: Final = 30.0
"""For a server to read a step, and beyond its cache queue to answer an Open."""
CLOSE_TIMEOUT: Final = 1.0
"""For a goodbye to leave this machine."""
RECOVERY_TIMEOUT: Final = 30.0
"""Of looking for other servers, before the caller is told that the swarm cannot serve."""
REOPEN_TIMEOUT: Final = 10.0
"""The same for a new session, when servers that should be there are not."""
RETRY_INTERVAL: Final = 0.5
"""Between two looks."""
SUSPECT_SECONDS: Final = 15.0
"""For which a server that failed is a last resort only."""
STANDBY_POLL: Final = 0.05
"""Between two looks whether a standby has overtaken a late server."""
STANDBY_RETRY: Final = 30.0
"""After which a standby is tried again where none could be had."""
PUSH_PATIENCE: Final = 2.0
"""After which a step that a server was pushed is sent by the client too. Harmless when it was not lost: a repeated
step is answered once."""

SLOW_FACTOR: Final = 10.0
SLOW_AT_LEAST: Final = 1.0
SLOW_AT_FIRST: Final = 15.0


def patience(usual: float | None, tokens: int) -> float:
    """Seconds after which the answer to a step of `tokens` positions is late, and a standby is prepared.

    Ten times what the server usually takes (`usual`, seconds per position), but at least a second; 15 s while nothing
    is known of its speed.
    """
    if usual is None:
        return SLOW_AT_FIRST
    return max(SLOW_AT_LEAST, SLOW_FACTOR * usual * tokens)
