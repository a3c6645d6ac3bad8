"""Which model is meant where none is named."""

from __future__ import annotations

import time

from ..client.deadlines import REFRESH_TIMEOUT
from ..errors import BadInput, SwarmError
from ..swarm.swarm import Swarm


async def served_model(swarm: Swarm) -> str:
    """The one model that the swarm serves.

    Raises:
        SwarmError: it serves none.
        BadInput: it serves several.
    """
    view = await swarm.refresh(timeout=REFRESH_TIMEOUT)
    names = sorted({name for name, _ in view.models(now=time.time()).values()})
    if not names:
        raise SwarmError("nobody in this swarm serves a model (yet): start one with `petalnode serve`")
    if len(names) > 1:
        raise BadInput(f"this swarm serves several models: name one of {', '.join(names)}")
    return names[0]
