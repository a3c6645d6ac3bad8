"""The file with the peers of earlier runs, so that a node needs no `--peer`.

There is one file for each swarm, shared by all nodes of a person on a machine. Who met whom is the same for a server
and a chat. What to keep is decided by pure functions; `PeerStore` reads and writes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from ...crypto.canonical import digest
from ...crypto.identity import make_private_folder, peer_id_to_bytes, write_private

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class PeerFileLimits:
    """What is kept of the peers of earlier runs, and for how long."""

    max_peers: int = 64
    max_addrs: int = 6  # of one peer
    max_named: int = 8  # likewise
    max_bytes: int = 256 * 1024
    lock_patience: float = 1.0  # seconds
    failing_seconds: float = 3 * 86400.0  # of not answering while others did, and a peer is forgotten
    unseen_seconds: float = 60 * 86400.0  # without a meeting, likewise


PEER_FILE: Final = PeerFileLimits()


@dataclass(frozen=True)
class PeerRecord:
    """A peer met before: its addresses without /p2p, the best first; when it was last met, and since when it has not
    answered (0: it did), both in seconds since 1970. `named` are the peers that were named, to a node that met it, to
    join its swarm by."""

    peer_id: str
    addrs: tuple[str, ...]
    seen: float
    failing: float = 0.0
    named: tuple[str, ...] = ()


def updated(
    known: Iterable[PeerRecord],
    met: Mapping[str, Sequence[str]],
    failed: Iterable[str],
    now: float,
    named: Iterable[str] = (),
) -> tuple[PeerRecord, ...]:
    """What to remember, the latest met first, after having met these peers at these addresses (the best first).

    `failed` are those that did not answer, `named` those by which this node joined.
    """
    peers = {record.peer_id: record for record in known}
    for peer_id, addrs in met.items():
        held = peers.get(peer_id)
        merged = dict.fromkeys((*addrs, *(held.addrs if held is not None else ())))
        if merged:
            by = dict.fromkeys((*named, *(held.named if held is not None else ())))
            peers[peer_id] = PeerRecord(
                peer_id, tuple(merged)[: PEER_FILE.max_addrs], seen=now, named=tuple(by)[: PEER_FILE.max_named]
            )
    for peer_id in set(failed) - set(met):
        if peer_id in peers:
            peers[peer_id] = replace(peers[peer_id], failing=peers[peer_id].failing or now)
    kept = [
        peer
        for peer in peers.values()
        if now - peer.seen < PEER_FILE.unseen_seconds
        and (not peer.failing or now - peer.failing <= PEER_FILE.failing_seconds)
    ]
    return tuple(sorted(kept, key=lambda record: (-record.seen, record.peer_id))[: PEER_FILE.max_peers])


def in_order(known: Iterable[PeerRecord]) -> list[PeerRecord]:
    """Whom to try first: those that answered the last time, the latest met before the others."""
    return sorted(known, key=lambda record: (bool(record.failing), -record.seen))


def peer_store_file(folder: Path, psk: str | None) -> Path:
    """Where the peers of one swarm are remembered: the public one, or the private one of this key."""
    swarm = "public" if psk is None else digest("petalnode/remembered/1", bytes.fromhex(psk)).hex()[:16]
    return folder / "peers" / f"{swarm}.json"


class PeerStore:
    """The file. Its methods block for as long as a small file takes, and never raise: a node does without it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> tuple[PeerRecord, ...]:
        """What the file holds; nothing if it is missing, damaged or cannot be read."""
        try:
            with self._path.open("rb") as file:
                text = file.read(PEER_FILE.max_bytes)
            entries = json.loads(text)["peers"]
            return tuple(peer for entry in entries if (peer := _peer_record(entry)) is not None)[: PEER_FILE.max_peers]
        except FileNotFoundError:
            return ()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            log.debug("the peers remembered in %s cannot be read: %s", self._path, error)
            return ()

    def update(
        self, met: Mapping[str, Sequence[str]], failed: Iterable[str], now: float, named: Iterable[str] = ()
    ) -> None:
        """Adds what this run has learnt to what the file holds by now. Several processes may do so at once."""
        try:
            make_private_folder(self._path.parent)
            with FileLock(self._path.with_name(self._path.name + ".lock"), timeout=PEER_FILE.lock_patience):
                self._write(updated(self.load(), met, failed, now, named))
        except (OSError, Timeout) as error:
            log.debug("the peers met cannot be kept in %s: %s", self._path, error)

    def _write(self, peers: Sequence[PeerRecord]) -> None:
        text = json.dumps({"version": 1, "peers": [asdict(peer) for peer in peers]}, indent=1)
        write_private(self._path, text.encode())


def _peer_record(entry: Any) -> PeerRecord | None:
    """One entry of the file; None if it is not of the form that we write."""
    try:
        peer_id, addrs = str(entry["peer_id"]), entry["addrs"]
        peer_id_to_bytes(peer_id)
        if not addrs or not all(isinstance(addr, str) for addr in addrs):
            return None
        named = entry.get("named", [])
        if not isinstance(named, list) or not all(isinstance(other, str) for other in named):
            return None
        seen, failing = float(entry["seen"]), float(entry["failing"])
        return PeerRecord(
            peer_id, tuple(addrs)[: PEER_FILE.max_addrs], seen, failing, tuple(named)[: PEER_FILE.max_named]
        )
    except (KeyError, TypeError, ValueError):
        return None
