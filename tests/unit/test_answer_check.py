"""What tokens, receipts and weights say of an answer: honest servers are right, one bit names the server that changed
it, and a file that tells of other tokens names nobody."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from petalnode.crypto.identity import Identity
from petalnode.crypto.receipts import NO_RECEIPT, Receipt
from petalnode.node.blocks.client_part import ClientModel, load_client
from petalnode.node.blocks.kernels.library import library
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.errors import BadInput
from petalnode.node.models import ModelFolder, compute_manifest, resolve
from petalnode.node.trust.receipt_file import AnswerTokens, SignedReply, check, load, to_json
from petalnode.node.verification.answer_check import AnswerFindings, check_answers
from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.ids import Span
from petalnode.protocols.inference import hash_of_step, sha256
from petalnode.protocols.tensors import decode, encode
from tests.receipts import unsigned
from tests.tiny_models import save_tiny

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not built (make setup, with a C compiler)")
PROMPT, MADE = 5, 6
SPANS = (Span(0, 2), Span(2, 6))
Change = Callable[[int, int, torch.Tensor], None]
"""Of what a server (0 or 1) answers to its step (0: the prompt)."""


@dataclass(frozen=True)
class Model:
    folder: ModelFolder
    client: ClientModel
    spans: tuple[BlockSpan, ...]
    servers: tuple[Identity, ...]

    def answered(self, change: Change = lambda server, step, output: None, codec: str = "none") -> list[SignedReply]:
        """The receipts of an answer by two servers, of the tokens that are the likeliest ones."""
        tokens = list(range(3, 3 + PROMPT))
        caches = [span.make_cache(1, PROMPT + MADE) for span in self.spans]
        signed: list[list[tuple[Receipt, wire.Step, wire.Tensor]]] = [[], []]
        position = 0
        for number in range(MADE):
            hidden = self.client.embed(torch.tensor([tokens[position:]]), position)
            for server, (span, cache) in enumerate(zip(self.spans, caches, strict=True)):
                asked, payload = encode(hidden, codec)
                given, step = decode(asked, payload), wire.Step(sequence=number + 1, position=position)
                left = span.forward(given, cache).clone()
                change(server, number, left)
                described, answer = encode(left, codec)
                hidden = decode(described, answer)
                previous = signed[server][-1][0].hash() if signed[server] else NO_RECEIPT
                receipt = self._receipt(server, step, asked, payload, answer, previous)
                signed[server].append((receipt, step, asked))
            position = len(tokens)
            tokens.append(int(self.client.head(hidden[:, -1:])[0, 0].argmax()))
        told = AnswerTokens(tuple(tokens), PROMPT)
        return [
            SignedReply(identity.peer_id, *parts, told)
            for identity, replies in zip(self.servers, signed, strict=True)
            for parts in replies
        ]

    def _receipt(
        self, server: int, step: wire.Step, asked: wire.Tensor, payload: bytes, answer: bytes, previous: bytes
    ) -> Receipt:
        span = SPANS[server]
        return unsigned(
            model_version=compute_manifest(self.folder).version,
            span=(span.start, span.end),
            quantisation="none/exact-1",
            client=self.servers[0].peer_id,
            session_epoch=bytes([server]) * 16,
            sequence=step.sequence,
            request_hash=hash_of_step(step, asked, sha256(payload)),
            reply_hash=sha256(answer),
            previous_receipt=previous,
        ).signed(self.servers[server])

    def judged(self, replies: list[SignedReply]) -> AnswerFindings:
        (found,) = check_answers(self.folder, replies)
        return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = save_tiny("llama", tmp_path_factory.mktemp("answers") / "model")
    spans = tuple(load_span(path, span, device="cpu", dtype="float32", quantisation="none/exact-1") for span in SPANS)
    client = load_client(path, device="cpu", dtype="float32")
    return Model(resolve(str(path), need="all"), client, spans, (Identity.generate(), Identity.generate()))


def bit(of: int, at: int) -> Change:
    def change(server: int, step: int, output: torch.Tensor) -> None:
        if (server, step) == (of, at):
            output.view(torch.int32)[0, -1, 3] ^= 1 << 20

    return change


@pytest.mark.parametrize("codec", ["none", "bfloat16"])
def test_an_honest_answer_is_right(model: Model, codec: str, tmp_path: Path) -> None:
    replies = model.answered(codec=codec)
    file = tmp_path / "receipts.json"
    file.write_text(json.dumps(to_json("x", replies, tokens=True)))
    stated, read = load(file)
    assert check(stated, read).wrong == () and read == replies
    found = model.judged(read)
    assert (found.verdict, found.wrong, found.right) == ("yes", (), 2 * MADE), found
    assert found.tokens == MADE
    assert found.likeliest == MADE


@pytest.mark.parametrize("server", [0, 1])
@pytest.mark.parametrize("step", [0, 3])
def test_one_bit_names_the_server_that_changed_it(model: Model, server: int, step: int) -> None:
    found = model.judged(model.answered(bit(server, step)))
    (wrong,) = found.wrong
    assert found.verdict == "no" and wrong.proven
    assert (wrong.peer_id, wrong.blocks) == (model.servers[server].peer_id, SPANS[server])
    assert wrong.token == (PROMPT + step - 1 if step else 0)


def test_other_tokens_name_nobody(model: Model) -> None:
    replies = model.answered()
    tokens = list(replies[0].answer.tokens) if replies[0].answer is not None else []
    tokens[1] += 1
    told = AnswerTokens(tuple(tokens), PROMPT)
    found = model.judged([replace(reply, answer=told) for reply in replies])
    assert (found.verdict, found.wrong) == ("no", ()) and "other tokens" in found.reason


def test_a_request_that_was_another_names_nobody(model: Model) -> None:
    """A client that shows another header than the server signed for."""
    replies = model.answered(bit(0, 2))
    other = replace(replies[2], step=wire.Step(sequence=3, position=PROMPT + 1, route_epoch=7))
    found = model.judged([*replies[:2], other, *replies[3:]])
    assert (found.verdict, found.wrong) == ("no", ())


def test_older_session_proves_nothing_of_its_server(model: Model) -> None:
    replies = model.answered(bit(0, 3))
    found = model.judged([*replies[1:MADE], *replies[MADE:]])
    (wrong,) = found.wrong
    assert not wrong.proven


def test_where_receipt_is_missing_it_is_not_known(model: Model) -> None:
    replies = model.answered()
    found = model.judged(replies[:-1])
    assert found.verdict == "unknown" and "blocks 2:6" in found.reason


def test_drafts_that_nobody_wanted_are_left_out(model: Model) -> None:
    """A step behind which the session was rolled back tells of other tokens."""
    replies = model.answered()
    draft = replace(replies[2].receipt, sequence=90, reply_hash=bytes(32), request_hash=bytes(32))
    undone = replace(replies[2], receipt=draft)
    assert model.judged([*replies[:2], undone, *replies[2:]]).verdict == "yes"


def test_what_cannot_be_computed_is_said(model: Model) -> None:
    replies = model.answered()
    for changed, said in (
        ([replace(reply, answer=None) for reply in replies], "tokens=true"),
        ([replace(reply, asked=wire.Tensor(shape=[1, 1, 8], dtype="float32")) for reply in replies], "width"),
        ([replace(reply, answer=AnswerTokens((1, 10**12), 1)) for reply in replies], "does not know"),
        ([replace(replies[0], receipt=replace(replies[0].receipt, quantisation="none"))], "same bits"),
        ([replace(reply, receipt=replace(reply.receipt, model_version=bytes(32))) for reply in replies], "name the"),
        (replies[:MADE], "no server for blocks 2:6"),
        ([], "tokens=true"),
    ):
        with pytest.raises(BadInput, match=said):
            check_answers(model.folder, changed)
