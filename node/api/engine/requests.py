"""What is asked of a model, in one form for all endpoints; read and checked by whoever knows the endpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from ...client.generation.sampling import Sampling

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
