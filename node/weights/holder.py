"""Hands on what this node holds of a model version: `/petalnode/weights/1`.

Only parts whose pieces were hashed here before are offered, so that no question costs reading a model. Once their file
has another time, each piece is compared with its hash before it goes: a file that changed makes nobody a liar.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal, TypeAlias

import trio

from ...protocols import wire_pb2 as wire
from ...protocols.weights import (
    PIECE_BYTES,
    TEXT_FORM,
    WEIGHTS,
    WEIGHTS_LIMITS,
    Offer,
    Tree,
    TreeEntry,
    WeightsStream,
    check_question,
    count_pieces,
)
from ..errors import ModelError
from ..models import Manifest, ModelFolder
from ..models.checkpoint import Checkpoint
from ..models.digests import PartReader, cache_stamp, known_trees
from ..models.folder import TEXT_FILES
from ..models.parts import Part, parts_of_need
from ..models.sources.hub import is_for_everybody
from ..models.sources.hub_parts import RESTRICTED
from ..network.transport.bandwidth import Throttle
from ..network.transport.places import Place, Places
from ..swarm.swarm import Swarm
from .store import MAX_TEXT_BYTES, is_text_file, number_of_part, stored_trees

_GENERATION: Final = "generation_config.json"
_NO_TOKENIZER: Final = (_GENERATION, "chat_template*")
_TOKENS: Final = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass(frozen=True)
class HoldingPolicy:
    """How a node shares what it hands on."""

    places: int = 32
    """Streams at once; each holds a piece in memory at most."""
    idle: float = 60.0
    """Seconds without a question, after which a stream is closed."""
    send: float = 30.0
    """Seconds in which a peer has to take a piece: half of what 64 kB a second take."""
    rate: float = 1 << 30
    """Bytes a second for all, in turns by address; `--max-upload` is below that."""
    beside_sessions: float = 1 << 20
    """The same while peers use sessions or batches here: those come first."""
    look_again: float = 0.5
    """Seconds for which an offer is remembered."""
    readers: int = 2
    """Threads that read pieces from the disk."""


HOLDING: Final = HoldingPolicy()


class _Texts:
    """The tokenizer's files of a folder, one behind the other."""

    is_unchanged = True

    def __init__(self, files: Mapping[str, bytes]) -> None:
        names = sorted(files)
        self.data = b"".join(files[name] for name in names)
        pieces = range(count_pieces(len(self.data)))
        entries = tuple(TreeEntry(name, "", (), len(files[name])) for name in names)
        self.tree = Tree(TEXT_FORM, entries, b"".join(hashlib.sha256(self.read(piece)).digest() for piece in pieces))

    def read(self, piece: int) -> bytes:
        return self.data[piece * PIECE_BYTES : (piece + 1) * PIECE_BYTES]


def read_texts(folder: ModelFolder) -> _Texts | None:
    """The tokenizer's files that a client needs, and the special tokens; None if there is no tokenizer.

    Raises:
        OSError: they cannot be read.
    """
    files: dict[str, bytes] = {}
    for pattern in TEXT_FILES:
        for file in folder.path.glob(pattern) if "/" not in pattern else ():
            if file.is_file() and is_text_file(file.name, file.stat().st_size):
                files[file.name] = file.read_bytes()
    if all(any(Path(name).match(other) for other in _NO_TOKENIZER) for name in files):
        return None
    if _GENERATION not in files:
        ids = {name: folder.config[name] for name in _TOKENS if folder.config.get(name) is not None}
        files[_GENERATION] = json.dumps(ids, sort_keys=True).encode()
    return _Texts(files) if sum(map(len, files.values())) <= MAX_TEXT_BYTES else None


Share: TypeAlias = Literal["auto", "on", "off"]


def may_hand_on(folder: ModelFolder) -> bool:
    """Whether nothing speaks against handing a model on: it is no hub's, or the hub gives it to everybody. It may not
    have come from a peer that was told to hand it on nevertheless."""
    return is_for_everybody(folder) and not (folder.path / RESTRICTED).exists()


def hand_on(swarm: Swarm, manifest: Manifest, folder: ModelFolder, share: Share) -> None:
    """Serves what is here of a model from now on, if its owner wants that."""
    usual = may_hand_on(folder)
    if share == "on" or (share == "auto" and usual):
        WeightsHolder(swarm, manifest, folder, restricted=not usual).start()


class WeightsHolder:
    """Answers what peers ask of one model version, of which `folder` holds parts. `restricted`: see `Offer`."""

    def __init__(self, swarm: Swarm, manifest: Manifest, folder: ModelFolder, *, restricted: bool = False) -> None:
        self._swarm = swarm
        self._manifest = manifest
        self._folder = folder
        self._restricted = restricted
        self._places = Places(HOLDING.places)
        self._readers = trio.CapacityLimiter(HOLDING.readers)
        self._looking = trio.Lock()
        self._looked = -float("inf")
        self._seen: list[int] | None = None
        self._offer = Offer(frozenset())
        self._trees: dict[int, Tree] = {}
        self._sources: dict[int, PartReader | _Texts] = {}
        self._texts: _Texts | None = None
        self._throttle = Throttle(HOLDING.rate)

    @property
    def taken(self) -> int:
        """Places that are taken."""
        return len(self._places)

    def start(self) -> None:
        """Serves from now on, as long as the swarm is open."""
        self._swarm.set_handler(WEIGHTS, self.serve, max_streams=2 * HOLDING.places)

    async def serve(self, stream: WeightsStream) -> None:
        """Answers the questions of one stream until it ends (raises PeerError then)."""
        stream.max_header = WEIGHTS_LIMITS.question
        origin = self._swarm.host.origin_of(stream.peer_id)
        with self._places.take(stream.peer_id, origin) as place:
            if place is None:
                await self._refuse(stream, wire.ERROR_BUSY, "all places are taken")
                return
            while True:
                frame, _ = await stream.receive(timeout=HOLDING.idle, admit=check_question)
                await self._answer(stream, frame, place)

    async def _answer(self, stream: WeightsStream, frame: wire.WeightsFrame, place: Place) -> None:
        body = frame.WhichOneof("body")
        if body not in ("query", "tree_query", "piece_query"):
            await self._refuse(stream, wire.ERROR_BAD_REQUEST, "this is no question")
            return
        asked = getattr(frame, body)
        await self._look()
        if asked.model_version != self._manifest.version:
            await self._refuse(stream, wire.ERROR_NOT_FOUND, "this model version is not here")
        elif body == "query":
            await stream.send(wire.WeightsFrame(offer=self._offer.to_wire()), timeout=HOLDING.send)
        elif asked.part not in self._trees:
            await self._refuse(stream, wire.ERROR_NOT_FOUND, "this part is not here")
        elif body == "tree_query":
            tree = self._trees[asked.part].to_wire()
            with place.working():
                await self._turn(place, tree.ByteSize())
            await stream.send(wire.WeightsFrame(tree=tree), timeout=HOLDING.send)
        else:
            await self._send_piece(stream, asked.part, asked.piece, place)

    async def _send_piece(self, stream: WeightsStream, part: int, piece: int, place: Place) -> None:
        tree, source = self._trees[part], self._sources.get(part)
        if source is None or piece >= len(tree):
            await self._refuse(stream, wire.ERROR_NOT_FOUND, "this piece is not here")
            return
        with place.working():  # not while the peer is to take it: one that is slow gives its place to others
            await self._turn(place, tree.size_of(piece))
            data = await trio.to_thread.run_sync(_read, source, tree, piece, limiter=self._readers)
        if data is None:
            self._sources.pop(part, None)
            self._offer = replace(self._offer, parts=self._offer.parts - {part})
            await self._refuse(stream, wire.ERROR_NOT_FOUND, "this piece is not here any more")
            return
        answer = wire.WeightsFrame(piece=wire.WeightsPiece(), tensors=[wire.Tensor(nbytes=len(data))])
        await stream.send(answer, [data], timeout=HOLDING.send)

    async def _turn(self, place: Place, nbytes: int) -> None:
        """Waits until `nbytes` bytes may go to the one that has the place."""
        self._throttle.set_rate(HOLDING.beside_sessions if self._swarm.host.is_serving else HOLDING.rate)
        await self._throttle.turn(place.origin)
        self._throttle.spend(nbytes)

    async def _refuse(self, stream: WeightsStream, code: wire.ErrorCode.ValueType, why: str) -> None:
        await stream.send(wire.WeightsFrame(error=wire.Error(code=code, message=why)), timeout=HOLDING.send)

    async def _look(self) -> None:
        """Sees what is here by now, if that was not seen lately."""
        if trio.current_time() - self._looked < HOLDING.look_again:
            return  # without a turn of the loop for the lock
        async with self._looking:
            if trio.current_time() - self._looked >= HOLDING.look_again:
                await trio.to_thread.run_sync(self._find, limiter=self._readers)
                self._looked = trio.current_time()

    def _find(self) -> None:
        num_blocks = len(self._manifest.blocks)
        try:
            seen = cache_stamp(self._folder.path)
            if seen == self._seen:
                return
            self._seen = seen
            checkpoint = Checkpoint(self._folder.path, num_blocks)
        except (ModelError, OSError):
            return
        sources: dict[int, PartReader | _Texts] = {}
        trees = stored_trees(self._folder, self._manifest)
        parts = parts_of_need("all", num_blocks)
        readers = {part: reader for part in parts if (reader := _reader(checkpoint, part)) is not None}
        for part, tree in known_trees(checkpoint, readers).items():  # of files as they are since `readers` were made
            if tree.digest == self._manifest.digest_of(part):
                number = number_of_part(part, num_blocks)
                trees[number], sources[number] = tree, readers[part]
        try:
            self._texts = self._texts or read_texts(self._folder)
        except OSError:
            self._texts = None
        if self._texts is not None:
            trees[num_blocks + 2], sources[num_blocks + 2] = self._texts.tree, self._texts
        layout = checkpoint.layout
        self._offer = Offer(
            frozenset(sources),
            layout.blocks,
            layout.base,
            bare_names(checkpoint),
            b"" if self._texts is None else self._texts.tree.digest,
            self._restricted,
        )
        self._trees, self._sources = trees, sources


def bare_names(checkpoint: Checkpoint) -> tuple[str, ...]:
    """What `WeightsOffer.bare` says of the checkpoint."""
    ends = (*checkpoint.parts["embeddings"], *checkpoint.parts["head"])
    bare = {key for key in ends if not key.startswith(checkpoint.layout.base)}
    if len(bare) > WEIGHTS_LIMITS.max_bare:
        bare = {key.partition(".")[0] + "." for key in bare}
    return tuple(sorted(bare))


def _read(source: PartReader | _Texts, tree: Tree, piece: int) -> bytes | bytearray | None:
    """The bytes of a piece; None if they are others by now."""
    try:
        data = source.read(piece)
    except ModelError:
        return None
    return data if source.is_unchanged or tree.has(piece, data) else None


def _reader(checkpoint: Checkpoint, part: Part) -> PartReader | None:
    """None if the part is not here."""
    with suppress(ModelError, OSError):
        return PartReader(checkpoint, part)
    return None
