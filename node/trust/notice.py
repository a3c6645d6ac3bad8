"""What travels by gossip: evidence that is small, or where larger evidence can be had, and who has recomputed it. Pure.

Evidence, never verdicts: whoever hears of it checks it or does nothing. Endorsements are signed by validators who did,
for nodes that cannot recompute and have chosen whom to believe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from google.protobuf.message import DecodeError

from ...crypto.identity import peer_id_from_bytes, peer_id_to_bytes
from ...protocols import wire_pb2 as wire
from .bans import Endorsement
from .bundle import BadBundle, Bundle

MAX_MESSAGE: Final = 48 * 1024
"""Bytes of a message."""
MAX_ENDORSEMENTS: Final = 32
MAX_ADDRS: Final = 8
MAX_ADDR: Final = 256
MAX_AGE: Final = 3 * 86400.0
"""Seconds after which nobody passes evidence on."""
RATE: Final = 6
"""Messages of one sender that are passed on in `RATE_SECONDS`."""
RATE_SECONDS: Final = 60.0
MAX_SENDERS: Final = 1000


class BadEvidenceMessage(ValueError):
    """A message that nobody should pass on."""


@dataclass(frozen=True)
class EvidenceMessage:
    """`bundle` is None if it is too large: it can be had from the sender, at `addrs`, under
    `evidence_id`."""

    evidence_id: bytes
    accused: str
    time_ms: int
    bundle: Bundle | None = None
    endorsements: tuple[Endorsement, ...] = ()
    addrs: tuple[str, ...] = ()

    @classmethod
    def of(cls, bundle: Bundle, endorsements: Sequence[Endorsement] = (), addrs: Sequence[str] = ()) -> EvidenceMessage:
        data = bundle.to_bytes()
        small = len(data) <= MAX_MESSAGE // 2
        return cls(
            bundle.id,
            bundle.accused,
            bundle.evidence.time_ms,
            bundle if small else None,
            tuple(endorsements[:MAX_ENDORSEMENTS]),
            tuple(addrs[:MAX_ADDRS]),
        )

    def to_bytes(self) -> bytes:
        return wire.EvidenceNotice(
            id=self.evidence_id,
            accused=peer_id_to_bytes(self.accused),
            time_ms=self.time_ms,
            bundle=self.bundle.to_bytes() if self.bundle is not None else b"",
            endorsements=[
                wire.Endorsement(
                    validator=peer_id_to_bytes(each.validator), time_ms=each.time_ms, signature=each.signature
                )
                for each in self.endorsements
            ],
            addrs=self.addrs,
        ).SerializeToString(deterministic=True)

    @classmethod
    def from_bytes(cls, data: bytes, now: float) -> EvidenceMessage:
        """Checks everything that needs no weights: form, age, signatures.

        Raises:
            BadEvidenceMessage: with the reason.
        """
        if len(data) > MAX_MESSAGE:
            raise BadEvidenceMessage("it is too long")
        try:
            message = wire.EvidenceNotice.FromString(data)
            accused = peer_id_from_bytes(message.accused)
            bundle = Bundle.from_bytes(message.bundle) if message.bundle else None
            endorsements = tuple(
                Endorsement(peer_id_from_bytes(each.validator), message.id, accused, each.time_ms, each.signature)
                for each in message.endorsements
            )
        except (DecodeError, BadBundle, ValueError) as error:
            raise BadEvidenceMessage(str(error)) from None
        if len(message.addrs) > MAX_ADDRS or any(len(addr) > MAX_ADDR for addr in message.addrs):
            raise BadEvidenceMessage("its addresses are too many or too long")
        if len(message.id) != 32 or len(endorsements) > MAX_ENDORSEMENTS:
            raise BadEvidenceMessage("it has no id, or too many endorsements")
        if bundle is not None and (bundle.id != message.id or bundle.accused != accused):
            raise BadEvidenceMessage("it is not about the evidence in it")
        if abs(now - message.time_ms / 1000) > MAX_AGE:
            raise BadEvidenceMessage("it is old")
        if not all(each.is_signed for each in endorsements):
            raise BadEvidenceMessage("an endorsement is not signed")
        return cls(message.id, accused, message.time_ms, bundle, endorsements, tuple(message.addrs))


@dataclass
class Rates:
    """How many messages of each sender were passed on lately. Bounded."""

    limit: int = RATE
    seconds: float = RATE_SECONDS
    _seen: dict[str, list[float]] = field(default_factory=dict)

    def allows(self, sender: str, now: float) -> bool:
        """Whether one more of this sender's is passed on; counts it."""
        times = [each for each in self._seen.pop(sender, []) if each > now - self.seconds]
        allowed = len(times) < self.limit
        if allowed:
            times.append(now)
        self._seen[sender] = times  # the last place: who was silent longest is forgotten first
        while len(self._seen) > MAX_SENDERS:
            del self._seen[next(iter(self._seen))]
        return allowed
