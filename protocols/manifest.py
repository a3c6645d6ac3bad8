"""/petalnode/manifest/1: asks a peer for the manifest of a model version, the digests that make the version.

Who receives one checks that its version is the one asked for: the manifest's own hash says so.
"""

from __future__ import annotations

from typing import Final

from . import wire_pb2 as wire
from .framing import MessageStream, ProtocolError

MAX_HEADER: Final = 1024 * 1024  # bytes: 4096 blocks take 140 KB, and the configuration a few


async def ask_manifest(
    stream: MessageStream[wire.ManifestFrame], model_version: bytes, *, timeout: float
) -> wire.Manifest | None:
    """The manifest of `model_version` (32 bytes), not yet checked; None if the peer has none.

    Raises:
        PeerError: no answer, or none that fits.
    """
    query = wire.ManifestFrame(query=wire.ManifestQuery(model_version=model_version))
    await stream.send(query, timeout=timeout)
    reply, _ = await stream.receive(timeout=timeout)
    if reply.WhichOneof("body") == "manifest":
        return reply.manifest
    if reply.WhichOneof("body") == "error" and reply.error.code == wire.ERROR_NOT_FOUND:
        return None
    raise ProtocolError(f"{stream.peer_id} answered no manifest: {reply.error.message[:200]}", stream.peer_id)


async def answer_manifests(
    stream: MessageStream[wire.ManifestFrame], manifests: dict[bytes, wire.Manifest], *, timeout: float
) -> None:
    """Answers the queries of one stream until it ends (raises PeerError then)."""
    while True:
        frame, _ = await stream.receive(timeout=timeout)
        manifest = manifests.get(frame.query.model_version)
        if manifest is not None:
            await stream.send(wire.ManifestFrame(manifest=manifest), timeout=timeout)
        else:
            error = wire.Error(code=wire.ERROR_NOT_FOUND, message="no manifest of this model version here")
            await stream.send(wire.ManifestFrame(error=error), timeout=timeout)
