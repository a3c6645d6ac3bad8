"""Passes evidence on, and acts on what it shows: by what this node has checked, or whom its owner trusts.

Every message is checked before it is passed on: form, age, signatures, how much its sender has said lately; evidence
that is said to prove itself has to, or nobody hears of it again. What would have to be recomputed is passed on
unchecked, since it does nothing to anybody by itself.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final

from ...crypto.evidence import NotProven
from ...crypto.identity import Identity
from ...protocols import wire_pb2 as wire
from ...protocols.evidence import MAX_SHARED, EvidenceStream, send_bundle
from ...protocols.framing import PeerError
from .bans import Endorsement
from .bundle import Bundle
from .notice import MAX_ENDORSEMENTS, BadEvidenceMessage, EvidenceMessage, Rates
from .statement import SelfProven, check_statement
from .store import TrustStore

log = logging.getLogger(__name__)

TOPIC: Final = "petalnode/evidence/1"
MAX_KNOWN: Final = 1000
"""Pieces of evidence that are remembered, without their tensors."""
MAX_HELD_BYTES: Final = 128 << 20
"""Of bundles that this node hands out to whoever asks."""
MAX_PER_ACCUSED: Final = 16
"""Pieces of evidence about one server that are remembered."""
_IDLE: Final = 30.0
_PIECE_TIMEOUT: Final = 30.0
_FETCHES: Final = 20
"""Of one stream."""


class EvidenceGossip:
    """What one node knows of evidence. Knows no gossip: `accept` and `deliver` are its ears, `found` its mouth.

    Attributes:
        on_proven: each is called with evidence that this node has checked itself; must not raise.
        on_evidence: each is called with evidence that would have to be recomputed, and who brings it; must not raise.
    """

    def __init__(self, identity: Identity, book: TrustStore, clock: Callable[[], float] = time.time) -> None:
        self.on_proven: list[Callable[[Bundle], None]] = []
        self.on_evidence: list[Callable[[EvidenceMessage, str], None]] = []
        self._identity = identity
        self._book = book
        self._clock = clock
        self._endorsements: OrderedDict[bytes, dict[str, Endorsement]] = OrderedDict()
        self._accused: OrderedDict[str, OrderedDict[bytes, None]] = OrderedDict()
        self._held: OrderedDict[bytes, bytes] = OrderedDict()
        self._makers, self._forwarders = Rates(), Rates(limit=30)
        self._checked: OrderedDict[bytes, EvidenceMessage] = (
            OrderedDict()
        )  # of the last messages, until they are delivered

    # --- what comes

    def accept(self, maker: str, forwarder: str, data: bytes) -> bool:
        """Whether a message is passed on. Quick: it may be called for every byte that strangers send."""
        now = self._clock()
        if not self._forwarders.allows(forwarder, now) or not self._makers.allows(maker, now):
            return False
        try:
            notice = EvidenceMessage.from_bytes(data, now)
            if notice.bundle is not None and notice.bundle.evidence.kind != "answer":
                shown = check_statement(notice.bundle)
                assert isinstance(shown, SelfProven)
        except (BadEvidenceMessage, NotProven) as error:
            log.debug("%s spreads nonsense: %s", maker, error)
            return False
        self._checked[data] = notice
        while len(self._checked) > 8:
            self._checked.popitem(last=False)
        return True

    def deliver(self, maker: str, data: bytes) -> None:
        """Acts on a message that was accepted."""
        notice = self._checked.pop(data, None)
        if notice is None:
            return
        self._remember(notice)
        if notice.bundle is not None and notice.bundle.evidence.kind != "answer":
            self._ban(notice, check_statement(notice.bundle))
            return
        for callback in self.on_evidence:
            callback(notice, maker)
        together = [
            each
            for each in self._endorsements[notice.evidence_id].values()
            if not self._book.is_banned(each.validator)  # whose evidence was refuted here is not believed
        ]
        if self._book.trusted.convinced_by(together):
            who = ", ".join(sorted(each.validator for each in together if each.validator in self._book.trusted.owners))
            self._book.ban(notice.accused, f"validators that are trusted here have recomputed it: {who}", "validators")

    def _ban(self, notice: EvidenceMessage, shown: object) -> None:
        if isinstance(shown, SelfProven) and notice.accused != self._identity.peer_id:
            if notice.bundle is not None:
                self._tell(notice.bundle)
            self._book.ban(notice.accused, f"{shown.reason} (evidence {notice.evidence_id.hex()[:12]})", "evidence")

    def _tell(self, bundle: Bundle) -> None:
        for callback in self.on_proven:
            callback(bundle)

    def _remember(self, notice: EvidenceMessage) -> None:
        key = notice.evidence_id
        endorsed = self._endorsements.pop(key, {})
        for each in notice.endorsements:
            # Those of trusted validators stay, whoever else signs: others can make as many keys as they like.
            if len(endorsed) < MAX_ENDORSEMENTS or each.validator in self._book.trusted.owners:
                endorsed[each.validator] = each
        self._endorsements[key] = endorsed
        self._note_accused(notice.accused, key)
        if notice.bundle is not None:
            self._hold(notice.bundle)
        while len(self._endorsements) > MAX_KNOWN:
            self._endorsements.popitem(last=False)

    def _note_accused(self, accused: str, evidence_id: bytes) -> None:
        """Of too much about one server the oldest goes: refusing the newest would let a liar fill the places."""
        ids = self._accused.setdefault(accused, OrderedDict())
        ids[evidence_id] = None
        ids.move_to_end(evidence_id)
        self._accused.move_to_end(accused)
        if len(ids) > MAX_PER_ACCUSED:
            old, _ = ids.popitem(last=False)
            self._endorsements.pop(old, None)
            self._held.pop(old, None)
        while len(self._accused) > MAX_KNOWN:
            self._accused.popitem(last=False)

    def _hold(self, bundle: Bundle) -> None:
        data = bundle.to_bytes()
        if len(data) <= MAX_SHARED:
            self._held[bundle.id] = data
            self._held.move_to_end(bundle.id)
        while sum(map(len, self._held.values())) > MAX_HELD_BYTES:
            self._held.popitem(last=False)

    # --- what goes

    def found(self, bundle: Bundle, *, recomputed: bool, addrs: Sequence[str] = ()) -> bytes:
        """The message for evidence that this node has checked itself, and by which it bans; with its endorsement if it
        has `recomputed` it, and with the `addrs` where it can be dialed."""
        now = round(self._clock() * 1000)
        mine = [Endorsement.made(self._identity, bundle.id, bundle.accused, now)] if recomputed else []
        others = self._endorsements.get(bundle.id, {}).values()
        notice = EvidenceMessage.of(bundle, [*mine, *others], addrs)
        self._hold(bundle)
        self._remember(notice)
        self._book.ban(bundle.accused, f"proved here (evidence {bundle.id.hex()[:12]})", "evidence")
        self._tell(bundle)
        return notice.to_bytes()

    # --- /petalnode/evidence/1

    async def serve(self, stream: EvidenceStream) -> None:
        """Hands out bundles by their ids."""
        for _ in range(_FETCHES):
            frame, _ = await stream.receive(timeout=_IDLE)
            if frame.WhichOneof("body") != "fetch":
                return
            data = self._held.get(frame.fetch.id)
            if data is None:
                error = wire.Error(code=wire.ERROR_NOT_FOUND, message="this evidence is not here")
                await stream.send(wire.EvidenceFrame(error=error), timeout=_PIECE_TIMEOUT)
            else:
                await send_bundle(stream, data, timeout=_PIECE_TIMEOUT)


async def fetch_bundle(stream: EvidenceStream, evidence_id: bytes) -> Bundle:
    """The bundle of this id from a peer that has it.

    Raises:
        PeerError, Refusal: it has not, or something else comes.
        BadBundle: it sends nonsense.
    """
    from ...protocols.evidence import receive_bundle

    await stream.send(wire.EvidenceFrame(fetch=wire.Fetch(id=evidence_id)), timeout=_PIECE_TIMEOUT)
    data = await receive_bundle(stream, limit=MAX_SHARED, timeout=_PIECE_TIMEOUT)
    bundle = Bundle.from_bytes(data)
    if bundle.id != evidence_id:
        raise PeerError(f"{stream.peer_id} sent other evidence than was asked for", stream.peer_id)
    return bundle
