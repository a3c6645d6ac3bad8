"""Whether an answer is right: from its tokens, the receipts of the servers that computed it, and own weights alone.

For servers of the exact kind (docs/exact.md). The tokens are embedded, and go through the blocks, one after the other
in memory; what leaves the last block of each server has to have the digests that it has signed. Nothing depends on how
the text was cut into steps, so all of it is computed at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal

import torch

from ...crypto.receipts import Receipt
from ...protocols import wire_pb2 as wire
from ...protocols.framing import INT8_BLOCK, TensorError
from ...protocols.ids import Span
from ...protocols.inference import hash_of_step, sha256
from ...protocols.tensors import DTYPES, decode, encode
from ..blocks.client_part import ClientModel, load_client
from ..errors import BadInput
from ..models import ModelFolder, compute_manifest
from ..models.progress import Progress, no_progress
from ..models.quantisation import is_exact
from ..trust.receipt_file import AnswerTokens, SignedReply
from .recomputation import Recomputation, RecordedStep, SessionAnswer, SessionQuestion

Verdict = Literal["yes", "no", "unknown"]


@dataclass(frozen=True)
class SignedAnswers:
    """What one server has signed in a session.

    Attributes:
        digests: for each step of the question, SHA-256 of the answer as it travelled under `codec`; empty where that is
            not known.
    """

    dtype: str
    quantisation: str
    question: SessionQuestion
    codec: str
    digests: tuple[bytes, ...]


def recompute(
    folder: Path, signed: SignedAnswers, progress: Progress = no_progress
) -> tuple[int | None, tuple[torch.Tensor, ...]]:
    """The first step whose digest is wrong, None if all are right; and the right answers, before the codec.

    Raises:
        PetalnodeError: as `Recomputation.answer`.
    """
    (found,) = Recomputation(folder, signed.dtype, signed.quantisation, "cpu", progress).answer([signed.question])
    assert isinstance(found, SessionAnswer)
    digests = zip(signed.digests, found.outputs, strict=True)
    right = (not digest or sha256(encode(output, signed.codec)[1]) == digest for digest, output in digests)
    return next((index for index, is_right in enumerate(right) if not is_right), None), found.outputs


@dataclass(frozen=True)
class WrongReply:
    """A reply that is not what the model computes for the tokens. `proven`: its receipts alone show that the server was
    asked for that; else its session began before them."""

    peer_id: str
    blocks: Span
    token: int
    proven: bool


@dataclass(frozen=True)
class AnswerFindings:
    """`right`: how many replies have the digests of what was computed here; `likeliest`: how many of the answer's
    `tokens` are the most likely ones."""

    verdict: Verdict
    reason: str
    wrong: tuple[WrongReply, ...]
    right: int
    tokens: int
    likeliest: int

    def fields(self) -> dict[str, Any]:
        """Of the JSON object."""
        wrong = [{**asdict(one), "blocks": [one.blocks.start, one.blocks.end]} for one in self.wrong]
        return {**asdict(self), "wrong": wrong}


def check_answers(
    folder: ModelFolder, replies: Sequence[SignedReply], progress: Progress = no_progress
) -> list[AnswerFindings]:
    """One for each answer. Takes as long as the recomputation.

    Raises:
        BadInput: the tokens are not there, the servers are not of the exact kind, or the model is another one.
        MachineError: this machine cannot compute the exact kind.
    """
    if not replies or any(reply.answer is None or reply.step is None or reply.asked is None for reply in replies):
        raise BadInput(
            "the file does not say what was asked: save GET /v1/petalnode/receipts/ID?tokens=true of an answer "
            "without pictures and adapters"
        )
    version, here = replies[0].receipt.model_version, compute_manifest(folder, progress).version
    if version != here:
        raise BadInput(
            f"the receipts are for model version {version.hex()[:12]}; {folder.path} is {here.hex()[:12]}: name the "
            "model that they are for"
        )
    steps = [_SignedStep.of(reply, folder) for reply in replies]
    client = load_client(folder.path, device="cpu", dtype=steps[0].asked.dtype)
    return [
        _AnswerCheck(folder, client, list(group), progress).findings()
        for _, group in groupby(steps, lambda step: id(step.answer))
    ]


@dataclass(frozen=True)
class _SignedStep:
    """A reply of which all is known that its recomputation takes."""

    peer_id: str
    receipt: Receipt
    step: wire.Step
    asked: wire.Tensor
    answer: AnswerTokens

    @property
    def start(self) -> int:
        return self.step.position

    @property
    def end(self) -> int:
        return self.step.position + self.asked.shape[1]

    @classmethod
    def of(cls, reply: SignedReply, folder: ModelFolder) -> _SignedStep:
        """Raises BadInput: it cannot be computed to the bit."""
        receipt, step, asked, answer = reply.receipt, reply.step, reply.asked, reply.answer
        assert step is not None and asked is not None and answer is not None
        if not is_exact(receipt.quantisation):
            raise BadInput(
                f"server {reply.peer_id} does not compute the same bits as others (petalnode serve --exact), so its "
                "replies cannot be checked by their digests"
            )
        span, shape = Span(*receipt.span), list(asked.shape)
        if receipt.adapter or step.reorder or step.long_factors or step.positions:
            raise BadInput("answers with adapters, pictures, long factors or several rows are not computed from tokens")
        width = folder.boundaries.width(span.start)
        if len(shape) != 3 or (shape[0], shape[2]) != (1, width) or not shape[1]:
            raise BadInput(f"the receipts tell of tensors of {shape[:8]}, and the model's width is {width}")
        if asked.dtype not in DTYPES or not 0 <= span.start < span.end <= folder.num_blocks:
            raise BadInput(f"{folder.name} has no blocks {span} that take {asked.dtype[:40]!r}")
        widths = map(folder.boundaries.width, receipt.span)
        if asked.codec == "int8-block64" and any(width % INT8_BLOCK for width in widths):
            raise BadInput("under this codec a token depends on those beside it")
        return cls(reply.peer_id, receipt, step, asked, answer)


class _AnswerCheck:
    """The steps of one answer, against what is computed here."""

    def __init__(
        self, folder: ModelFolder, client: ClientModel, steps: Sequence[_SignedStep], progress: Progress
    ) -> None:
        self._folder = folder
        self._client = client
        self._steps = steps
        self._progress = progress
        self._answer = steps[0].answer
        self._codec = steps[0].asked.codec
        if any((step.asked.dtype, step.asked.codec) != (steps[0].asked.dtype, self._codec) for step in steps):
            raise BadInput("the hidden states of the answer travelled in several forms")
        vocabulary = client.model.get_input_embeddings().weight.shape[0]
        tokens = self._answer.tokens
        if not tokens or not 0 < self._answer.prompt <= len(tokens) or not 0 <= min(tokens) <= max(tokens) < vocabulary:
            raise BadInput("the file has tokens that the model does not know, or none of an answer")

    @property
    def _segments(self) -> list[Span]:
        """The blocks between neighbouring junctions. Raises BadInput: no chain passes them all."""
        steps = self._steps
        ends = {0, self._folder.num_blocks, *(block for step in steps for block in step.receipt.span)}
        segments = [Span(start, end) for start, end in pairwise(sorted(ends))]
        rounded = self._codec != "none" or steps[0].asked.dtype != "float32"
        if rounded and any(Span(*step.receipt.span) not in segments for step in steps):
            raise BadInput(
                "hidden states were rounded between servers whose blocks overlap: no one chain computed this"
            )
        return segments

    def _numerics(self, segment: Span) -> tuple[str, str]:
        kinds = {
            (step.receipt.dtype, step.receipt.quantisation)
            for step in self._steps
            if Span(*step.receipt.span).covers(segment)
        }
        if len(kinds) != 1:
            what = "servers that compute in several kinds" if kinds else "no server"
            raise BadInput(f"the receipts have {what} for blocks {segment}")
        return kinds.pop()

    def _junctions(self) -> dict[int, torch.Tensor]:
        """What is right at each junction, before it travels: float [1, tokens, hidden size] by the block behind it."""
        hidden = self._client.embed(torch.tensor([self._answer.tokens]))
        junctions = {0: hidden}
        for segment in self._segments:
            entering = decode(*encode(hidden, self._codec))
            question = SessionQuestion(segment, (RecordedStep(0, entering),))
            signed = SignedAnswers(*self._numerics(segment), question, self._codec, (b"",))
            _, (hidden,) = recompute(self._folder.path, signed, self._progress)
            junctions[segment.end] = hidden
        return junctions

    def findings(self) -> AnswerFindings:
        try:
            junctions = self._junctions()
        except TensorError as error:
            raise BadInput(f"the tokens cannot be computed: {error}") from None
        sessions: dict[tuple[str, bytes], list[_SignedStep]] = {}
        for step in self._steps:
            sessions.setdefault((step.peer_id, step.receipt.session_epoch), []).append(step)
        judged = [self._judged(steps, junctions) for steps in sessions.values()]
        wrong = tuple(found for _, found, _ in judged if found is not None)
        right = [step for steps, _, _ in judged for step in steps]
        others = any(strange for _, _, strange in judged)
        likeliest = self._likeliest(junctions[self._folder.num_blocks])
        verdict, reason = self._verdict(wrong, right, others)
        made = len(self._answer.tokens) - self._answer.prompt
        return AnswerFindings(verdict, reason, wrong, len(right), made, likeliest)

    def _likeliest(self, hidden: torch.Tensor) -> int:
        prompt, tokens = self._answer.prompt, torch.tensor(self._answer.tokens)
        following = torch.split(tokens[prompt:], 64)  # 12 MB of logits for a vocabulary of 49,152
        before = torch.split(hidden[:, prompt - 1 : -1], 64, dim=1)
        pairs = zip(before, following, strict=True)
        return sum(int((self._client.head(part)[0].argmax(-1) == chosen).sum()) for part, chosen in pairs)

    def _judged(
        self, steps: Sequence[_SignedStep], junctions: Mapping[int, torch.Tensor]
    ) -> tuple[list[_SignedStep], WrongReply | None, bool]:
        """Of one session: the steps with right digests, the first wrong one, and whether one was for something else
        than the tokens make. What follows that is not judged: another state may follow from it."""
        right: list[_SignedStep] = []
        begun = steps[0].receipt.sequence == 1 and steps[0].start == 0
        for number, step in enumerate(steps):
            if step.end > len(self._answer.tokens) or any(later.start < step.end for later in steps[number + 1 :]):
                continue  # drafts, of which some were not wanted
            entered, left = (
                encode(junctions[block][:, step.start : step.end], self._codec)[1] for block in step.receipt.span
            )
            if sha256(left) == step.receipt.reply_hash:
                right.append(step)
            elif hash_of_step(step.step, step.asked, sha256(entered)) != step.receipt.request_hash:
                return right, None, True
            else:
                return right, WrongReply(step.peer_id, Span(*step.receipt.span), step.start, begun), False
        return right, None, False

    def _verdict(self, wrong: Sequence[WrongReply], right: Sequence[_SignedStep], others: bool) -> tuple[Verdict, str]:
        if wrong:
            said = [
                f"server {one.peer_id} (blocks {one.blocks}) has signed another answer for token {one.token}"
                for one in wrong
            ]
            return "no", "; ".join(said)
        if others:
            return "no", "the servers were asked for other tokens than those of the file"
        needed = range(self._answer.prompt - 1, len(self._answer.tokens) - 1)
        for segment in self._segments:
            spans = [range(step.start, step.end) for step in right if segment.start in Span(*step.receipt.span)]
            missing = [token for token in needed if not any(token in span for span in spans)]
            if missing:
                what = f"no receipt shows what blocks {segment} answered for token {missing[0]}"
                return "unknown", f"{what}, and {len(missing) - 1} others"
        return "yes", "every reply has the digests of what the model computes for these tokens"
