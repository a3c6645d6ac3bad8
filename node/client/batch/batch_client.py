"""Batch requests of a client: streams to the servers of a model that are kept, and which servers a batch goes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Final, TypeVar

import trio

from ....protocols import wire_pb2 as wire
from ....protocols.ids import Span
from ....protocols.training import BACKWARD, BatchProtocol, MicroBatch
from ...errors import NoChainError, ServerFailed
from ...swarm.cost import Estimate
from ...swarm.routing import Hop, RouteCandidate, cheapest_chain
from ..deadlines import DEADLINES, batch_patience
from ..request import ServerRefused, WireTensor, has_code, is_lost
from ..router import Router, ServerSearch, note_failure
from .batch_stream import BatchSpec, BatchStream, PendingBatch, StreamBroken
from .chains import Chain, apportion, choose_chains, cut, rows_of_micro_batch, seconds_of, stages_of

T = TypeVar("T")

IDLE_SECONDS: Final = 20.0
"""For which a stream is kept for the next batch: less than a server waits before it ends it."""
WHOLE_SECONDS: Final = 30.0
"""For which no request is begun without its gradient after one was given up."""
BACKWARD_COST: Final = 3.0
"""A backward pass computes the forward pass again and takes about twice as long itself."""


@dataclass(frozen=True)
class BatchPlan:
    """For each micro-batch its rows and its chain."""

    rows: list[int]
    chains: list[Chain]


@dataclass
class _Slot:
    """The stream to one server for one purpose. `users` are inside of `run`, or have begun a request.

    Nothing is begun there before `whole_until`: the server had no room for it.
    """

    lock: trio.Lock = field(default_factory=trio.Lock)
    stream: BatchStream | None = None
    users: int = 0
    used: float = 0.0
    whole_until: float = -inf

    def leave(self) -> None:
        self.users -= 1
        self.used = trio.current_time()


@dataclass(frozen=True)
class StartedBackward:
    """A backward request that has gone out without its gradient. `run` finishes it, else `abandon` must."""

    stream: BatchStream
    sent: PendingBatch
    slot: _Slot

    async def abandon(self) -> None:
        """Does nothing if `run` was given it."""
        if self.sent.begun:
            self.slot.leave()
            await self.stream.abandon(self.sent)


class BatchClient:
    """Runs batch requests at servers over streams that are kept between batches; one per client."""

    def __init__(self, client: Router) -> None:
        self._client = client
        self._slots: dict[tuple[BatchProtocol, Hop, BatchSpec], _Slot] = {}
        self._no_gradients: dict[str, ServerFailed] = {}
        self.speeds: dict[str, Estimate] = {}
        """Seconds of a token in a block, by peer: as its replies say, before the first one as it announces."""

    async def plan(
        self, span: Span, batch: int, tokens: int, token_bytes: int, *, gradients: bool, wait: bool
    ) -> BatchPlan:
        """How a batch of `batch` rows of `tokens` tokens goes through the blocks of `span`.

        With `gradients`, servers that give none are left out.

        Raises:
            NoChainError: no chain covers the span; `missing` and the text name the blocks.
        """

        def choose(candidates: Mapping[str, RouteCandidate]) -> BatchPlan:
            chains = choose_chains(
                list(candidates.values()),
                span,
                tokens=tokens * rows_of_micro_batch(batch, tokens, 1),
                token_bytes=token_bytes,
                length=tokens,
                model_name=self._client.model.name,
            )
            servers = {hop.peer_id for chain in chains for hop in chain}
            for peer_id in servers:
                self.speeds.setdefault(peer_id, Estimate(value=seconds_of(candidates[peer_id])))
            most = rows_of_micro_batch(batch, tokens, len(servers))
            stages = [
                stages_of(chain, candidates, self.speeds, tokens=most * tokens, token_bytes=token_bytes)
                for chain in chains
            ]
            rows = cut(batch, most)
            return BatchPlan(rows, [chains[number] for number in apportion(len(rows), stages)])

        self._forget_idle()
        excluded = self._no_gradients if gradients else {}
        return await self._found(choose, excluded, trio.current_time() + DEADLINES.reopen, wait)

    async def instead(
        self, span: Span, failures: Mapping[str, ServerFailed], *, backward: bool, wait: bool, since: float
    ) -> Chain:
        """Servers for `span` other than those that failed, the first of them at `since`.

        Raises:
            NoChainError: nobody else holds these blocks; the text says who failed how.
        """
        excluded = {**self._no_gradients, **failures} if backward else failures
        return await self._found(
            lambda candidates: cheapest_chain(list(candidates.values()), span, model_name=self._client.model.name),
            excluded,
            since + DEADLINES.recovery,
            wait,
        )

    async def _found(
        self,
        choose: Callable[[Mapping[str, RouteCandidate]], T],
        excluded: Mapping[str, ServerFailed],
        until: float,
        wait: bool,
    ) -> T:
        """What `choose` makes of the candidates, after asking the swarm anew where it finds no chain.

        Servers come and go: if one was lost, they are looked for until `until`; with `wait`, for ever.
        """
        search = ServerSearch(
            self._client,
            excluded,
            until=until,
            wait=wait,
            lost=any(map(_may_be_back, excluded.values())),
            ask_again=_may_be_back,
        )
        while True:
            candidates = await self._client.candidates(search.refused)
            try:
                return choose({candidate.peer_id: candidate for candidate in candidates})
            except NoChainError as error:
                await search.found_nobody(self._client.explained(error, bool(candidates) or bool(excluded)))

    async def begin(
        self, hop: Hop, spec: BatchSpec, request: MicroBatch, timeout: float | None
    ) -> StartedBackward | None:
        """Sends a backward request without its gradient, so that the server computes forward in the meantime.

        Of the gradient in `request` only the description is used. None if the server cannot have it so; what is wrong
        with it will show when the whole request is run.
        """
        slot = self._slots.setdefault((BACKWARD, hop, spec), _Slot())
        if trio.current_time() < slot.whole_until:
            return None
        slot.users += 1
        try:
            async with slot.lock:
                stream = slot.stream = await self._usable(slot, BACKWARD, hop, spec)
            if stream.takes_gradients_later:
                sent = await stream.begin(request, timeout or self._patience(hop, request, BACKWARD))
                return StartedBackward(stream, sent, slot)
        except (ServerFailed, StreamBroken):
            pass
        except BaseException:
            slot.leave()
            raise
        slot.leave()
        return None

    async def run(
        self,
        protocol: BatchProtocol,
        hop: Hop,
        spec: BatchSpec,
        request: MicroBatch,
        timeout: float | None,
        begun: StartedBackward | None = None,
    ) -> list[WireTensor]:
        """One request to the server of `hop`: the checked tensors of its reply. `begun` is it without its gradient.

        Raises:
            ServerFailed: the server is gone, silent, refuses or cheats.
        """
        slot = self._slots.setdefault((protocol, hop, spec), _Slot())
        slot.users += begun is None
        patience = timeout or self._patience(hop, request, protocol)
        try:
            while True:
                sent = trio.current_time()
                try:
                    if begun is not None:
                        reply = await begun.stream.finish(begun.sent, request, patience)
                    else:
                        async with slot.lock:
                            stream = slot.stream = await self._usable(slot, protocol, hop, spec)
                        reply = await stream.run(request, patience)
                except StreamBroken:
                    # By another request of ours, or because there was no room for what was begun: nobody is to blame.
                    if begun is not None:
                        slot.whole_until = trio.current_time() + WHOLE_SECONDS
                    begun = None
                    continue
                self._learn(protocol, hop, min(reply.compute, trio.current_time() - sent), request)
                self._client.note_tokens(hop.peer_id, _block_tokens(hop, request) // len(hop.span))
                return reply.tensors
        except ServerFailed as error:
            self._note(error, protocol)
            raise
        finally:
            slot.leave()

    async def _usable(self, slot: _Slot, protocol: BatchProtocol, hop: Hop, spec: BatchSpec) -> BatchStream:
        if slot.stream is not None and not slot.stream.broken:
            if slot.users > 1 or trio.current_time() < slot.used + IDLE_SECONDS:
                return slot.stream
            await slot.stream.close()
        client = self._client
        frames, claims = await client.batch_stream(hop, protocol), client.claims_of(hop.peer_id)
        stream = BatchStream(frames, hop, spec, client.peer_id, protocol, claims=claims, archive=client.receipts)
        await stream.open()
        return stream

    def _forget_idle(self) -> None:
        for key, slot in list(self._slots.items()):
            if not slot.users and trio.current_time() > slot.used + IDLE_SECONDS:
                del self._slots[key]
                if slot.stream is not None:
                    self._client.start_soon(slot.stream.close)

    def _note(self, error: ServerFailed, protocol: BatchProtocol) -> None:
        """Lets others be preferred to a server that failed; what it refuses says nothing of what else it can do."""
        if has_code(error, wire.ERROR_UNSUPPORTED) and protocol == BACKWARD:
            self._no_gradients[error.peer_id] = error
        elif not isinstance(error, ServerRefused) or has_code(error, wire.ERROR_INTERNAL, wire.ERROR_NOT_ALLOWED):
            note_failure(self._client, error)

    def _patience(self, hop: Hop, request: MicroBatch, protocol: BatchProtocol) -> float:
        cost = BACKWARD_COST if protocol == BACKWARD else 1.0
        return batch_patience(self.speeds.get(hop.peer_id, Estimate()).value * _block_tokens(hop, request) * cost)

    def _learn(self, protocol: BatchProtocol, hop: Hop, computed: float, request: MicroBatch) -> None:
        """`computed`: seconds as the server says, and no more than it took: its answers are waited for accordingly."""
        if protocol != BACKWARD:
            # What a server announces may have been measured under another load: the first reply knows better.
            self.speeds.setdefault(hop.peer_id, Estimate()).note(computed / _block_tokens(hop, request))


def _block_tokens(hop: Hop, request: MicroBatch) -> int:
    rows, tokens = request.message.tensors[0].shape[:2]
    return len(hop.span) * rows * tokens


def _may_be_back(error: ServerFailed) -> bool:
    """Whether to ask again: a server that is gone may be replaced, and one that is busy gets free."""
    return is_lost(error) or has_code(error, wire.ERROR_BUSY)
