"""The async client of one model in a swarm: sessions and batches through the best of its servers."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import trio

from ...protocols.ids import Boundaries, Span
from ..errors import BadInput, NoChainError, SwarmError
from ..swarm.swarm import Swarm
from ..swarm.trusted_servers import TrustedServers
from ..trust.receipt_log import KEPT_RECEIPTS, ReceiptArchive
from .batch.batch_client import BatchClient
from .deadlines import DEADLINES
from .request import WireTensor
from .router import ClientState, Router
from .server_selection import ServerLimits
from .session.session import ClientSession, SavedSession
from .session.stream import SessionSpec
from .session.trace import SessionTrace
from .session_adapter import SessionAdapter, announced, named
from .swarm_model import SwarmModel

AUTO: Final = "auto"
CODEC_OF: Final = {"none": "none", "float16": "float16", "bfloat16": "bfloat16", "int8": "int8-block64"}
"""The codec on the wire by the name that a person gives it."""
CODEC_CHOICES: Final = (AUTO, *CODEC_OF)

if TYPE_CHECKING:
    import torch

    from ..models.adapter import Adapter
    from .session.compared_session import ComparedSession


@dataclass(frozen=True)
class ClientOptions(ServerLimits):
    """What a client asks of servers, and of all of its sessions.

    Attributes:
        share_receipts: auditors, multiaddrs with /p2p, that may see what is sent and received (`sharing`). They see
            nothing of the blocks of trusted servers.
        adapter: changes the blocks for sessions that name none: one that is brought to servers, or the name of one that
            they hold.
        compare_chains: from 2 on, the number of chains that share no server, compute and are compared
            (`compared_session`).
        codec: of sessions that name none, one of `CODEC_CHOICES`.
        reopen_timeout: that of `SessionSpec`, in seconds.
    """

    share_receipts: Sequence[str] = ()
    adapter: Adapter | str | None = None
    compare_chains: int = 1
    codec: str = "none"
    reopen_timeout: float | None = None


@asynccontextmanager
async def open_client(
    swarm: Swarm,
    model: SwarmModel,
    options: ClientOptions = ClientOptions(),
) -> AsyncIterator[SwarmClient]:
    """A client for the length of the block.

    Raises:
        BadInput: the adapter was trained for another version of the model, or there is no such codec.
    """
    auditors, changes = options.share_receipts, _session_adapter(options.adapter, model)
    parse_codec(options.codec)
    async with trio.open_nursery() as nursery:
        client = SwarmClient(swarm, model, nursery, options, changes)
        if auditors:
            client.state.receipts = ReceiptArchive(KEPT_RECEIPTS.shared_bytes)
            nursery.start_soon(_share, swarm, client.receipts, auditors, client.trusted.middle(model.num_blocks))
        nursery.start_soon(client.candidates)  # so that the first session finds the round trips measured
        yield client
        nursery.cancel_scope.cancel()


async def _share(swarm: Swarm, archive: ReceiptArchive, auditors: Sequence[str], blocks: Span | None) -> None:
    from .sharing import share_receipts

    if blocks is not None:
        await share_receipts(swarm, archive, auditors, blocks)


def parse_codec(name: str, choices: Sequence[str] = CODEC_CHOICES) -> str:
    """The same name.

    Raises:
        BadInput: there is no such codec here.
    """
    if name not in choices:
        raise BadInput(f"there is no codec {name!r}: give {', '.join(choices)}")
    return name


def exact_for(codec: str, boundaries: Boundaries) -> str:
    """The codec in place of this one where tokens' ids travel, which have to arrive as they are."""
    return {AUTO: "none", "int8": "float16"}.get(codec, codec) if boundaries.ids else codec


def _session_adapter(adapter: Adapter | str | None, model: SwarmModel) -> SessionAdapter | str | None:
    """What sessions are changed by; an adapter that is only a prompt changes no blocks, and a name is looked up later.

    Raises:
        BadInput: it was trained for another version of the model.
    """
    if adapter is None or isinstance(adapter, str):
        return adapter
    adapter.check_model(model.version, model.name)
    return SessionAdapter.of(adapter) if adapter.hash else None


class SwarmClient(Router):
    """Opens sessions of one model, and runs batches without a cache (`batches`); made by `open_client`.

    Attributes:
        reopen_timeout: that of `ClientOptions`, for sessions that are opened from now on.
    """

    def __init__(
        self,
        swarm: Swarm,
        model: SwarmModel,
        nursery: trio.Nursery,
        options: ClientOptions = ClientOptions(),
        adapter: SessionAdapter | str | None = None,
        state: ClientState | None = None,
    ) -> None:
        super().__init__(swarm, model, nursery, options, state)
        self._options = options
        self._adapter = adapter
        self._codec = exact_for(options.codec, model.folder.boundaries)
        self.reopen_timeout = options.reopen_timeout
        self.batches = BatchClient(self)

    def variant(self, *, trusted: TrustedServers, compare_chains: int) -> SwarmClient:
        """A client that demands other things of its sessions, and shares the state of this one."""
        options = replace(
            self._options, trusted=trusted, compare_chains=compare_chains, reopen_timeout=self.reopen_timeout
        )
        return SwarmClient(self.swarm, self.model, self._nursery, options, self._adapter, self.state)

    def _is_choosy(self) -> bool:
        adapter = self._adapter
        only_held = isinstance(adapter, str) or (adapter is not None and adapter.content is None)
        return only_held or self._options.compare_chains > 1 or super()._is_choosy()

    @property
    def changes(self) -> Mapping[str, torch.Tensor]:
        """The tensors that change the blocks where a call or session names nothing else.

        Raises:
            BadInput: only servers have them.
        """
        if isinstance(self._adapter, str) or (self._adapter is not None and self._adapter.content is None):
            raise BadInput(
                "an adapter that only servers hold is for sessions, as generate() makes them: give the path of its "
                "folder to use it without a cache, or to train behind it"
            )
        return self._adapter.content.tensors if self._adapter is not None and self._adapter.content is not None else {}

    async def held_adapter(self, name: str) -> SessionAdapter:
        """The adapter that servers hold by this name.

        Raises:
            NoChainError: no server does.
            BadInput: they hold several.
        """
        found = named(name, self.servers())
        if found is None:
            await self.refresh()
            found = named(name, self.servers())
        if found is None:
            names = {adapter.name for server in self.servers() for adapter in announced(server)}
            held = ", ".join(sorted(names)) or "none"
            raise NoChainError(
                f"no server of the swarm holds an adapter {name} for {self.model.name}; held are: {held}. "
                "Start one with `petalnode serve --adapter PATH`, or give the path of its folder",
                tuple(range(self.model.num_blocks)),
            )
        return found

    async def adapter(self, *, wait: bool = False) -> SessionAdapter | None:
        """What changes the blocks of sessions that name nothing else; with `wait`, as soon as servers hold it. Raises
        as `held_adapter`."""
        while isinstance(self._adapter, str):
            try:
                self._adapter = await self.held_adapter(self._adapter)
            except NoChainError:
                if not wait:
                    raise
                await trio.sleep(DEADLINES.retry_interval)
        return self._adapter

    @asynccontextmanager
    async def session(
        self,
        spec: SessionSpec,
        *,
        wait: bool = False,
        saved: SavedSession | None = None,
        prompt: Sequence[WireTensor] = (),
        source: ClientSession | None = None,
    ) -> AsyncIterator[ClientSession | ComparedSession]:
        """Opens a session over the best servers that will have it, and closes it on the way out.

        Takes up `saved` instead, if all of its servers still hold it. `spec.model_version` is filled in, and the
        client's adapter and codec if `spec` names none; but the `prompt` has the codec of `spec`. With `wait`, a swarm
        that cannot serve is asked again until it can.
        If `spec.share`, its position is behind what the servers have kept of the `prompt` that comes next. With a
        `source`, an open session of such a spec, it holds what that one holds. It goes on by itself from there.

        Raises:
            NoChainError: no chain covers the span; `missing` and the text name the blocks, and who refused.
            BadInput: no server takes a session like this.
        """
        adapter = spec.adapter or await self.adapter(wait=wait)
        trace = None if self.state.on_session is None else SessionTrace(self.model.name)
        spec = replace(spec, model_version=self.model.version, adapter=adapter, trusted=self.trusted, trace=trace)
        original_length = await self.model.original_length()
        spec = replace(spec, reopen_timeout=self.reopen_timeout, original_length=original_length)
        spec = replace(spec, boundaries=self.model.folder.boundaries)
        if refused := self.model.folder.boundaries.refusal(spec.span):
            raise BadInput(refused)
        if spec.codec == "none" and not prompt and source is None:
            spec = replace(spec, codec=await self.chosen_codec(spec, saved))
        spec = replace(spec, prefix_salt=spec.prefix_salt or self.state.prefix_salt)
        session: ClientSession | ComparedSession
        if self._options.compare_chains > 1:
            from .session.compared_session import ComparedSession

            session = ComparedSession(self, spec, self._options.compare_chains, wait)
        else:
            session = ClientSession(self, spec, wait)
        with self.state.totals.counted(session), self._traced(session, trace):
            fits = saved is not None and (saved.max_length, saved.codec) == (spec.max_length, spec.codec)
            if saved is None or not fits or not await session.resume(saved):
                await self._opened(session, prompt, source)
            if self._codec == AUTO and spec.codec == "none" and isinstance(session, ClientSession):
                self.state.uncoded = session
            try:
                yield session
            finally:
                if session is self.state.uncoded:
                    self.state.junctions, self.state.uncoded = session.junctions(), None
                if spec.share and isinstance(session, ClientSession):
                    await self.state.prefixes.ended(session)
                await session.close()

    async def _opened(
        self, session: ClientSession | ComparedSession, prompt: Sequence[WireTensor], source: ClientSession | None
    ) -> None:
        if not session.spec.share or not isinstance(session, ClientSession):
            await session.open()
            return
        if source is not None:
            beginning, position = source.beginning(), source.position
            if position and not beginning.inputs:
                raise BadInput("what this session held before its process started is not known here: fork another one")
            await session.open(beginning, position)
            self.state.prefixes.opened(session)
            return
        found = await trio.to_thread.run_sync(self.state.prefixes.search(session.spec, prompt)) if prompt else None
        await session.open(found)
        self.state.prefixes.opened(session)

    async def chosen_codec(self, spec: SessionSpec, saved: SavedSession | None) -> str:
        """What the tensors of a session that names no codec travel under. With `auto` the first session goes without:
        what it sends tells the bandwidth, and what a codec would make of this model's hidden states."""
        if self._codec != AUTO:
            return CODEC_OF[self._codec]
        if saved is not None:
            return saved.codec  # its caches are worth more
        state = self.state
        chunks, state.junctions = state.junctions or (state.uncoded.junctions() if state.uncoded else []), []
        if chunks:
            from .chunks import rounding_errors  # torch

            for codec, error in (await trio.to_thread.run_sync(rounding_errors, chunks)).items():
                state.codec_errors[codec] = max(error, state.codec_errors.get(codec, 0.0))
        return await self.codec_that_pays(spec, state.codec_errors) if state.codec_errors else "none"

    @contextmanager
    def _traced(self, session: ClientSession | ComparedSession, trace: SessionTrace | None) -> Iterator[None]:
        """Tells of the session when the block is left."""
        try:
            yield
        except SwarmError:
            if trace is not None:
                trace.failed = True
            raise
        finally:
            if trace is not None and self.state.on_session is not None:
                trace.ended, trace.recoveries = time.time(), session.recoveries
                self.state.on_session(trace)
