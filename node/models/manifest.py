"""The model version, and the manifest that it is the hash of.

A manifest holds the canonical architecture and one digest for the embeddings, for each block, and for norm
and head (see `architecture` and `digests` for what goes into them). It is a few kilobytes, is made by whoever
has the whole model, and lets a node that holds a part of the model check that part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from ...crypto.canonical import digest
from ...protocols.wire_pb2 import Manifest as WireManifest
from ..errors import ModelError
from .architecture import canonical_architecture
from .checkpoint import Checkpoint
from .digests import part_digests
from .folder import MAX_BLOCKS, ModelFolder
from .parts import EMBEDDINGS, HEAD, Need, Part, describe, parts_of_need
from .progress import Progress, no_progress

_DOMAIN = "petalnode/model/1"
_DIGEST_BYTES = 32
MAX_CONFIG_BYTES = 256 << 10
MAX_WIRE_BYTES = MAX_CONFIG_BYTES + (MAX_BLOCKS + 2) * (_DIGEST_BYTES + 8) + 64


@dataclass(frozen=True)
class Manifest:
    """What a model version is the hash of.

    Attributes:
        config: canonical JSON of the architecture.
        embeddings, head: 32-byte digests.
        blocks: one 32-byte digest per transformer block.

    Raises:
        ModelError: if a size is out of range: manifests come from peers, too.
    """

    config: bytes
    embeddings: bytes
    blocks: tuple[bytes, ...]
    head: bytes

    def __post_init__(self) -> None:
        if not 0 < len(self.config) <= MAX_CONFIG_BYTES:
            raise ModelError(f"A manifest's configuration of {len(self.config)} bytes is out of range.")
        if not 1 <= len(self.blocks) <= MAX_BLOCKS:
            raise ModelError(f"A manifest of {len(self.blocks)} blocks is out of range (1 to {MAX_BLOCKS}).")
        if any(len(each) != _DIGEST_BYTES for each in (self.embeddings, self.head, *self.blocks)):
            raise ModelError("A manifest's digest is not 32 bytes long.")

    @cached_property
    def version(self) -> bytes:
        """The model version: 32 bytes."""
        return digest(_DOMAIN, self.config, self.embeddings, list(self.blocks), self.head)

    def digest_of(self, part: Part) -> bytes:
        if part == EMBEDDINGS:
            return self.embeddings
        return self.head if part == HEAD else self.blocks[part]

    def to_wire(self) -> bytes:
        """A serialised `wire.proto` Manifest, at most `MAX_WIRE_BYTES` long."""
        return WireManifest(
            config=self.config, embeddings=self.embeddings, blocks=self.blocks, head=self.head
        ).SerializeToString(deterministic=True)

    @classmethod
    def from_wire(cls, data: bytes, version: bytes | None = None) -> Manifest:
        """Reads what `to_wire` wrote. `data` is not trusted.

        Args:
            version: the model version that it must be the manifest of, if known.

        Raises:
            ModelError: if it is malformed, too large, or the manifest of another version.
        """
        if len(data) > MAX_WIRE_BYTES:
            raise ModelError(f"A manifest of {len(data)} bytes is out of range.")
        message = WireManifest()
        try:
            message.ParseFromString(data)
        except Exception as error:  # protobuf's DecodeError derives from Exception alone
            raise ModelError("A manifest that cannot be read.") from error
        manifest = cls(message.config, message.embeddings, tuple(message.blocks), message.head)
        if version is not None and manifest.version != version:
            raise ModelError(
                f"The manifest is that of model version {manifest.version.hex()[:12]}, not of {version.hex()[:12]}."
            )
        return manifest


def compute_manifest(folder: ModelFolder, progress: Progress = no_progress) -> Manifest:
    """The manifest of a model that is on this disk as a whole. Reads all of it once; later calls are quick.

    Raises:
        ModelError: if a part is missing, truncated or malformed; names the file.
    """
    checkpoint = Checkpoint(folder.path, folder.num_blocks)
    parts = parts_of_need("all", folder.num_blocks)
    digests = part_digests(checkpoint, parts, progress, f"Checking {folder.name}")
    return Manifest(
        config=canonical_architecture(folder.config),
        embeddings=digests[EMBEDDINGS],
        blocks=tuple(digests[block] for block in range(folder.num_blocks)),
        head=digests[HEAD],
    )


def verify_part(folder: ModelFolder, manifest: Manifest, need: Need, progress: Progress = no_progress) -> None:
    """Checks that the parts of `folder` that `need` asks for are those of `manifest`; reads only them, and once.

    Raises:
        ModelError: if they are not: names the block or part that differs.
    """
    if canonical_architecture(folder.config) != manifest.config:
        raise ModelError(
            f"{folder.path / 'config.json'} describes another architecture than the swarm's model "
            f"{manifest.version.hex()[:12]} has. Use the folder or revision that the swarm was started with."
        )
    checkpoint = Checkpoint(folder.path, folder.num_blocks)
    parts = parts_of_need(need, folder.num_blocks)
    digests = part_digests(checkpoint, parts, progress, f"Checking {folder.name}")
    differing = [part for part, found in digests.items() if found != manifest.digest_of(part)]
    if differing:
        raise ModelError(
            f"The weights in {folder.path} are not those of the swarm's model {manifest.version.hex()[:12]}: "
            f"{_listed(differing)} {'differs' if len(differing) == 1 else 'differ'}. Use the folder or "
            "revision that the swarm was started with, or copy the model again."
        )


def _listed(parts: Iterable[Part]) -> str:
    names = [describe(part) for part in parts]
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:6])} and {len(names) - 6} more parts"
