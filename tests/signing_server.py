"""A server without a network: answers what it is asked with real blocks, or with something else, and signs it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from petalnode.crypto.identity import Identity
from petalnode.crypto.pledge import Pledge
from petalnode.crypto.receipts import NO_RECEIPT, Receipt
from petalnode.node.blocks.cache import SpanCache
from petalnode.node.blocks.passes import Batch, SpanPasses, run_through
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.models.folder import ModelFolder
from petalnode.node.models.quantisation import Kernels
from petalnode.node.trust.receipt_log import LoggedBatch, SessionLog
from petalnode.node.verification.observed import observed_session
from petalnode.node.verification.verdicts import Judge, Verdict
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import hash_of_step, pledge_to_wire, root_of, sha256
from petalnode.protocols.tensors import decode, encode
from petalnode.protocols.training import BACKWARD, FORWARD, KeptSet, MicroBatch, hash_of_payloads
from tests.messages import opening
from tests.receipts import unsigned

Spoil = Callable[[torch.Tensor], torch.Tensor]


def honest(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def spoiled(tensor: torch.Tensor) -> torch.Tensor:
    """A tenth too much, in random directions."""
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(5))
    return tensor + 0.1 * noise * tensor.norm(dim=-1, keepdim=True) / noise.norm(dim=-1, keepdim=True)


def probed(folder: ModelFolder, log: SessionLog) -> Verdict:
    """What a validator finds whose probe this was."""
    seen = observed_session(log, "cpu")
    assert seen is not None
    judge = Judge(folder.path)
    (compared,) = judge.compare([seen])
    return judge.verdict(compared)


class SigningServer:
    """Serves `span` of the model in `folder`, whose version is `version`."""

    def __init__(
        self,
        folder: Path,
        version: bytes,
        span: Span,
        *,
        dtype: str = "float32",
        quant: str = "none",
        kernels: Kernels = "torch",
    ) -> None:
        self.identity = Identity.generate()
        self.client = Identity.generate()
        self.version = version
        self.span = span
        self.dtype = dtype
        self.quant = quant
        self.blocks: BlockSpan = load_span(folder, span, device="cpu", dtype=dtype, quantisation=quant, kernels=kernels)
        now = time.time_ns() // 1_000_000
        self.pledge = Pledge(
            self.identity.peer_id, version, (span.start, span.end), dtype, quant, 10, now - 1000, now + 100_000
        ).signed(self.identity)

    def _computed(self, hidden: torch.Tensor, cache: SpanCache) -> torch.Tensor:
        if hidden.shape[1] == 1 and self.blocks.step is not None:
            (output,) = self.blocks.decode([(hidden, cache)])
            return output
        return self.blocks.forward(hidden, cache)

    def session(
        self,
        steps: Sequence[tuple[int, torch.Tensor, Sequence[int]]],
        *,
        spoil: Spoil = honest,
        left_padding: Sequence[int] = (),
        codec: str = "none",
        log: SessionLog | None = None,
        **signed: object,
    ) -> SessionLog:
        """The client's log of a session of (position, hidden, reorder): a new one, or `log`.

        The last answer is spoiled, and its receipt says what `signed` says.
        """
        session = SignedSession(self, steps[0][1].shape[0], left_padding, codec, log)
        for number, asked in enumerate(steps, 1):
            output = self._computed(session.asked(*asked), session.cache)
            if number < len(steps):
                session.answered(output)
            else:
                session.answered(spoil(output), **signed)
        return session.log

    def work(
        self,
        hidden: torch.Tensor,
        gradient: torch.Tensor | None = None,
        *,
        spoil: Spoil = honest,
        prompts: torch.Tensor | None = None,
        spoil_kept: Spoil = honest,
    ) -> LoggedBatch:
        """The client's log of one pass; in a backward pass with deep `prompts`, with their gradient too."""
        protocol = (FORWARD if gradient is None else BACKWARD).id
        sent = [encode(tensor, "none") for tensor in (hidden, gradient) if tensor is not None]
        work = wire.BatchRequest(sequence=1, tensors=[tensor for tensor, _ in sent])
        passes = SpanPasses(self.blocks, 1 << 40)
        passing = (
            passes.forward(Batch(self.span, hidden))
            if gradient is None
            else passes.backward(Batch(self.span, hidden, None, None, prompts), gradient)
        )
        result = run_through(passing)
        _, answer = encode(spoil(result if isinstance(result, torch.Tensor) else result.hidden), "none")
        kept, answers = None, [answer]
        if prompts is not None:
            described, payload = encode(prompts, "none")
            kept = KeptSet.of(wire.Keep(number=1, names=["prompts"], tensors=[described]), [payload])
            work.kept = 1
            answers.append(encode(spoil_kept(result.prompts), "none")[1])
        asked = MicroBatch(work, tuple(payload for _, payload in sent), kept)
        receipt = self.receipt(
            nonce=os.urandom(16),
            session_epoch=os.urandom(16),
            sequence=1,
            request_hash=asked.hash(protocol),
            reply_hash=hash_of_payloads(answers),
            previous_receipt=NO_RECEIPT,
        )
        return LoggedBatch(self.identity.peer_id, protocol, receipt, asked, tuple(answers))

    def receipt(self, **fields: object) -> Receipt:
        span = self.span.start, self.span.end
        usual = {"model_version": self.version, "span": span, "dtype": self.dtype, "quantisation": self.quant}
        return unsigned(**{"client": self.client.peer_id} | usual | fields).signed(self.identity)


class SignedSession:
    """A session at a server, and the client's `log` of it. Who asks computes what goes from `asked` to `answered`."""

    def __init__(
        self,
        server: SigningServer,
        rows: int,
        left_padding: Sequence[int] = (),
        codec: str = "none",
        log: SessionLog | None = None,
    ) -> None:
        self.log = log or SessionLog(server.identity.peer_id, keeps_tensors=True)
        self.cache = server.blocks.make_cache(rows, 100, list(left_padding) or None)
        self._server = server
        asked = {"max_length": 100, "batch": rows, "left_padding": left_padding, "codec": codec}
        self._opening = opening(server.span, model_version=server.version, nonce=os.urandom(16), **asked)
        granted = wire.Granted(session_epoch=os.urandom(16), pledge=pledge_to_wire(server.pledge))
        self.log.begin(self._opening, granted)
        self._epoch = granted.session_epoch
        self._last = root_of(self._opening, server.client.peer_id, self._epoch, server.pledge.hash())
        self._sequence = 0
        self._request_hash = b""

    def asked(self, position: int, hidden: torch.Tensor, reorder: Sequence[int] = ()) -> torch.Tensor:
        """The next step's input as it arrives; the cache is where the step starts."""
        self._sequence += 1
        tensor, payload = encode(hidden, self._opening.codec)
        step = wire.Step(sequence=self._sequence, position=position, reorder=reorder, route_epoch=1)
        if position < self.cache.length:
            self.cache.rollback(position)
        if reorder:
            self.cache.reorder(reorder)
        self._request_hash = hash_of_step(step, tensor, sha256(payload))
        self.log.asked(step, tensor, payload)
        return decode(tensor, payload)

    def answered(self, output: torch.Tensor, **signed: object) -> None:
        """Signs the answer to that step. The receipt says what `signed` says."""
        _, answer = encode(output, self._opening.codec)
        fields = {
            "nonce": self._opening.nonce,
            "session_epoch": self._epoch,
            "sequence": self._sequence,
            "request_hash": self._request_hash,
            "reply_hash": sha256(answer),
            "previous_receipt": self._last,
        }
        receipt = self._server.receipt(**fields | signed)
        self.log.answered(self._sequence, receipt, answer)
        self._last = receipt.hash()
