"""Evidence by gossip: which messages are forwarded, and what this node does about the servers that they accuse.

Every message is checked before it is forwarded: form, age, signatures, and the rates of its maker and of the neighbour
that hands it on. A node passes on fewer than its neighbours take from it, so what others make cuts no honest node off.
Evidence that is said to prove itself has to, or it is not forwarded. Evidence that would have to be recomputed is
forwarded unchecked, because it has no effect by itself: a node bans by what it has checked, or by the validators that
its owner trusts.
"""

from __future__ import annotations

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import trio

from ...crypto.evidence import NotProven
from ...crypto.identity import Identity
from ...protocols import wire_pb2 as wire
from ...protocols.evidence import EVIDENCE_SIZES, EvidenceStream, receive_bundle, send_bundle
from ...protocols.framing import PeerError
from ..network.shares import ShareCount
from .bundle import Bundle
from .evidence_message import (
    EVIDENCE_LIMITS,
    BadEvidenceMessage,
    Endorsement,
    EvidenceMessage,
    ForwardingShares,
    KnownMakers,
    is_recent,
)
from .reputation import Source
from .statement import SelfProven, check_statement
from .store import TrustStore

log = logging.getLogger(__name__)

TOPIC: Final = "petalnode/evidence/1"


@dataclass(frozen=True)
class HeldEvidence:
    """What a node keeps of evidence, and for how long others may take to fetch it."""

    max_known: int = 1000  # Pieces of evidence that are remembered, without their tensors
    max_held_bytes: int = 128 << 20  # Of bundles that this node serves
    max_per_accused: int = 16  # Pieces of evidence about one server that are remembered
    idle_timeout: float = 30.0
    piece_timeout: float = 30.0
    fetches_per_stream: int = 20


HELD: Final = HeldEvidence()
_Key: TypeAlias = tuple[bytes, str]
"""Id of the evidence, and the server that it is said to accuse."""


class EvidenceGossip:
    """The evidence that one node knows. It does no input or output of its own: the swarm passes gossip messages to
    `accept`, and publishes the message that `record_proven` returns.

    Attributes:
        on_proven: callbacks for evidence that this node has checked itself; they must not raise.
        on_evidence: callbacks for messages about evidence that would have to be recomputed. With the peer id of their
            author and of who handed it on; they must not raise.
    """

    def __init__(self, identity: Identity, store: TrustStore, clock: Callable[[], float] = time.time) -> None:
        self.on_proven: list[Callable[[Bundle], None]] = []
        self.on_evidence: list[Callable[[EvidenceMessage, str, str], None]] = []
        self._identity = identity
        self._store = store
        self._clock = clock
        self._endorsements: OrderedDict[_Key, dict[str, Endorsement]] = OrderedDict()
        self._accused: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()  # by accused server
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        self._punished: dict[bytes, Source] = {}  # by `Bundle.fault`, or evidence that was endorsed
        # What was taken lately, by its maker and by who handed it on.
        self._authors, self._relayed, self._relayed_of_known = (
            ShareCount(math.inf, seconds=EVIDENCE_LIMITS.rate_seconds) for _ in range(3)
        )
        self._told = False
        self._makers, self._shares = KnownMakers(), ForwardingShares()

    # --- messages of others

    def accept(self, author: str, forwarder: str, data: bytes) -> bool:
        """Acts on a message, if it may; whether it did. Quick: it is called for every message that strangers send.

        What a neighbour has made itself counts as its maker's only. What it hands on counts as its own as well: once it
        is taken, so that nobody can use up the maker's rate with what is not.
        """
        now = self._clock()
        handed_on = self._relayed_of_known if self._is_known(author, now) else self._relayed
        if self._store.is_banned(author) or not self._authors.has_room(author, EVIDENCE_LIMITS.rate, now=now):
            return False
        if author != forwarder and not handed_on.add(forwarder, most=EVIDENCE_LIMITS.relayed, now=now):
            return False
        self._authors.count(author, now=now)
        try:
            message = EvidenceMessage.from_bytes(data, now)
            bundle = message.bundle if message.is_self_proving else None
            shown = None if bundle is None else check_statement(bundle)
            assert shown is None or isinstance(shown, SelfProven)
        except (BadEvidenceMessage, NotProven) as error:
            log.debug("%s spreads invalid evidence: %s", author, error)
            return False
        self._makers.note(author, now)
        self._act(message, author, forwarder, shown)
        return True

    def forwards(self, author: str, forwarder: str) -> bool:
        """Whether a message that was accepted is passed on as well."""
        now = self._clock()
        return self._shares.allows(author, forwarder, now, known=self._is_known(author, now))

    def _is_known(self, author: str, now: float) -> bool:
        return author in self._store.trusted.owners or self._makers.is_known(author, now)

    def _act(self, message: EvidenceMessage, author: str, forwarder: str, shown: SelfProven | None) -> None:
        """`shown`: what its evidence proves by itself, if it does."""
        self._remember(message)
        if message.accused == self._identity.peer_id and not self._told:
            self._told = True  # once: whoever likes can say so
            log.warning(
                "%s says that this server has answered wrong (evidence %s); if it did, its memory or processor may be "
                "faulty: `petalnode self-test` tests this machine",
                author,
                message.evidence_id.hex()[:12],
            )
        if message.bundle is not None and shown is not None:
            if message.accused != self._identity.peer_id:
                self._notify_proven(message.bundle)
                reason = f"{shown.reason} (evidence {message.evidence_id.hex()[:12]})"
                self._ban_once(message.accused, message.bundle.fault, reason, "evidence")
            return
        for callback in self.on_evidence:
            callback(message, author, forwarder)
        believed = [
            endorsement
            for endorsement in self._endorsements[message.evidence_id, message.accused].values()
            if not self._store.is_banned(endorsement.validator)  # its evidence was refuted here
            and is_recent(endorsement.time_ms, self._clock())
        ]
        trusted = self._store.trusted
        if trusted.convinced_by(believed):
            names = sorted(signed.validator for signed in believed if signed.validator in trusted.owners)
            reason = f"validators that are trusted here have recomputed it: {', '.join(names)}"
            self._ban_once(message.accused, message.evidence_id, reason, "validators")

    def _ban_once(self, accused: str, fault: bytes, reason: str, source: Source) -> None:
        """For one fault once, however often and by whomever evidence of it is brought: for one bit, which is banned
        for minutes, once more where it proves to be more."""
        earlier = self._punished.get(fault)
        if earlier is None or (earlier == "one bit" and source != earlier):
            self._punished[fault] = source
            self._store.ban(accused, reason, source)
        while len(self._punished) > HELD.max_known:
            del self._punished[next(iter(self._punished))]

    def _notify_proven(self, bundle: Bundle) -> None:
        for callback in self.on_proven:
            callback(bundle)

    def _remember(self, message: EvidenceMessage) -> None:
        # A message without its evidence may name another server than the evidence does.
        key = message.evidence_id, message.accused
        endorsed = self._endorsements.pop(key, {})
        for endorsement in message.endorsements:
            # Those of trusted validators stay, however many others sign: keys cost nothing.
            if len(endorsed) < EVIDENCE_LIMITS.max_endorsements or endorsement.validator in self._store.trusted.owners:
                endorsed[endorsement.validator] = endorsement
        self._endorsements[key] = endorsed
        self._note_accused(message.accused, message.evidence_id)
        if message.bundle is not None and message.evidence_id not in self._held:
            self._hold(message.bundle)  # its tensors are unchecked
        while len(self._endorsements) > HELD.max_known:
            self._endorsements.popitem(last=False)

    def _note_accused(self, accused: str, evidence_id: bytes) -> None:
        """Of too much about one server the oldest goes: refusing the newest would let a liar fill the places.

        What validators that are trusted here have endorsed goes last: a liar could make the rest up meanwhile."""
        ids = self._accused.setdefault(accused, OrderedDict())
        ids[evidence_id] = None
        ids.move_to_end(evidence_id)
        self._accused.move_to_end(accused)
        if len(ids) > HELD.max_per_accused:
            trusted = self._store.trusted.owners.keys()
            earlier = list(ids)[:-1]
            strange = (one for one in earlier if trusted.isdisjoint(self._endorsements.get((one, accused), ())))
            old = next(strange, earlier[0])
            del ids[old]
            self._endorsements.pop((old, accused), None)
        while len(self._accused) > HELD.max_known:
            self._accused.popitem(last=False)

    def _hold(self, bundle: Bundle) -> None:
        if bundle.nbytes <= EVIDENCE_SIZES.max_shared and len(data := bundle.to_bytes()) <= EVIDENCE_SIZES.max_shared:
            self._held[bundle.id] = data
            self._held.move_to_end(bundle.id)
        while sum(map(len, self._held.values())) > HELD.max_held_bytes:
            self._held.popitem(last=False)

    # --- evidence of this node

    def record_proven(
        self, bundle: Bundle, *, recomputed: bool, one_bit: bool = False, addrs: Sequence[str] = ()
    ) -> bytes:
        """Bans the server whose fault this node has checked, shortly at first if that was `one_bit`; returns the
        message to publish.

        It has this node's endorsement if it has `recomputed` the answer, and the `addrs` where it can be dialed.
        """
        now = round(self._clock() * 1000)
        mine = [Endorsement.made(self._identity, bundle.id, bundle.accused, now)] if recomputed else []
        others = self._endorsements.get((bundle.id, bundle.accused), {}).values()
        message = EvidenceMessage.of(bundle, [*mine, *others], addrs)
        self._hold(bundle)
        self._remember(message)
        source: Source = "one bit" if one_bit else "evidence"
        self._ban_once(bundle.accused, bundle.fault, f"proved here (evidence {bundle.id.hex()[:12]})", source)
        self._notify_proven(bundle)
        return message.to_bytes()

    # --- /petalnode/evidence/1

    async def serve(self, stream: EvidenceStream) -> None:
        """Sends bundles by their ids."""
        for _ in range(HELD.fetches_per_stream):
            frame, _ = await stream.receive(timeout=HELD.idle_timeout)
            if frame.WhichOneof("body") != "fetch":
                return
            data = self._held.get(frame.fetch.id)
            if data is None:
                error = wire.Error(code=wire.ERROR_NOT_FOUND, message="this evidence is not here")
                await stream.send(wire.EvidenceFrame(error=error), timeout=HELD.piece_timeout)
            else:
                await send_bundle(stream, data, timeout=HELD.piece_timeout)


async def fetch_bundle(stream: EvidenceStream, evidence_id: bytes) -> Bundle:
    """The bundle of this id from a peer that has it.

    Raises:
        PeerError, Refusal: it has not, or sends another bundle.
        BadBundle: it sends no evidence.
    """
    await stream.send(wire.EvidenceFrame(fetch=wire.Fetch(id=evidence_id)), timeout=HELD.piece_timeout)
    data = await receive_bundle(stream, limit=EVIDENCE_SIZES.max_shared, timeout=HELD.piece_timeout)
    bundle, found = await trio.to_thread.run_sync(_identified, data)
    if found != evidence_id:
        raise PeerError(f"{stream.peer_id} sent other evidence than was asked for", stream.peer_id)
    return bundle


def _identified(data: bytes) -> tuple[Bundle, bytes]:
    """A bundle and its id; takes a while."""
    bundle = Bundle.from_bytes(data)
    return bundle, bundle.id
