"""A session that a server has granted, and a stranger."""

from __future__ import annotations

from petalnode.crypto.identity import Identity

CLIENT, UPSTREAM, STRANGER = Identity.generate(), Identity.generate(), Identity.generate()
TIMEOUT = 120.0
