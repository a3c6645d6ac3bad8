"""Which model version is meant where several fit what is known of a model: asked for by servers and clients alike."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping
from typing import Final

from ...protocols.announcement import Announcement
from ..errors import ModelError
from ..trust.store import TrustStore
from .view import SwarmView

VERSIONS_ASKED: Final = 64
"""Versions of one model whose manifests are asked for."""
_SERVERS_ASKED: Final = 3  # of each
_DIGITS: Final = 16  # of a version, in what a person is to type
_NAMED: Final = 8  # versions in an error


def versions_named(servers: Iterable[Announcement], name: str, num_blocks: int, pinned: str = "") -> list[Announcement]:
    """The servers of a model of this name in the versions that begin with the hexadecimal digits `pinned`.

    Raises:
        ModelError: they have more versions than are asked for, so that the one that is meant could be left out.
    """
    named = [
        server
        for server in servers
        if (server.model_name, server.num_blocks) == (name, num_blocks)
        and server.model_version.hex().startswith(pinned)
    ]
    versions = {server.model_version for server in named}
    if len(versions) > VERSIONS_ASKED:
        raise several_versions(name, versions)
    return named


def manifests_to_ask(
    servers: Iterable[Announcement], *, connected: Collection[str], proven: Collection[str] = ()
) -> list[list[Announcement]]:
    """Whom to ask for manifests: of each version some servers; first the versions with most `proven` servers, then
    those with one that this node has a connection to, then those of most servers. Servers that nobody can reach cost
    nothing to announce."""
    versions: dict[bytes, list[Announcement]] = {}
    for server in sorted(servers, key=lambda server: (server.peer_id not in proven, server.peer_id not in connected)):
        versions.setdefault(server.model_version, []).append(server)

    def rank(known: list[Announcement]) -> tuple[int, bool, int]:
        trusted = sum(server.peer_id in proven for server in known)
        return -trusted, not any(server.peer_id in connected for server in known), -len(known)

    return [known[:_SERVERS_ASKED] for known in sorted(versions.values(), key=rank)[:VERSIONS_ASKED]]


def most_proven(fitting: Collection[bytes], proven: Mapping[bytes, int]) -> bytes | None:
    """The only version that fits; of several the one of most proven servers (version -> how many); else None."""
    ranked = sorted(fitting, key=lambda version: -proven.get(version, 0))
    if len(ranked) > 1 and proven.get(ranked[0], 0) == proven.get(ranked[1], 0):
        return None
    return ranked[0] if ranked else None


def choose_version(name: str, fitting: Collection[bytes], view: SwarmView, trust: TrustStore) -> bytes:
    """The version that is meant by a model of this name, of those that fit the weights here: as `most_proven` has it.

    Anybody can announce a version that fits, so neither the number of its servers nor their order says anything; that a
    server has computed for this node before does.

    Raises:
        ModelError: several, which it names.
    """
    now = time.time()
    proven = {
        version: sum(trust.reputation(server.peer_id) > 0 for server in view.servers(version, now=now))
        for version in fitting
    }
    chosen = most_proven(fitting, proven)
    if chosen is not None:
        return chosen
    raise several_versions(name, fitting)


def several_versions(name: str, fitting: Collection[bytes]) -> ModelError:
    """What a person is told who has to say which of these versions is meant."""
    digits = [version.hex()[:_DIGITS] for version in sorted(fitting)]
    more = f" and {len(digits) - _NAMED} more" if len(digits) > _NAMED else ""
    return ModelError(
        f"servers announce several versions of {name} that may be meant: {', '.join(digits[:_NAMED])}{more}. "
        f"Name the one that you mean, as {name}@{digits[0]} names the first; who gave you the address of the swarm "
        "knows which (`petalnode serve` prints it)"
    )
