"""Brings servers to some blocks: opens sessions there and fills their caches, at several chains where some are silent.

As in Happy Eyeballs (RFC 8305), others are tried beside those that were asked first and do not get on. The first chain
that is ready is taken. The sessions at the others are closed. When others are asked is decided in
`recovery.next_search_action`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Awaitable, Callable, Collection
from dataclasses import dataclass, field, replace

import trio

from ....protocols.ids import PLAIN
from ....protocols.inference import session_name
from ....protocols.prefix import BLOCK_TOKENS
from ...errors import NoChainError, PetalnodeError, ServerFailed, SwarmError, unwrapped
from ...swarm.routing import Hop
from ..deadlines import DEADLINES, Waits, open_patience
from ..losses import LOSSES
from ..router import Router, ServerSearch
from .history import InputHistory, outside_groups
from .link import ServerLink, close_links, step_limit
from .prefixes import Beginning, beginning_of
from .recovery import AskOthers, Attempt, next_search_action
from .replacement import AnsweredWrong, ComputesOther, check_replay, wrong_signers
from .stream import SessionSpec, SessionStream

logger = logging.getLogger(__name__)  # `log` is that of a session's receipts here

FindRoute = Callable[[Collection[str]], Awaitable[tuple[Hop, ...]]]
"""The best chain for some blocks without the excluded peers. Raises NoChainError."""


@dataclass(eq=False)
class _Run:
    """One chain that is asked. `waits_for`: the servers of it whose answer is due now. `granted`: all have taken the
    session, and are being brought to where it is."""

    state: Attempt
    pays: bool
    route: tuple[Hop, ...] = ()
    links: list[ServerLink] = field(default_factory=list)
    waits_for: set[str] = field(default_factory=set)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    failure: ServerFailed | NoChainError | None = None
    granted: bool = False
    done: bool = False


class Opening:
    """Looks for servers for the blocks of `spec` that hold what `history` says, up to `position`, by `run`.

    `epoch` gives the number of the route for each chain that is tried. Silent servers are suspected at once, so that no
    other step of this client asks them meanwhile. What leaves new servers for the history has to be what its signer
    signed, if known (`replacement`).

    Where all servers of a chain kept the first tokens of `beginning`, these do not run through them again: of the
    history by default. The links then have them as their inputs, which may be more than `position`.
    """

    def __init__(
        self,
        router: Router,
        spec: SessionSpec,
        history: InputHistory,
        position: int,
        *,
        epoch: Callable[[], int],
        waits: Waits,
        beginning: Beginning | None = None,
    ) -> None:
        self._router = router
        self._spec = spec
        self._history = history
        self._position = position
        self._epoch = epoch
        self._waits = waits
        self._beginning = beginning or beginning_of({spec.span.start: history.needed(position)}, position)
        self._names: dict[Hop, list[bytes]] = {}
        self._runs: list[_Run] = []
        self._links: list[ServerLink] = []  # of the chain that is taken
        self._not_before = -math.inf
        self._disputes = 0
        self._changed = trio.Event()

    @property
    def peers(self) -> set[str]:
        """The servers that are being asked, and those that are taken."""
        asked = {hop.peer_id for run in self._runs for hop in run.route}
        return asked | {link.server.hop.peer_id for link in self._links}

    async def run(self, search: ServerSearch, find: FindRoute) -> list[ServerLink]:
        """The servers that are ready first, each with the inputs that it was given; `find` chooses whom to ask.

        Those that fail are left out and the rest tried, for as long as `search` has it.

        Raises:
            NoChainError: no chain covers the span; `missing` and the text name the blocks, and who refused.
            BadInput: no server takes a session like this.
            AnsweredWrong: the one whose place is to be taken, as own weights say.
            SwarmError: others compute something else than it has signed, and nobody knows who is right.
        """
        try:
            with unwrapped(PetalnodeError):
                async with trio.open_nursery() as nursery:
                    try:
                        self._links = await self._first_ready(search, find, nursery)
                    finally:
                        for run in self._runs:
                            self._let_go(run)
                    nursery.cancel_scope.cancel()
        except BaseException:  # cancelled while the others were let go
            self._router.start_soon(close_links, self._links)
            raise
        return self._links

    async def _first_ready(self, search: ServerSearch, find: FindRoute, nursery: trio.Nursery) -> list[ServerLink]:
        while True:
            nobody: NoChainError | None = None
            for run in [run for run in self._runs if run.done]:
                self._runs.remove(run)
                if isinstance(run.failure, ComputesOther):
                    await self._settle(search, run, run.failure)
                elif isinstance(run.failure, ServerFailed):
                    search.refuse(run.failure, granted=run.granted)
                elif run.failure is not None:
                    nobody = run.failure
                else:
                    return run.links
            if nobody is not None and not self._runs:
                with self._waits.timed("look"):
                    await search.found_nobody(nobody)
            elif nobody is not None:
                if search.is_over(self._spec.cache_wait):
                    raise search.given_up(nobody)
                self._not_before = math.inf
                nursery.start_soon(self._look, search)
            states = [run.state for run in self._runs]
            action = next_search_action(states, trio.current_time(), self._not_before)
            if isinstance(action, AskOthers):
                if action.instead_of is not None:
                    self._let_go(self._runs.pop(action.instead_of))
                self._ask_others(search, find, nursery)
            else:
                with trio.move_on_at(action.until):
                    await self._changed.wait()

    async def _settle(self, search: ServerSearch, run: _Run, found: ComputesOther) -> None:
        """Leaves servers out that compute something else than the one whose place they take; they are to blame if own
        weights say so. Raises AnsweredWrong, SwarmError as `run`."""
        histories = [self._history, *(link.history for link in run.links)]
        wrong = await trio.to_thread.run_sync(wrong_signers, self._router.model, self._spec, histories)
        for peer_id in wrong:
            self._router.accuse(peer_id, "it has signed other bits than this machine computes for what it was sent")
        lost = self._history.signer
        if lost is not None and lost.hop.peer_id in wrong:
            what = f"server {lost.hop.peer_id}, whose place is taken, has signed wrong answers, and is banned here"
            raise AnsweredWrong(f"{what}; what it has answered so far is of no use: ask again")
        search.leave_out(found)
        self._disputes += not wrong
        if self._disputes >= LOSSES.disputes:
            raise SwarmError(f"{found}; one of them is wrong, and only own weights of these blocks can tell: ask again")

    async def _look(self, search: ServerSearch) -> None:
        """Looks for others while those that are known are silent."""
        with self._waits.timed("look"), trio.move_on_after(DEADLINES.look):
            await self._router.refresh()
        await trio.sleep(DEADLINES.retry_interval)
        search.reconsider()
        self._not_before = trio.current_time()
        self._notify()

    def _ask_others(self, search: ServerSearch, find: FindRoute, nursery: trio.Nursery) -> None:
        silent = {peer_id for run in self._runs for peer_id in run.waits_for}
        for peer_id in silent:
            self._router.suspect(peer_id)
        now = trio.current_time()
        # Points are spent once: who is asked beside others has to do without.
        run = _Run(Attempt(now, math.inf, routed=False), pays=search.pays and not self._runs)
        self._runs.append(run)
        nursery.start_soon(self._try, run, find, {*search.refused, *silent})

    def _let_go(self, run: _Run) -> None:
        """Gives a chain up that was not chosen. Its servers need no answer of ours to be asked again."""
        run.scope.cancel()
        if run.done and run.failure is None:
            self._router.start_soon(close_links, run.links)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    # --- one chain

    async def _try(self, run: _Run, find: FindRoute, excluded: Collection[str]) -> None:
        ready = False
        try:
            with run.scope:
                with self._waits.timed("route"):
                    run.route = await find(excluded)
                epoch = self._epoch()
                with self._waits.timed("open"):
                    await self._open(run, epoch)
                run.granted = True
                with self._waits.timed("replay"):
                    await self._replay(run, epoch)
                ready = True
        except (ServerFailed, NoChainError) as error:
            run.failure = error
        finally:
            # Let go when it was ready and had not said so yet: nobody else knows its links.
            if not ready or run.scope.cancel_called:
                self._router.start_soon(close_links, run.links)
        run.done = True
        self._notify()

    def _gets_on(self, run: _Run, waits_for: Collection[str], patience: float) -> None:
        """The run has come to a point from which on it waits for these servers, for `patience` seconds before others
        are asked. The more are silent already, the less is given to the next."""
        run.waits_for = set(waits_for)
        silent = sum(other.state.due <= trio.current_time() for other in self._runs)
        run.state = replace(run.state, due=trio.current_time() + patience / (1 + silent), routed=True)
        self._notify()

    async def _open(self, run: _Run, epoch: int) -> None:
        """Opens a session at every server of the route, side by side. `links` then has those that must be closed.

        Raises:
            ServerFailed: one of them cannot be reached or refuses.
        """
        opened: dict[Hop, ServerLink] = {}
        route, spec, router = run.route, self._spec, self._router
        trips = [router.round_trip(hop.peer_id) or 0.0 for hop in route]
        self._gets_on(run, {hop.peer_id for hop in route}, open_patience(max(trips, default=0.0)))

        failures: list[ServerFailed] = []

        async def open_or_fail(index: int, hop: Hop) -> None:
            try:
                await open_one(index, hop)
            except ServerFailed as error:
                # Not raised here: in a group with a cancellation nobody would know it for what it is.
                failures.append(error)
                nursery.cancel_scope.cancel()

        async def open_one(index: int, hop: Hop) -> None:
            payment = await router.payment(hop, spec) if run.pays else None
            prefix = await self._prefix_at(hop)
            async with router.adapter_at(hop, spec):
                stream = await router.connect(hop)
                claims, log = router.claims_of(hop.peer_id), router.receipts.session(hop.peer_id)
                trace = None if spec.trace is None else spec.trace.hop(hop)
                nonce = None if trace is None else trace.nonce
                server = SessionStream(stream, hop, spec, router.peer_id, nonce, claims=claims, log=log)
                opened[hop] = ServerLink(server, trace=trace)
                before = route[index - 1].peer_id if index else None
                after = route[index + 1].peer_id if spec.push and index + 1 < len(route) else None
                may_push = spec.trusted.may_push
                await server.open(
                    epoch,
                    upstream=before if before is not None and may_push(before, hop.peer_id) else None,
                    downstream=after if after is not None and may_push(hop.peer_id, after) else None,
                    payment=payment,
                    prefix=prefix,
                )
                entered = self._beginning.part(hop.span.start, server.prefix_tokens)
                # Of layouts evidence shows nothing.
                if server.prefix_tokens and log is not None and all(step.chunk.layout == PLAIN for step in entered):
                    log.begins_with([(step.chunk.tensor, step.chunk.payload) for step in entered])
                name = session_name(server.nonce)
                logger.info(
                    "session %s: granted by %s, blocks %s", name, hop.peer_id, hop.span, extra={"session": name}
                )
                if payment is not None and server.priority:
                    router.paid(payment)
            run.waits_for.discard(hop.peer_id)

        try:
            async with trio.open_nursery() as nursery:
                for index, hop in enumerate(route):
                    nursery.start_soon(open_or_fail, index, hop)
        finally:
            run.links.extend(opened[hop] for hop in route if hop in opened)
        if failures:
            raise failures[0]

    async def _replay(self, run: _Run, epoch: int) -> None:
        """Runs the inputs through the new servers, one after the other, to build their caches.

        Raises:
            ServerFailed: one of them failed.
            ComputesOther: they do not end in the digests that are on the receipts.
        """
        held = min((link.server.prefix_tokens for link in run.links), default=0)
        held = min(outside_groups(inputs, held) for inputs in self._beginning.inputs.values()) if held else 0
        for link in run.links:
            kept = self._beginning.part(link.server.hop.span.start, held)
            # What it has of those it has not signed in this session.
            link.history = InputHistory([replace(step, answered=b"") for step in kept], signer=link.server.signer)
        for step in self._history.replay(self._position, step_limit(run.links), held):
            for link in run.links:
                self._gets_on(run, [link.server.hop.peer_id], link.patience(step.chunk))
                step = await link.replay(step, epoch)
            await check_replay(self._history, self._spec, run.links, step)

    async def _prefix_at(self, hop: Hop) -> list[bytes]:
        """The names of what the server of `hop` may have kept."""
        if not self._spec.share or self._beginning.tokens < BLOCK_TOKENS:
            return []
        if hop not in self._names:
            self._names[hop] = await trio.to_thread.run_sync(self._beginning.names, self._spec, hop)
        return self._names[hop]
