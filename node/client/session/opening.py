"""Finding servers for a part of a session's chain, and bringing them to where it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import trio

from ...errors import NoChainError, ServerFailed
from ..deadlines import RECOVERY_TIMEOUT, REOPEN_TIMEOUT, RETRY_INTERVAL
from ..request import is_lost, with_refusals
from ..router import Router, note_failure
from .history import History
from .links import HistoryLost, Link, close_links, open_links, replay, step_limit
from .stream import SessionSpec


@dataclass
class RouteEpoch:
    """Counts the changes of a session's chain."""

    value: int = 0

    def next(self) -> int:
        self.value += 1
        return self.value


async def open_chain(
    router: Router,
    spec: SessionSpec,
    epoch: RouteEpoch,
    history: History,
    position: int,
    *,
    wait: bool,
    because: ServerFailed | None = None,
    may_return: Callable[[], bool] = lambda: False,
) -> list[Link]:
    """Links for `spec.span` that hold what `history` says, up to `position`.

    Servers that refuse or cannot be reached are left out and the rest tried; when none is left, all are asked again
    until the deadline (for ever with `wait`), because servers come and go. Where nobody is known who could be asked, a
    new session does not wait. `because` is the failure of the server whose place is taken; it is left out as long as
    its session `may_return`.

    Raises:
        NoChainError: no chain covers the span; `missing` and the text name the blocks, and who refused.
        BadInput: no server takes a session like this.
        HistoryLost: the history does not go back to the beginning.
    """
    if history.start:
        raise HistoryLost(f"{because}; what it held before this process started is not known here")
    begun = trio.current_time()
    refused: dict[str, ServerFailed] = {} if because is None else {because.peer_id: because}
    fresh = lost = False
    while True:
        try:
            route = await router.route(spec, refused)
        except NoChainError as error:
            if not fresh:  # what this node has heard may be old
                fresh = True
                await router.refresh()
                continue
            lost = lost or any(is_lost(each) for each in refused.values())
            limit = RECOVERY_TIMEOUT if because is not None else REOPEN_TIMEOUT if lost else 0.0
            if not wait and trio.current_time() >= begun + limit:
                raise with_refusals(error, refused, router.peer_id) from None
            await trio.sleep(RETRY_INTERVAL)
            refused, fresh = {}, False
            if because is not None and may_return():
                refused[because.peer_id] = because
            continue
        links: list[Link] = []
        try:
            await open_links(router, spec, route, epoch.next(), links)
            await replay(links, history.replay(position, step_limit(links)), epoch.value)
        except ServerFailed as error:
            await close_links(links)
            refused[error.peer_id] = error
            note_failure(router, error)
        except BaseException:
            await close_links(links)
            raise
        else:
            return links
