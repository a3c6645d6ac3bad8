"""A model that the swarm has and this machine may lack: which version is meant, what it needs, and fetching that.

The version stands for the architecture and all weights, so these need nobody's word. It does not stand for the
tokenizer, the chat template and the names of tensors in a checkpoint: `trusted_offer` says whose word is taken for
them.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Hashable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeVar

import trio

from ...protocols.announcement import Announcement
from ...protocols.framing import PeerError, ProtocolError
from ...protocols.weights import BadTree, Offer, Tree, ask_piece, ask_trees, receive_piece
from ..errors import ModelError, SwarmError
from ..models import Manifest, ModelFolder, Need, Progress, split_version
from ..models.cache_dir import imported_folder
from ..models.disk_limit import keep_within, note_use
from ..swarm.swarm import Swarm
from ..swarm.versions import most_proven, several_versions
from .fetching import FETCHING, Fetch, offer_of, open_weights, ranked
from .store import PeerFolder, check_texts, part_of_number

_AGREEING: Final = 2
"""Addresses that have to hand on the same tokenizer where nothing is known of any peer: one alone is not believed."""
_OFFERS: Final = 32  # peers that are asked what they hold, before anything is fetched
T = TypeVar("T", bound=Hashable)
A = TypeVar("A")


class NotServed(SwarmError):
    """No server of the swarm has a model of this name."""


def meant_version(
    servers: Collection[Announcement], name: str, pinned: str, named: Collection[str], proven: Collection[str]
) -> bytes | None:
    """The version of the model `name` that is meant, where nothing of it is on this machine; None if nobody serves it.

    The only one; else the only one of the peers that the person has named; else that of most servers that have computed
    for this node before.

    Raises:
        ModelError: several are served, and nothing of that tells which.
    """
    fitting = [one for one in servers if one.model_name == name and one.model_version.hex().startswith(pinned)]
    for group in (fitting, [server for server in fitting if server.peer_id in named]):
        versions = {server.model_version for server in group}
        if len(versions) == 1:
            return versions.pop()
    if not fitting:
        return None
    counts = Counter(server.model_version for server in fitting if server.peer_id in proven)
    chosen = most_proven({server.model_version for server in fitting}, counts)
    if chosen is None:
        raise several_versions(name, fitting)
    return chosen


def trusted_offer(
    offers: Mapping[str, Offer],
    what: Callable[[Offer], T],
    named: Collection[str],
    proven: Collection[str],
) -> Offer | None:
    """Of several offers that differ in `what`, for which only peers vouch, the one to go by; None if none is to be.

    It is that of the named peers, as far as they agree. Else it is that of peers that have computed for this node
    before, else of all. A number of peers says nothing: keys are free.
    """
    groups = (
        [offer for peer, offer in offers.items() if peer in named],
        [offer for peer, offer in offers.items() if peer in proven],
        list(offers.values()),
    )
    for group in groups:
        if group:
            return group[0] if len({what(offer) for offer in group}) == 1 else None
    return None


@dataclass(frozen=True)
class RemoteModel:
    """A model of the swarm, whose folder on this disk may have none, some or all of its parts."""

    swarm: Swarm
    name: str
    manifest: Manifest
    offers: Mapping[str, Offer]
    stored: PeerFolder
    pinned: str | None

    @property
    def version(self) -> bytes:
        return self.manifest.version

    @property
    def num_blocks(self) -> int:
        return len(self.manifest.blocks)

    def missing(self, need: Need) -> int:
        """Bytes of weights that `need` asks for and that are not on this disk."""
        return sum(self.stored.trees[number].nbytes for number in self.stored.lacking(need))

    async def fetch(self, need: Need, progress: Progress, *, max_disk: int | None = None) -> ModelFolder:
        """The folder, with the parts that `need` asks for; a client's and the whole model come with the tokenizer.

        What was fetched before is used, and a fetch that was cut goes on where it stopped.

        Raises:
            SwarmError: nobody hands on what is missing.
            ModelError: peers that nothing is known of hand on different tokenizers, or are at one address.
            MachineError: the disk is full or cannot be written.
        """
        if max_disk is not None:
            missing = self.missing(need)
            await trio.to_thread.run_sync(lambda: keep_within(max_disk - missing, [self.stored.path]))
        await trio.to_thread.run_sync(note_use, [self.stored.path])
        if need in ("client", "all") and not self.stored.has_texts:
            await self._fetch_texts()
        numbers = self.stored.lacking(need)
        if numbers:
            await Fetch(self.swarm, self.stored, progress).run(numbers)
        return replace(self.stored.model_folder(), pinned=self.pinned, asked=self.name)

    async def _fetch_texts(self) -> None:
        having = {peer: offer for peer, offer in self.offers.items() if offer.texts}
        named, proven = self.swarm.named, self.swarm.trust.proven_of(having)
        offer = trusted_offer(having, lambda offer: offer.texts, named, proven)
        if offer is None:
            if not having:
                raise SwarmError(
                    f"no peer hands on the tokenizer of {self.name}: whoever has the whole model does, with "
                    "`serve --share-weights on`"
                )
            raise ModelError(
                f"peers hand on different tokenizers of {self.name}, and nothing is known of any of them: join by the "
                f"address of the one that you trust (--peer): {', '.join(sorted(having)[:8])}"
            )
        texts = offer.texts
        agreed = [peer for peer, other in having.items() if other.texts == texts]
        known = any(peer in named or peer in proven for peer in having)
        if not known and len(_addresses(self.swarm, agreed)) < _AGREEING:
            raise ModelError(
                f"peers of one address alone hand on the tokenizer of {self.name}, which no version stands for, "
                "and nothing is known of them: join by the address of the one that you trust (--peer): "
                f"{', '.join(sorted(agreed)[:8])}"
            )
        found = await first_of(agreed, lambda peer: self._texts_of(peer, texts))
        if found is None:
            raise SwarmError(f"no peer hands on the tokenizer of {self.name} that was agreed on: try again")
        # Another process may hold its lock for as long as it likes; what is written then is whole.
        await trio.to_thread.run_sync(self.stored.write_texts, *found, abandon_on_cancel=True)

    async def _texts_of(self, peer: str, digest: bytes) -> tuple[Tree, bytes]:
        """Raises PeerError if the peer does not send the files that its digest stands for."""
        number, version = self.num_blocks + 2, self.version
        async with open_weights(self.swarm, peer) as stream:
            tree = (await ask_trees(stream, version, [(number, digest)], timeout=FETCHING.piece)).get(number)
            try:
                if tree is None:
                    raise BadTree("no tree of its tokenizer")
                check_texts(tree)
            except BadTree as error:
                raise ProtocolError(f"{peer} sent {error}", peer) from None
            data = bytearray()
            for piece in range(len(tree)):
                await ask_piece(stream, version, number, piece, timeout=FETCHING.piece)
                came = await receive_piece(stream, timeout=FETCHING.piece)
                if came is None or not await trio.to_thread.run_sync(tree.has, piece, came):
                    raise ProtocolError(f"{peer} sent a false piece of its tokenizer", peer)
                data += came
        return tree, bytes(data)


def _addresses(swarm: Swarm, peers: Iterable[str]) -> set[str]:
    """Of those whose address is known: a key alone is none."""
    return {origin for peer in peers if (origin := swarm.host.origin_of(peer)) != peer}


async def first_of(peers: Iterable[str], ask: Callable[[str], Awaitable[A]]) -> A | None:
    """What the first of `peers` sends for which `ask` raises no PeerError; None if there is none. While one takes long,
    the next are asked, too: none is to gain by being slow."""
    found: list[A] = []
    async with trio.open_nursery() as nursery:

        async def attempt(peer: str, ended: trio.Event) -> None:
            with suppress(PeerError):
                found.append(await ask(peer))
                nursery.cancel_scope.cancel()
            ended.set()

        for peer in peers:
            ended = trio.Event()
            nursery.start_soon(attempt, peer, ended)
            with trio.move_on_after(FETCHING.open):
                await ended.wait()
    return found[0] if found else None


def may_be_remote(model: str) -> bool:
    """Whether a swarm may have a model of this name: it is no path."""
    named, _ = split_version(model)
    return not (named.startswith((".", "/", "~")) or Path(named).expanduser().exists())


async def find_remote_model(swarm: Swarm, model: str, progress: Progress) -> RemoteModel:
    """The model that the swarm calls `model`, NAME or NAME@VERSION; prepares its folder on this disk.

    Raises:
        NotServed: nobody serves it.
        SwarmError: nobody hands it on.
        ModelError: several versions may be meant; or it is no model that can be used.
        MachineError: the disk is full or cannot be written.
    """
    name, pinned = split_version(model)
    with suppress(SwarmError):  # nobody answers just now; what was heard at joining has to do
        await swarm.refresh(sample=True, timeout=FETCHING.refresh)
    servers = swarm.view.servers(now=time.time())
    proven = swarm.trust.proven_of(server.peer_id for server in servers)
    version = meant_version(servers, name, pinned or "", swarm.named, proven)
    if version is None:
        kept = await trio.to_thread.run_sync(PeerFolder.kept, name, pinned or "")
        if len(kept) == 1:  # nobody serves what was fetched before: it may be all there
            return await _opened(swarm, name, kept[0], {}, pinned)
        served = sorted({server.model_name for server in servers})
        there = f"this swarm serves {', '.join(served[:8])}" if served else "this swarm serves nothing yet"
        asked = f"{name} in version {pinned}" if pinned else name
        raise NotServed(f"nobody serves {asked}: {there}")
    with suppress(SwarmError):
        await swarm.refresh(model_version=version, timeout=FETCHING.refresh)
    manifest = await _manifest(swarm, name, version)
    progress(f"Asking peers for {name}", 0, None)
    offers = await _offers(swarm, manifest)
    if not await trio.to_thread.run_sync(imported_folder(PeerFolder.key_of(manifest)).is_dir):
        await _prepare(swarm, name, manifest, offers, progress)
    return await _opened(swarm, name, manifest, offers, pinned)


async def find_instead(swarm: Swarm, model: str, progress: Progress, why: ModelError) -> RemoteModel:
    """What the swarm has of a model that is neither here nor, for the reason `why`, in a hub.

    Raises:
        ModelError: `why`, if no swarm can have a model of this name, or nobody serves it; else as `find_remote_model`.
        SwarmError, MachineError: as `find_remote_model`.
    """
    if not may_be_remote(model):
        raise why
    try:
        return await find_remote_model(swarm, model, progress)
    except NotServed as nobody:
        raise ModelError(f"{why} And {nobody}.") from None


async def _opened(
    swarm: Swarm, name: str, manifest: Manifest, offers: Mapping[str, Offer], pinned: str | None
) -> RemoteModel:
    path = imported_folder(PeerFolder.key_of(manifest))
    stored = await trio.to_thread.run_sync(PeerFolder.open, name, manifest, path)
    return RemoteModel(swarm, name, manifest, offers, stored, pinned)


async def _manifest(swarm: Swarm, name: str, version: bytes) -> Manifest:
    servers = swarm.view.servers(version, now=time.time())
    counts = sorted({server.num_blocks for server in servers})
    for num_blocks in counts:
        async for found, data in swarm.manifests(name, num_blocks, pinned=version.hex(), timeout=FETCHING.refresh):
            with suppress(ModelError):
                return Manifest.from_wire(data, found)
    raise SwarmError(f"no server of {name} answers: try again, or check --peer")


async def _offers(swarm: Swarm, manifest: Manifest) -> dict[str, Offer]:
    """What peers say that they hold, as `ranked`. All have their time: none is to gain by answering first."""
    peers = ranked(swarm, manifest.version)[:_OFFERS]
    found: dict[str, Offer] = {}

    async def ask(peer: str) -> None:
        offer = await offer_of(swarm, peer, manifest.version, len(manifest.blocks))
        if offer is not None:
            found[peer] = offer

    with trio.move_on_after(2 * FETCHING.refresh):
        async with trio.open_nursery() as nursery:
            for peer in peers:
                nursery.start_soon(ask, peer)
    return {peer: found[peer] for peer in peers if peer in found}


async def _prepare(
    swarm: Swarm, name: str, manifest: Manifest, offers: Mapping[str, Offer], progress: Progress
) -> None:
    offer = trusted_offer(offers, lambda offer: offer.naming, swarm.named, swarm.trust.proven_of(offers))
    if offer is None:
        if not offers:
            raise SwarmError(
                f"no peer hands on {name}: give a folder, a file or a hub id that has it, or have it shared "
                "(`serve --share-weights on`)"
            )
        raise ModelError(
            f"peers say different things of {name}, and nothing is known of any of them: join by the address of the "
            f"one that you trust (--peer): {', '.join(sorted(offers)[:8])}"
        )
    num_blocks = len(manifest.blocks)
    trees: dict[int, Tree] = {}

    async def ask(peer: str) -> bool:
        async with open_weights(swarm, peer) as stream:
            for number in range(num_blocks + 2):
                if number not in trees:  # another peer may have sent it meanwhile
                    wanted = [(number, manifest.digest_of(part_of_number(number, num_blocks)))]
                    trees.update(await ask_trees(stream, manifest.version, wanted, timeout=FETCHING.open))
        if len(trees) < num_blocks + 2:
            raise PeerError(f"{peer} lacks parts of {name}", peer)
        return True

    if not await first_of(offers, ask):
        raise SwarmError(f"no peer tells what {name} is made of; whoever has the whole model does")
    await trio.to_thread.run_sync(PeerFolder.create, name, manifest, trees, offer, progress)
