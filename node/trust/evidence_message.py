"""The message that spreads evidence by gossip: small evidence itself, or where larger evidence can be fetched. Pure.

A message carries evidence, never a verdict: who receives it checks it or does nothing. With it go endorsements of
validators that have recomputed it. They are for nodes that cannot recompute and have chosen validators to trust.
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
from ..network.shares import ShareCount
from .bundle import BadBundle, Bundle


@dataclass(frozen=True)
class EvidenceLimits:
    """The sizes of messages about evidence, and how many of one sender count."""

    max_message: int = 48 * 1024  # Bytes of a message
    max_endorsements: int = 32
    max_addrs: int = 8
    max_addr: int = 256
    max_age: float = 3 * 86400.0  # Seconds after which nobody forwards evidence
    rate: int = 6  # Messages of one maker that are taken in `rate_seconds`
    relayed: int = 30
    """Messages of others that are taken from one neighbour in that time, and as many again of makers that are known."""
    rate_seconds: float = 60.0
    max_senders: int = 1000
    forwarded: int = 24
    """Messages of others that a node passes on in that time: fewer than any neighbour takes from it, so that no
    honest node is cut off for what others have made."""
    kept_for_known: int = 8  # Of these, for makers that are known, and
    kept_for_neighbours: int = 12
    """for neighbours that hand on little, one of each; the rest is for whoever comes first."""
    of_one_known: int = 2
    key_age: float = 600.0  # Seconds since a maker's first message after which it is known
    forgotten: float = 86400.0


EVIDENCE_LIMITS: Final = EvidenceLimits()


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
    return abs(now - time_ms / 1000) <= EVIDENCE_LIMITS.max_age


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
            bundle
            if bundle.nbytes <= EVIDENCE_LIMITS.max_message // 2
            and len(bundle.to_bytes()) <= EVIDENCE_LIMITS.max_message // 2
            else None,
            tuple(endorsements[: EVIDENCE_LIMITS.max_endorsements]),
            tuple(addrs[: EVIDENCE_LIMITS.max_addrs]),
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
        if len(data) > EVIDENCE_LIMITS.max_message:
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
        if len(message.addrs) > EVIDENCE_LIMITS.max_addrs or any(
            len(addr) > EVIDENCE_LIMITS.max_addr for addr in message.addrs
        ):
            raise BadEvidenceMessage("its addresses are too many or too long")
        if len(message.id) != 32 or len(endorsements) > EVIDENCE_LIMITS.max_endorsements:
            raise BadEvidenceMessage("it has no id, or too many endorsements")
        if bundle is not None and (bundle.id != message.id or bundle.accused != accused):
            raise BadEvidenceMessage("it is not about the evidence in it")
        if not is_recent(message.time_ms, now) or (bundle is not None and not is_answer_recent(bundle, now)):
            raise BadEvidenceMessage("it is old")
        if not all(endorsement.is_signed for endorsement in endorsements):
            raise BadEvidenceMessage("an endorsement is not signed")
        return cls(message.id, accused, message.time_ms, bundle, endorsements, tuple(message.addrs))


@dataclass
class KnownMakers:
    """Since when there are messages of which makers. Bounded, and an older key never gives way to newer ones."""

    _heard: dict[str, tuple[float, float]] = field(default_factory=dict)  # the first time, and the last

    def note(self, maker: str, now: float) -> None:
        """A message of this maker was taken."""
        first, _ = self._heard.pop(maker, (now, now))
        if len(self._heard) >= EVIDENCE_LIMITS.max_senders:
            self._heard = {
                key: times for key, times in self._heard.items() if times[1] > now - EVIDENCE_LIMITS.forgotten
            }
        if len(self._heard) >= EVIDENCE_LIMITS.max_senders:
            del self._heard[max(self._heard, key=lambda key: self._heard[key][0])]
        self._heard[maker] = first, now

    def is_known(self, maker: str, now: float) -> bool:
        return maker in self._heard and now - self._heard[maker][0] >= EVIDENCE_LIMITS.key_age


class ForwardingShares:
    """What a node passes on of others, `EVIDENCE_LIMITS.forwarded` messages at most. Those who make many, under however
    many keys, and those who hand on many, leave room for others."""

    def __init__(self) -> None:
        limits, period = EVIDENCE_LIMITS, EVIDENCE_LIMITS.rate_seconds
        kept = limits.kept_for_known + limits.kept_for_neighbours
        self._known = ShareCount(limits.kept_for_known, limits.of_one_known, seconds=period)
        self._neighbours = ShareCount(limits.kept_for_neighbours, 1, seconds=period)
        self._all = ShareCount(limits.forwarded - kept, limits.forwarded, seconds=period)

    def allows(self, maker: str, neighbour: str, now: float, *, known: bool) -> bool:
        """Whether a message is passed on; counts it. `known` says that its maker is, `neighbour` handed it over."""
        return (
            (known and self._known.add(maker, most=EVIDENCE_LIMITS.of_one_known, now=now))
            or self._neighbours.add(neighbour, most=1, now=now)
            or self._all.add("", now=now)
        )
