"""Which model version is meant where several fit what is known of a model: asked for by servers and clients alike."""

from __future__ import annotations

import shlex
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ...protocols.announcement import Announcement
from ..errors import ModelError
from ..models import ModelFolder
from ..trust.store import TrustStore
from .view import SwarmView


@dataclass(frozen=True)
class VersionLimits:
    """How many versions of a model, and servers of each, are asked for a manifest."""

    asked: int = 64  # Versions of one model whose manifests are asked for
    servers_asked: int = 3  # of each
    digits: int = 16  # of a version, in what a person is to type
    named: int = 8  # versions in an error


VERSIONS: Final = VersionLimits()


class SeveralVersions(ModelError):
    """A person has to say which version of a model is meant: one of those that `servers` announce."""

    def __init__(self, message: str, name: str, servers: Sequence[Announcement]) -> None:
        super().__init__(message)
        self.name = name
        self.servers = servers


def versions_named(
    servers: Iterable[Announcement],
    name: str,
    num_blocks: int,
    pinned: str = "",
    *,
    proven: Collection[str] = (),
) -> list[Announcement]:
    """The servers of a model of this name in the versions that begin with the hexadecimal digits `pinned`.

    Where these are more versions than are asked for, only those that have a `proven` server. No other one could be
    taken beside them (`most_proven`).

    Raises:
        ModelError: there are too many versions, and none is proven: the one that is meant could be left out.
    """
    named = [
        server
        for server in servers
        if (server.model_name, server.num_blocks) == (name, num_blocks)
        and server.model_version.hex().startswith(pinned)
    ]
    versions = {server.model_version for server in named}
    if len(versions) > VERSIONS.asked:
        served = {server.model_version for server in named if server.peer_id in proven}
        if not 0 < len(served) <= VERSIONS.asked:
            raise several_versions(name, named)
        named = [server for server in named if server.model_version in served]
    return named


def manifests_to_ask(
    servers: Iterable[Announcement], *, connected: Collection[str], proven: Collection[str] = ()
) -> list[list[Announcement]]:
    """Whom to ask for manifests: some servers of each version. Versions with most `proven` servers come first, then
    those with a server that this node is connected to. Then come those of most servers: to announce some that nobody
    can reach costs nothing."""
    versions: dict[bytes, list[Announcement]] = {}
    for server in sorted(servers, key=lambda server: (server.peer_id not in proven, server.peer_id not in connected)):
        versions.setdefault(server.model_version, []).append(server)

    ranked = sorted(
        versions.values(),
        key=lambda known: (
            -sum(server.peer_id in proven for server in known),
            not any(server.peer_id in connected for server in known),
            -len(known),
        ),
    )
    return [known[: VERSIONS.servers_asked] for known in ranked[: VERSIONS.asked]]


def most_proven(fitting: Collection[bytes], proven: Mapping[bytes, int]) -> bytes | None:
    """The only version that fits; of several the one of most proven servers (version -> how many); else None."""
    ranked = sorted(fitting, key=lambda version: -proven.get(version, 0))
    if len(ranked) > 1 and proven.get(ranked[0], 0) == proven.get(ranked[1], 0):
        return None
    return ranked[0] if ranked else None


def used_before(model: ModelFolder, weights: bytes, view: SwarmView, trust: TrustStore) -> bytes | None:
    """The version that this node has used with these weights the last time (`TrustStore.note_version`). If somebody
    serves it and the person has asked for no other, it is meant, whatever else is announced."""
    used = None if model.pinned else trust.version_used(weights)
    return used if used is not None and view.servers(used, now=time.time()) else None


def choose_version(
    model: ModelFolder, fitting: Collection[bytes], view: SwarmView, trust: TrustStore, weights: bytes | None = None
) -> bytes:
    """The version that is meant by this model, of those that fit the weights here: as `most_proven` has it.

    Anybody can announce a version that fits, so neither the number of its servers nor their order says anything. A
    server that has computed for this node before does, unless nobody serves the version that was used with these
    `weights` (as for `used_before`): who has served that one may announce another.

    Raises:
        ModelError: several, or others than the one that was used, which it names.
    """
    used = None if model.pinned or weights is None else trust.version_used(weights)
    if used is not None and used not in fitting:
        raise other_version(model, used, fitting)
    now = time.time()
    servers = {version: view.servers(version, now=now) for version in fitting}
    proven = {version: sum(trust.is_proven(server.peer_id) for server in theirs) for version, theirs in servers.items()}
    chosen = most_proven(fitting, proven)
    if chosen is not None:
        return chosen
    raise several_versions(model.asked or model.name, [server for theirs in servers.values() for server in theirs])


def several_versions(name: str, servers: Sequence[Announcement]) -> SeveralVersions:
    """What a person is told who has to say which version of these servers' is meant by `name`."""
    fitting = {server.model_version for server in servers}
    return SeveralVersions(
        f"servers announce several versions of {name} that may be meant. Give the one that you mean in place of "
        f"{name}: {_as_typed(name, fitting)}. Who gave you the address of the swarm knows which (`petalnode serve` "
        "prints it); once it has computed for you, it is remembered",
        name,
        servers,
    )


def other_version(model: ModelFolder, used: bytes, fitting: Collection[bytes]) -> ModelError:
    """What a person is told when the version that was used before is not served, and others are."""
    name = model.asked or model.name
    return ModelError(
        f"nobody serves the version of {name} that you have used before, {used.hex()[: VERSIONS.digits]}. "
        "Servers announce "
        f"what has the same embeddings and head and may be anything else: if you mean that, give it in place of "
        f"{name}: {_as_typed(name, fitting)}"
    )


def _as_typed(name: str, versions: Collection[bytes]) -> str:
    """What a person may give in place of MODEL."""
    typed = [shlex.quote(f"{name}@{version.hex()[: VERSIONS.digits]}") for version in sorted(versions)]
    more = f" and {len(typed) - VERSIONS.named} more" if len(typed) > VERSIONS.named else ""
    return f"{', '.join(typed[: VERSIONS.named])}{more}"
