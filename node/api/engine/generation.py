"""What is asked of a model, in one form for all endpoints, and what comes of it: requests, limits, events, counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from ...blocks.images.encoder import ImagePrompt
from ...client.deadlines import WaitHistogram
from ...client.generation.drafting import DraftCounts
from ...client.generation.sampling import Sampling
from ...client.session.trace import SessionTrace
from ...models.adapter import Adapter
from ...swarm.routing import Hop
from ...trust.receipt_file import SignedReply, digest_of
from ..errors import ApiError
from ..fields import BODY

GrammarKind = Literal["json_schema", "json_object", "regex", "choice"]


@dataclass(frozen=True)
class Grammar:
    """What an answer has to look like: `text` is a JSON schema, a regular expression, or a JSON list of choices."""

    kind: GrammarKind
    text: str


@dataclass(frozen=True)
class SessionOptions:
    """What a request asks of the sessions at the servers: `x_petalnode` in any interface.

    Attributes:
        trusted: peer ids of the servers that alone compute the first and the last `trusted_blocks` blocks.
        compare_chains: from 2 on, how many chains that share no server compute every step, and are compared.
        adapter: the name of one that servers hold; empty for that of the model.
        drafts: whether tokens may be guessed and checked several at once.
    """

    trusted: frozenset[str] = frozenset()
    trusted_blocks: int | None = None
    compare_chains: int = 1
    adapter: str = ""
    drafts: bool = True


PLAIN: Final = SessionOptions()


@dataclass(frozen=True)
class TextRequest:
    """What answers to texts have in common.

    Attributes:
        choices: answers to each prompt.
        max_tokens: None for as many as there is room for, up to the server's default.
        logprobs: whether the log-probability of each token is asked for; `top_logprobs` likeliest tokens beside it.
        include_progress: whether a stream tells how far the answer is, and which servers make it.
    """

    model: str
    sampling: Sampling
    max_tokens: int | None
    stream: bool
    grammar: Grammar | None
    choices: int = 1
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: int = 0
    include_usage: bool = True
    options: SessionOptions = PLAIN
    include_progress: bool = False


@dataclass(frozen=True)
class ChatRequest:
    """An answer to a conversation. `messages` and `tools` are as chat templates take them.

    Attributes:
        tool: "auto", "none" or "required", or the name of the function that has to be called.
    """

    text: TextRequest
    messages: tuple[dict[str, Any], ...]
    tools: tuple[dict[str, Any], ...] = ()
    tool: str = "auto"
    named: bool = False
    parallel: bool = True


@dataclass(frozen=True)
class CompletionRequest:
    """What follows prompts, as texts or as token ids."""

    text: TextRequest
    prompts: tuple[str | tuple[int, ...], ...]
    echo: bool = False


@dataclass(frozen=True)
class ApiLimits:
    """What the server grants.

    Attributes:
        context: tokens of a prompt and its answer; the model may allow fewer.
        answer_tokens: of an answer for which no limit is asked.
        answers: that are made at once; others wait.
        body_bytes: of a request.
        logprobs: log-probabilities of one request, about 100 bytes apiece until they are sent.
        state_values: of the hidden states that one request is given.
        grammar_seconds: for a form of answers to be made ready, `grammars` of them at once.
        kept, kept_seconds: conversations that keep their caches between two requests, and for how long.
    """

    context: int = 4096
    answer_tokens: int = 1024
    answers: int = 64
    body_bytes: int = BODY.max_bytes
    logprobs: int = 250_000
    state_values: int = 16 << 20
    grammar_seconds: float = 10.0
    grammars: int = 2
    kept: int = 16
    kept_seconds: float = 120.0


@dataclass(frozen=True)
class ServedModel:
    """A model id of the API: the base model alone, or with an adapter, or with one that servers hold by this name."""

    name: str
    adapter: Adapter | str | None = None


@dataclass(frozen=True)
class ChosenToken:
    """A token of a prompt or an answer. `logprob` is None for the first of a prompt, before which there is nothing.

    Attributes:
        top: the likeliest tokens in its place, (id, log-probability), likeliest first.
    """

    token: int
    logprob: float | None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(eq=False)
class ApiTallies:
    """What was answered so far, whatever the endpoint.

    Attributes:
        answers: choices that have ended, by their reason; "failed" for those that have an error.
        tokens: of answers ("completion"), and of their prompts ("cached" if they were not computed again, else
            "prompt").
        first_token: from the begin of a choice to its first token.
        on_answer: is called in the request's task with the model, each choice's end, and its session if the client
            makes traces.
    """

    answers: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    first_token: WaitHistogram = field(default_factory=WaitHistogram)
    on_answer: Callable[[str, Finished, SessionTrace | None], None] | None = None


@dataclass(frozen=True)
class TextPiece:
    """What came of one choice: text, and the tokens it is made of (the last ones may still be held back as text)."""

    choice: int
    text: str
    tokens: tuple[ChosenToken, ...] = ()


@dataclass(frozen=True)
class HopReport:
    """One server of the chain in the end: milliseconds of its last step, tensor bytes of this answer."""

    peer_id: str
    blocks: tuple[int, int]
    milliseconds: float
    bytes_sent: int
    bytes_received: int

    def fields(self) -> dict[str, Any]:
        """The JSON object."""
        return {
            "peer_id": self.peer_id,
            "blocks": list(self.blocks),
            "last_step_ms": self.milliseconds,
            "bytes_sent": self.bytes_sent,
            "bytes_received": self.bytes_received,
        }


@dataclass(frozen=True)
class WaitingFor:
    """What a choice is held up by: a server that is `lost` (by `reason`), or silent. Others are looked for, for
    `seconds` since that was noticed."""

    peer_id: str
    blocks: tuple[int, int]
    lost: bool
    reason: str
    seconds: float


@dataclass(frozen=True)
class AnswerProgress:
    """How far one choice is, by which servers, and what it waits for; only for those who ask for it."""

    choice: int
    tokens: int
    recoveries: int
    hops: tuple[HopReport, ...]
    waiting: WaitingFor | None = None


@dataclass(frozen=True)
class Finished:
    """The end of one choice. `reason` is "stop" or "length".

    Attributes:
        compared: the chains that were compared; empty if there was one only, which `hops` has.
        receipts: of all replies to it, those of one server one after another; of a long answer the last 256 of each.
    """

    choice: int
    reason: str
    prompt_tokens: int
    tokens: int
    cached: int
    recoveries: int
    hops: tuple[HopReport, ...]
    receipts: tuple[SignedReply, ...] = ()
    stopped_by: str | None = None
    compared: tuple[tuple[Hop, ...], ...] = ()
    drafts: DraftCounts = field(default_factory=DraftCounts)


@dataclass(frozen=True)
class Failed:
    """The end of all choices."""

    error: ApiError


Event = TextPiece | AnswerProgress | Finished | Failed


@dataclass(frozen=True)
class GenerationRequest:
    """What is asked of the core, whatever the endpoint.

    Attributes:
        prompts: the tokens of each choice's prompt.
        max_tokens: None for the default; 0 only with `echo`.
        top_logprobs: None without log-probabilities; else how many likeliest tokens beside the chosen one.
        grammar: as `Grammars.compiled` makes it.
        echo: the tokens of the prompt come first, as pieces, with their log-probabilities.
        continues: the text goes on from that of the prompt.
        bound_after: the grammar binds what follows this mark, and not the whole answer.
        shows_special: special tokens are a part of the text: those that mark calls of tools.
        progress: whether events tell how far the answer is.
        pictures: those in the prompt, which is one for all choices.
    """

    owner: str
    model: ServedModel
    prompts: tuple[tuple[int, ...], ...]
    sampling: Sampling
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    top_logprobs: int | None = None
    grammar: str | None = None
    options: SessionOptions = PLAIN
    echo: bool = False
    continues: bool = False
    bound_after: str = ""
    shows_special: bool = False
    progress: bool = False
    pictures: ImagePrompt | None = None


def provenance(ends: Sequence[Finished]) -> dict[str, Any]:
    """`x_petalnode`: for each choice, how the answer came about, and a digest of all receipts."""
    replies = [reply for end in ends for reply in end.receipts]
    return {
        "receipts": {"count": len(replies), "digest": digest_of(replies).hex()},
        "choices": [
            {
                "index": end.choice,
                "recoveries": end.recoveries,
                "route": [{"peer_id": hop.peer_id, "blocks": list(hop.blocks)} for hop in end.hops],
                **({"compared_routes": [_route(hops) for hops in end.compared]} if end.compared else {}),
                "hops": [hop.fields() for hop in end.hops],
                **({"drafts": end.drafts.fields()} if end.drafts.steps else {}),
            }
            for end in ends
        ],
    }


def _route(hops: Sequence[Hop]) -> list[dict[str, Any]]:
    return [{"peer_id": hop.peer_id, "blocks": [hop.span.start, hop.span.end]} for hop in hops]
