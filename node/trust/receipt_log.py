"""The receipts that a client keeps, with the requests that they are for. Bounded; no clock, no network.

A receipt alone proves what a server signed. To judge whether that was right, an auditor has to see the request. For a
step of a session it has to see all steps before it. A client that shares its receipts keeps the tensors too, as long as
there is room; most of them are in memory anyway, because a session is replayed from them.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Final
from weakref import WeakSet

from ...crypto.receipts import Receipt
from ...protocols import wire_pb2 as wire
from ...protocols.training import MicroBatch


@dataclass(frozen=True)
class KeptReceipts:
    """How many receipts of each kind are kept to show them to auditors."""

    last_receipts: int = 256  # Receipts of one session, by a client that does not share them; about 2 KB apiece
    last_shared: int = 4096
    """Receipts of one session, by a client that shares them: a longer one cannot be audited from its beginning."""
    last_sessions: int = 64  # Sessions at single servers, of a client that shares its receipts
    last_batches: int = 64
    shared_bytes: int = 256 << 20  # Bytes of tensors that a client keeps for auditors, all sessions together
    max_pending: int = 1024


KEPT_RECEIPTS: Final = KeptReceipts()


@dataclass(frozen=True)
class LoggedStep:
    """A step that a server answered. `step` is None if the request is forgotten; tensors that are not kept are None.
    `asked` is the header of `input`; the output has the same shape, dtype and codec."""

    receipt: Receipt
    step: wire.Step | None
    asked: wire.Tensor | None
    input: bytes | bytearray | None
    output: bytes | bytearray | None


@dataclass(frozen=True)
class LoggedBatch:
    """A batch request that a server answered; `outputs` are the payloads of the reply's tensors."""

    peer_id: str
    protocol: str
    receipt: Receipt
    asked: MicroBatch
    outputs: tuple[bytes | bytearray, ...]
    pledge: wire.Pledge | None = None

    @property
    def nbytes(self) -> int:
        kept = self.asked.kept.payloads if self.asked.kept is not None else ()
        return sum(map(len, (*self.asked.payloads, *kept, *self.outputs)))


class SessionLog:
    """The receipts of one session at one server, in order. With `keeps_tensors`, the tensors of steps and replies too.

    A step that was not wanted in the end (a wrong draft) has its receipt and input here, too, at every server of the
    chain: the receipts of later steps follow, and who recomputes those checks by its header that it was rolled back.
    `others` are the logs among which that of the next server is.

    Attributes:
        opening, granted: how it was opened; None before that, and of a session that another process has opened.
        prefix: headers and bytes of what had entered, in an earlier session, for the tokens that it began with.
        complete: whether every receipt since then is here, with its step.
        nbytes: of the tensors that are kept.
    """

    def __init__(
        self,
        peer_id: str,
        *,
        keeps_tensors: bool = False,
        limit: int | None = None,
        others: Iterable[SessionLog] = (),
    ) -> None:
        self.peer_id = peer_id
        self.opening: wire.Open | None = None
        self.granted: wire.Granted | None = None
        self.prefix: tuple[tuple[wire.Tensor, bytes | bytearray], ...] = ()
        self.complete = False
        self.nbytes = 0
        self._keeps = keeps_tensors
        self._others = others
        self._entries: deque[LoggedStep] = deque()
        self._limit = limit or (KEPT_RECEIPTS.last_shared if keeps_tensors else KEPT_RECEIPTS.last_receipts)
        self._pending: OrderedDict[int, tuple[wire.Step, wire.Tensor, bytes | bytearray | None]] = OrderedDict()

    @property
    def entries(self) -> Sequence[LoggedStep]:
        return self._entries

    def begin(self, opening: wire.Open, granted: wire.Granted) -> None:
        self.opening = opening
        self.granted = granted
        self.complete = not granted.prefix_tokens

    def begins_with(self, prefix: Sequence[tuple[wire.Tensor, bytes | bytearray]]) -> None:
        """Notes what had entered for all tokens that the server granted."""
        self.complete = self.granted is not None
        if self._keeps:
            self.prefix = tuple(prefix)
            self.nbytes += sum(len(payload) for _, payload in prefix)

    def asked(self, step: wire.Step, tensor: wire.Tensor, payload: bytes | bytearray) -> None:
        """Notes a step that is sent, or that another server has pushed."""
        self._pending[step.sequence] = (step, tensor, payload if self._keeps else None)
        if len(self._pending) > KEPT_RECEIPTS.max_pending:
            self._pending.popitem(last=False)

    def waiting(self, sequence: int) -> tuple[wire.Step, wire.Tensor, bytes | bytearray | None] | None:
        """The step of this number, which is not answered, with header and bytes of its tensor; None if not known."""
        return self._pending.get(sequence)

    def forget(self, sequence: int) -> None:
        """The step of this number was not what is noted here."""
        self._pending.pop(sequence, None)

    def pushed_on(self, nonce: bytes, step: wire.Step, tensor: wire.Tensor, payload: bytes | bytearray) -> None:
        """Notes in the log of the session with this nonce what this server has pushed there."""
        for other in self._others:
            if other.opening is not None and other.opening.nonce == nonce:
                other.asked(step, tensor, payload)

    def answered(self, sequence: int, receipt: Receipt, output: bytes | bytearray | None) -> None:
        """Notes a receipt whose signature and place in the chain were checked."""
        for old in [number for number in self._pending if number < sequence]:
            del self._pending[old]
        step, tensor, payload = self._pending.pop(sequence, (None, None, None))
        kept = output if self._keeps else None
        self.complete = self.complete and step is not None
        self.nbytes += len(payload or b"") + len(kept or b"")
        self._entries.append(LoggedStep(receipt, step, tensor, payload, kept))
        if len(self._entries) > self._limit:
            oldest = self._entries.popleft()
            self.nbytes -= len(oldest.input or b"") + len(oldest.output or b"")
            self.complete = False

    def find(self, sequence: int) -> Receipt | None:
        """The receipt of this request, if it is one of the last few."""
        last = islice(reversed(self._entries), 16)
        return next((entry.receipt for entry in last if entry.receipt.sequence == sequence), None)

    def forget_tensors(self) -> None:
        """Keeps the receipts only, from now on."""
        self._keeps = False
        self.prefix = ()
        self._pending = OrderedDict((key, (step, tensor, None)) for key, (step, tensor, _) in self._pending.items())
        self._entries = deque(LoggedStep(entry.receipt, entry.step, entry.asked, None, None) for entry in self._entries)
        self.nbytes = 0


class ReceiptArchive:
    """What a client that shares its receipts keeps of its last sessions and batch requests; the oldest go first.

    `shared_bytes` is the room for tensors, 0 for a client that does not share: the log of a session then lives as long
    as the session.
    """

    def __init__(self, shared_bytes: int = 0) -> None:
        self._room = shared_bytes
        self._sessions: deque[SessionLog] = deque(maxlen=KEPT_RECEIPTS.last_sessions)
        self._living: WeakSet[SessionLog] = WeakSet()  # those of open sessions, and those that are kept
        self._batches: deque[LoggedBatch] = deque(maxlen=KEPT_RECEIPTS.last_batches)

    @property
    def shares(self) -> bool:
        return self._room > 0

    @property
    def sessions(self) -> Sequence[SessionLog]:
        return self._sessions

    @property
    def batches(self) -> Sequence[LoggedBatch]:
        """With their tensors; none are kept by a client that does not share them."""
        return self._batches

    def session(self, peer_id: str) -> SessionLog:
        """A log for a new session at a server."""
        self._make_room()
        log = SessionLog(peer_id, keeps_tensors=self.shares, others=self._living)
        self._living.add(log)
        if self.shares:
            self._sessions.append(log)
        return log

    def add_batch(self, batch: LoggedBatch) -> None:
        if self.shares and batch.nbytes <= self._room // 4:
            self._batches.append(batch)
            self._make_room()

    def _make_room(self) -> None:
        used = sum(log.nbytes for log in self._sessions) + sum(batch.nbytes for batch in self._batches)
        while used > self._room and self._batches:
            used -= self._batches.popleft().nbytes
        for log in self._sessions:
            if used <= self._room:
                break
            used -= log.nbytes
            log.forget_tensors()
