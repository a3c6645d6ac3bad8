"""Receipts of answers: kept by a client, as a file, and what they show to somebody who was not there.

They show who computed which blocks for which client, and when. They also show that no server signed two different
streams of replies. That the replies were right is another matter: of servers of the exact kind it follows from the
tokens, if they are in the file, and own weights (`verification.answer_check`); else `petalnode validate` recomputes.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from operator import index as whole
from pathlib import Path
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError, Message

from ...crypto.bounded_json import BadJson, JsonLimits, parse_json_object
from ...crypto.receipts import Receipt
from ...protocols import wire_pb2 as wire
from ...protocols.delimited import parse_message
from ...protocols.inference import receipt_from_wire, receipt_to_wire
from ..errors import BadInput

M = TypeVar("M", bound=Message)
FORMAT: Final = "petalnode-receipts/1"
FILE: Final = JsonLimits(nbytes=64 << 20, values=1 << 20)
"""Some 30,000 receipts, or one answer with a million tokens."""
MAX_KEPT: Final = 16_384
"""Receipts; about 2 KB apiece."""


@dataclass(frozen=True)
class AnswerTokens:
    """The tokens of a prompt, `prompt` of them, and of the answer to it."""

    tokens: tuple[int, ...]
    prompt: int


@dataclass(frozen=True)
class SignedReply:
    """A receipt with the server that is said to have signed it.

    `step`, `asked`: the request that it is for and the header of its tensor; `answer`: to which it belongs. None where
    that is not told.
    """

    peer_id: str
    receipt: Receipt
    step: wire.Step | None = None
    asked: wire.Tensor | None = None
    answer: AnswerTokens | None = None


@dataclass(frozen=True)
class ServerWork:
    """What the receipts of one session at one server show."""

    peer_id: str
    blocks: tuple[int, int]
    replies: int
    first_ms: int
    last_ms: int


@dataclass(frozen=True)
class Findings:
    """Of a file: whose work it shows, and what is wrong with it, a sentence each."""

    work: tuple[ServerWork, ...]
    wrong: tuple[str, ...]


def digest_of(replies: Iterable[SignedReply]) -> bytes:
    """SHA-256 over the hashes of the receipts, in order: what an answer can carry in the place of them all."""
    found = hashlib.sha256()
    for reply in replies:
        found.update(reply.receipt.hash())
    return found.digest()


def to_json(name: str, replies: Sequence[SignedReply], *, tokens: bool = False) -> dict[str, Any]:
    """The file's JSON object; `receipt` is `wire.Receipt` in base64, what stands beside it is for people. With `tokens`
    it has the text, too, and all else from which the replies can be computed again."""
    return {
        "format": FORMAT,
        "id": name,
        "digest": digest_of(replies).hex(),
        **({"answers": _answers(replies)} if tokens else {}),
        "receipts": [
            {
                "peer_id": reply.peer_id,
                "blocks": list(reply.receipt.span),
                "sequence": reply.receipt.sequence,
                "time_ms": reply.receipt.time_ms,
                "receipt": _base64(receipt_to_wire(reply.receipt)),
                **({"step": _base64(reply.step)} if tokens and reply.step is not None else {}),
                **({"tensor": _base64(reply.asked)} if tokens and reply.asked is not None else {}),
            }
            for reply in replies
        ],
    }


def _base64(message: Message) -> str:
    return base64.b64encode(message.SerializeToString()).decode()


def _answers(replies: Sequence[SignedReply]) -> list[dict[str, Any]]:
    """The tokens of each answer, and how many of the receipts, which stand in the same order, are of it."""
    groups = [list(group) for _, group in groupby(replies, lambda reply: id(reply.answer))]
    return [
        {"tokens": list(answer.tokens), "prompt_tokens": answer.prompt, "receipts": len(group)}
        for group in groups
        if (answer := group[0].answer) is not None
    ]


def load(path: Path) -> tuple[bytes, list[SignedReply]]:
    """The digest that the file states, and its receipts.

    Raises:
        BadInput: it cannot be read, or is no such file.
    """
    try:
        if path.stat().st_size > FILE.nbytes:
            raise BadInput(f"{path} has more than {FILE.nbytes >> 20} MiB: it is no file of receipts")
        data = parse_json_object(path.read_bytes(), FILE)
        if data["format"] != FORMAT:
            raise ValueError
        answers: list[AnswerTokens] = []
        for said in data.get("answers", ()):
            answer = AnswerTokens(tuple(map(whole, said["tokens"])), whole(said["prompt_tokens"]))
            answers += [answer] * min(whole(said["receipts"]), len(data["receipts"]) - len(answers))
        read = zip_longest(data["receipts"], answers)
        return bytes.fromhex(data["digest"]), [_read(entry, answer) for entry, answer in read]
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except BadJson as error:
        raise BadInput(f"{path} is no file of receipts: {error}") from None
    except (ValueError, LookupError, TypeError, DecodeError):
        raise BadInput(
            f"{path} is no file of receipts: save what GET /v1/petalnode/receipts/ID of `petalnode api` says"
        ) from None


def _read(entry: dict[str, Any], answer: AnswerTokens | None) -> SignedReply:
    receipt = receipt_from_wire(_message(wire.Receipt, entry["receipt"]))
    step = _message(wire.Step, entry["step"]) if "step" in entry else None
    asked = _message(wire.Tensor, entry["tensor"]) if "tensor" in entry else None
    return SignedReply(str(entry["peer_id"]), receipt, step, asked, answer)


def _message(kind: type[M], text: str) -> M:
    try:
        # A step says where it is pushed to, and of pictures where each token stands.
        return parse_message(kind, base64.b64decode(text, validate=True), most=1024)
    except binascii.Error as error:
        raise ValueError from error


def check(stated: bytes, replies: Sequence[SignedReply]) -> Findings:
    """What the receipts show, and what is wrong with them."""
    wrong: list[str] = []
    if stated != digest_of(replies):
        wrong.append("the digest of the file is not that of its receipts")
    sessions: dict[tuple[str, bytes], list[Receipt]] = {}
    for index, reply in enumerate(replies):
        if not _is_signed(reply):
            wrong.append(f"receipt {index + 1} is not signed by {reply.peer_id}")
        sessions.setdefault((reply.peer_id, reply.receipt.session_epoch), []).append(reply.receipt)
    for (peer_id, _), receipts in sessions.items():
        wrong += _wrong_in_session(peer_id, receipts)
    for name, values in (
        ("clients", {reply.receipt.client for reply in replies}),
        ("versions of a model", {reply.receipt.model_version for reply in replies}),
        ("adapters", {reply.receipt.adapter for reply in replies}),
    ):
        if len(values) > 1:
            wrong.append(f"the receipts are for {len(values)} {name}")
    if not replies:
        wrong.append("there are no receipts")
    work = tuple(
        ServerWork(peer_id, receipts[0].span, len(receipts), receipts[0].time_ms, receipts[-1].time_ms)
        for (peer_id, _), receipts in sessions.items()
    )
    return Findings(tuple(sorted(work, key=lambda server: server.blocks)), tuple(wrong))


def _is_signed(reply: SignedReply) -> bool:
    try:
        return reply.receipt.is_signed_by(reply.peer_id)
    except ValueError:  # no peer id
        return False


def _wrong_in_session(peer_id: str, receipts: Sequence[Receipt]) -> list[str]:
    wrong = []
    for before, after in pairwise(receipts):
        if after.previous_receipt != before.hash():
            wrong.append(f"the receipts {before.sequence} and {after.sequence} of {peer_id} do not follow each other")
        if after.span != before.span:
            wrong.append(f"{peer_id} has signed for blocks {before.span} and {after.span} in one session")
    return wrong


class AnswerReceipts:
    """The receipts of the last answers, by the ids of the responses; the oldest go first."""

    def __init__(self, most: int = MAX_KEPT) -> None:
        self._most = most
        self._kept: OrderedDict[str, tuple[str, tuple[SignedReply, ...]]] = OrderedDict()
        self._count = 0

    def keep(self, owner: str, name: str, replies: Sequence[SignedReply]) -> None:
        """Keeps those of the response `name` for the owner of the key that asked."""
        before = self._kept.pop(name, None)
        self._kept[name] = owner, tuple(replies)
        self._count += _room(replies) - (0 if before is None else _room(before[1]))
        while self._count > self._most and len(self._kept) > 1:
            _, (_, dropped) = self._kept.popitem(last=False)
            self._count -= _room(dropped)

    def find(self, owner: str, name: str) -> tuple[SignedReply, ...] | None:
        """None if there are none, or they are another owner's."""
        kept_for, replies = self._kept.get(name, ("", ()))
        return replies if name in self._kept and kept_for == owner else None


def _room(replies: Sequence[SignedReply]) -> int:
    """What an answer counts for; one without receipts has a name too."""
    return max(1, len(replies))
