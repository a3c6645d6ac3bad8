"""The message that spreads evidence by gossip: small evidence itself, or where larger evidence can be fetched. Pure.

A message carries evidence, never a verdict: who receives it checks it or does nothing. With it go the endorsements of
validators that have recomputed it, for nodes that cannot recompute and have chosen validators to trust.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Final

from google.protobuf.message import DecodeError

from ...crypto.identity import Identity, peer_id_from_bytes, peer_id_to_bytes
from ...crypto.statement import Statement
from ...protocols import wire_pb2 as wire
from ...protocols.inference import receipt_from_wire
from .bundle import BadBundle, Bundle

MAX_MESSAGE: Final = 48 * 1024
"""Bytes of a message."""
MAX_ENDORSEMENTS: Final = 32
MAX_ADDRS: Final = 8
MAX_ADDR: Final = 256
MAX_AGE: Final = 3 * 86400.0
"""Seconds after which nobody forwards evidence."""
RATE: Final = 6
"""Messages of one sender that are forwarded in `RATE_SECONDS`."""
RATE_SECONDS: Final = 60.0
MAX_SENDERS: Final = 1000


class BadEvidenceMessage(ValueError):
    """A message that nobody should forward."""


@dataclass(frozen=True)
class Endorsement(Statement):
    """A validator's signed statement that it has recomputed evidence, and that it proves a fault of `accused`."""

    DOMAIN: ClassVar[str] = "petalnode/endorsement/1"

    validator: str
    evidence_id: bytes
    accused: str
    time_ms: int
    signature: bytes = b""

    @property
    def signer(self) -> str:
        return self.validator

    @classmethod
    def made(cls, validator: Identity, evidence_id: bytes, accused: str, time_ms: int) -> Endorsement:
        return cls(validator.peer_id, evidence_id, accused, time_ms).signed(validator)


@dataclass(frozen=True)
class TrustedValidators:
    """The validators that a person trusts: peer id to owner, and how many owners have to agree."""

    owners: Mapping[str, str]
    quorum: int = 2

    def convinced_by(self, endorsements: Iterable[Endorsement]) -> bool:
        """Whether checked endorsements of one piece of evidence are enough. Keys of one owner count once."""
        agreeing = {self.owners.get(endorsement.validator) for endorsement in endorsements} - {None}
        return len(agreeing) >= max(1, self.quorum)


def is_recent(time_ms: int, now: float) -> bool:
    """Whether a statement of this time counts: neither old nor of a time to come."""
    return abs(now - time_ms / 1000) <= MAX_AGE


def is_answer_recent(bundle: Bundle, now: float) -> bool:
    """Whether the accused server has signed lately what it is accused of. By its own receipt: who brings evidence
    could write any time into the statement and the message, and bring it again for ever."""
    found = bundle.last_receipt
    if found is None or not is_recent(found.time_ms, now):
        return False
    try:
        return receipt_from_wire(found).is_signed_by(bundle.accused)
    except ValueError:
        return False


NO_VALIDATORS: Final = TrustedValidators({})


def parse_trusted(text: str) -> tuple[str, str]:
    """(peer id, owner) of PEER or PEER=OWNER; without an owner a validator is its own.

    Raises:
        ValueError: it is no peer id.
    """
    peer_id, _, owner = text.partition("=")
    peer_id_to_bytes(peer_id)
    return peer_id, owner or peer_id


@dataclass(frozen=True)
class EvidenceMessage:
    """`bundle` is None if it is too large; then it is fetched from the author, at `addrs`, by `evidence_id`."""

    evidence_id: bytes
    accused: str
    time_ms: int
    bundle: Bundle | None = None
    endorsements: tuple[Endorsement, ...] = ()
    addrs: tuple[str, ...] = ()

    @classmethod
    def of(cls, bundle: Bundle, endorsements: Sequence[Endorsement] = (), addrs: Sequence[str] = ()) -> EvidenceMessage:
        return cls(
            bundle.id,
            bundle.accused,
            bundle.evidence.time_ms,
            bundle if len(bundle.to_bytes()) <= MAX_MESSAGE // 2 else None,
            tuple(endorsements[:MAX_ENDORSEMENTS]),
            tuple(addrs[:MAX_ADDRS]),
        )

    @property
    def is_self_proving(self) -> bool:
        """Whether it carries evidence whose signatures alone have to prove the fault."""
        return self.bundle is not None and self.bundle.evidence.kind != "answer"

    def to_bytes(self) -> bytes:
        return wire.EvidenceNotice(
            id=self.evidence_id,
            accused=peer_id_to_bytes(self.accused),
            time_ms=self.time_ms,
            bundle=self.bundle.to_bytes() if self.bundle is not None else b"",
            endorsements=[
                wire.Endorsement(
                    validator=peer_id_to_bytes(endorsement.validator),
                    time_ms=endorsement.time_ms,
                    signature=endorsement.signature,
                )
                for endorsement in self.endorsements
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
                Endorsement(peer_id_from_bytes(signed.validator), message.id, accused, signed.time_ms, signed.signature)
                for signed in message.endorsements
            )
        except (DecodeError, BadBundle, ValueError) as error:
            raise BadEvidenceMessage(str(error)) from None
        if len(message.addrs) > MAX_ADDRS or any(len(addr) > MAX_ADDR for addr in message.addrs):
            raise BadEvidenceMessage("its addresses are too many or too long")
        if len(message.id) != 32 or len(endorsements) > MAX_ENDORSEMENTS:
            raise BadEvidenceMessage("it has no id, or too many endorsements")
        if bundle is not None and (bundle.id != message.id or bundle.accused != accused):
            raise BadEvidenceMessage("it is not about the evidence in it")
        if not is_recent(message.time_ms, now) or (bundle is not None and not is_answer_recent(bundle, now)):
            raise BadEvidenceMessage("it is old")
        if not all(endorsement.is_signed for endorsement in endorsements):
            raise BadEvidenceMessage("an endorsement is not signed")
        return cls(message.id, accused, message.time_ms, bundle, endorsements, tuple(message.addrs))


@dataclass
class RateLimiter:
    """Counts the messages of each sender that were forwarded lately. Bounded."""

    limit: int = RATE
    seconds: float = RATE_SECONDS
    _seen: dict[str, list[float]] = field(default_factory=dict)

    def allows(self, sender: str, now: float) -> bool:
        """Whether one more message of this sender is forwarded; counts it."""
        times = [time for time in self._seen.pop(sender, []) if time > now - self.seconds]
        allowed = len(times) < self.limit
        if allowed:
            times.append(now)
        self._seen[sender] = times  # moved to the end: the sender that was silent longest is forgotten first
        while len(self._seen) > MAX_SENDERS:
            del self._seen[next(iter(self._seen))]
        return allowed
