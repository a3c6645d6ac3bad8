"""What a node knows of the swarm: the newest valid announcement of each server. Pure; no clock, no network."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from ...protocols.announcement import Announcement, ServerState, SignedAnnouncement, is_expired

MAX_RECORDS: Final = 10_000


@dataclass(frozen=True)
class SwarmView:
    """The newest announcement of each server, retractions included (they keep older ones from coming back)."""

    records: Mapping[str, SignedAnnouncement] = field(default_factory=dict)

    def merge(self, signed: Iterable[SignedAnnouncement], now: float) -> SwarmView:
        """The view with these announcements, already checked by `open_signed`, and without the expired ones.

        A newer sequence number wins; an equal one changes nothing. Above `MAX_RECORDS` servers those that expire
        first go. Returns `self` if nothing changed. `now` in seconds since 1970.
        """
        merged = {peer_id: record for peer_id, record in self.records.items() if not is_expired(record.content, now)}
        changed = len(merged) != len(self.records)
        for record in signed:
            content = record.content
            held = merged.get(content.peer_id)
            if is_expired(content, now) or (held is not None and held.content.sequence >= content.sequence):
                continue
            merged[content.peer_id] = record
            changed = True
        if len(merged) > MAX_RECORDS:
            latest = sorted(merged.values(), key=lambda record: record.content.expires, reverse=True)
            merged = {record.content.peer_id: record for record in latest[:MAX_RECORDS]}
        return SwarmView(merged) if changed else self

    def get(self, peer_id: str, now: float) -> Announcement | None:
        """What this server says of itself, if it is known, not expired and not retracted."""
        record = self.records.get(peer_id)
        return record.content if record is not None and _counts(record.content, now) else None

    def servers(self, model_version: bytes | None = None, *, now: float) -> tuple[Announcement, ...]:
        """The servers whose announcements have neither expired nor been retracted, of one model or of all, by span."""
        found = [
            record.content
            for record in self.records.values()
            if _counts(record.content, now) and model_version in (None, record.content.model_version)
        ]
        return tuple(sorted(found, key=lambda content: (content.model_version, content.span, content.peer_id)))

    def models(self, *, now: float) -> dict[bytes, tuple[str, int]]:
        """model version -> (name, number of blocks), as most of its servers say."""
        votes: dict[bytes, Counter[tuple[str, int]]] = {}
        for content in self.servers(now=now):
            votes.setdefault(content.model_version, Counter())[content.model_name, content.num_blocks] += 1
        return {version: min(counts, key=lambda choice: (-counts[choice], choice)) for version, counts in votes.items()}


def _counts(content: Announcement, now: float) -> bool:
    return content.state is not ServerState.OFFLINE and not is_expired(content, now)
