"""Asks the router for a port by UPnP: most home routers give one to whoever asks.

miniupnpc talks to the router, blocking, in a thread that nobody waits for. Discovery without a router that answers
takes some seconds.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Final

import trio

from ..addresses import Endpoint, plain_ip
from ..shares import backoff

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class UpnpPolicy:
    """How long routers are waited for, and what they are asked for."""

    discovery: int = 2000  # milliseconds that routers have to answer
    lease: int = 3600  # seconds, renewed after half of them; some routers know only mappings without an end
    retry: tuple[float, float] = (15.0, 900.0)  # seconds after which a router is looked for again: at first, at most
    deadline: float = 30.0  # seconds for all questions to the router
    unmap: float = 3.0  # seconds, when the node ends
    other_ports: int = 3  # tried if the router has given ours to somebody else


UPNP: Final = UpnpPolicy()


@dataclass(frozen=True)
class Mapping:
    """A port that the router forwards to us, until it is unmapped or its lease ends."""

    external: Endpoint
    internal: Endpoint


def retry_pause(failures: int) -> float:
    """Seconds until the router is asked again after `failures` failures in a row. A question, or its answer, by
    multicast is lost now and then. Most routers that never answer have no UPnP."""
    return backoff(failures, *UPNP.retry, factor=4.0)


class Upnp:
    """Keeps the port mapped while `run` runs, and unmaps it when that is cancelled.

    `mapping` is the mapping now; `changed` is set, and replaced, whenever it changes.
    """

    def __init__(self) -> None:
        self.mapping: Mapping | None = None
        self.changed = trio.Event()
        # Whoever answers as a router may never end: such a thread shall be the only one, and none of the node's others.
        self._thread = trio.CapacityLimiter(1)

    async def run(self, port: int) -> None:
        """Maps `port` of this machine, if there is a router that does it, and renews that."""
        failures = 0
        try:
            while True:
                self._set(await self._ask_router(port))
                failures = 0 if self.mapping else failures + 1
                await trio.sleep(UPNP.lease / 2 if self.mapping else retry_pause(failures))
        finally:
            await self._unmap()

    async def _ask_router(self, port: int) -> Mapping | None:
        external_port = self.mapping.external.port if self.mapping else port
        with trio.move_on_after(UPNP.deadline):
            try:
                return await trio.to_thread.run_sync(
                    _map, port, external_port, abandon_on_cancel=True, limiter=self._thread
                )
            except Exception as error:  # miniupnpc raises plain ones
                log.info("no port by UPnP: %s", error)
        return None

    async def _unmap(self) -> None:
        if self.mapping is not None:
            with trio.CancelScope(deadline=trio.current_time() + UPNP.unmap, shield=True):
                await trio.to_thread.run_sync(_unmap, self.mapping, abandon_on_cancel=True, limiter=self._thread)
            self._set(None)

    def _set(self, mapping: Mapping | None) -> None:
        if mapping != self.mapping:
            self.mapping = mapping
            self.changed.set()
            self.changed = trio.Event()


def _router() -> Any:
    """Blocks. Raises Exception if there is none."""
    import miniupnpc  # here, since most nodes never need it

    router = miniupnpc.UPnP()
    router.discoverdelay = UPNP.discovery
    if router.discover() == 0:
        raise LookupError("no router answers")
    router.selectigd()
    return router


def _map(port: int, external_port: int) -> Mapping:
    """Blocks. Raises Exception, with the router's reason, if it does not."""
    router = _router()
    ip = plain_ip(router.externalipaddress())
    reason: Exception | None = None
    for candidate in range(external_port, min(external_port + UPNP.other_ports, 65536)):
        for lease in (UPNP.lease, 0):
            try:
                router.addportmapping(candidate, "TCP", router.lanaddr, port, "petalnode", "", lease)
                return Mapping(Endpoint(ip, candidate), Endpoint(plain_ip(router.lanaddr), port))
            except Exception as error:
                reason = error
    raise reason or ValueError("no port")


def _unmap(mapping: Mapping) -> None:
    """Blocks. What the router does not undo now, it does when the lease ends."""
    try:
        _router().deleteportmapping(mapping.external.port, "TCP")
    except Exception as error:
        log.info("the port stays mapped for a while: %s", error)
