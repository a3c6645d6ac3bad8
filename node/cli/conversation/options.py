"""The options of `petalnode chat`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..option import option
from ..strangers import ServerChoice


@dataclass(frozen=True)
class ChatOptions(ServerChoice):
    """What a person wants of a conversation, and of its servers."""

    prompt: str | None = option(None, "Ask this one question, print the answer and exit. A pipe's text follows it.")
    image: list[Path] | None = option(
        None,
        "A picture for the first question, where the model takes pictures. It is encoded on this machine. Repeatable.",
        "FILE",
    )
    system: str | None = option(None, "System prompt: instructions before the conversation.")
    max_new_tokens: int = option(512, "Maximum tokens of an answer.", min=1)
    temperature: float | None = option(
        None,
        "Sampling temperature; 0 is greedy. Default: greedy with --prompt and --json; at a terminal the "
        "model's own, else 0.7.",
        min=0,
        max=99,
    )
    top_p: float | None = option(None, "Sample from the most likely tokens of this total probability.", min=0.01, max=1)
    seed: int | None = option(None, "Random seed, to make sampling repeatable.")
    draft: str = option(
        "auto",
        "auto: guess tokens from the text so far, and by the model's MTP head if it has "
        "one, and have the servers check several at once where that is quicker; the answer is the same. MODEL: "
        "have this model, a smaller one with the same tokenizer that runs here, guess too. none: one token after "
        "the other.",
        "auto|none|MODEL",
    )
    show_route: bool = option(
        False, "Print which servers answered, and the tokens per second.", names=("--show-route/--no-show-route",)
    )
    yes: bool = option(False, "Do not say or ask that strangers' servers will see the text; for scripts.")
    session: Path | None = option(None, "Save the conversation in this file; if the file exists, continue it.", "FILE")
    resume: int | None = option(
        None, "Go on with the N-th newest of earlier conversations; without N, choose from a list.", "[N]", min=0
    )
    keep: bool = option(
        True, "Keep what is said at a terminal on this machine, for --resume.", names=("--keep/--no-keep",)
    )
    adapter: str | None = option(
        None, "A folder with a peft adapter, or the name of one that servers hold.", "PATH|NAME"
    )
    share_receipts: list[str] | None = option(
        None,
        "Send receipts and hidden states to this auditor (a `petalnode validate`), which can infer the text "
        "from them, and publishes those of a wrong answer; repeatable.",
        "MULTIADDR",
    )
    require_pledge: int | None = option(
        None, "Use only servers that pledge at least this many points.", "POINTS", min=0
    )
    credits: str | None = option(
        None,
        "Pay busy servers for priority with the points of --identity; MULTIADDR is the validator that issued them.",
        "MULTIADDR",
    )
    compare_chains: int | None = option(
        None, "Run every step on N chains that share no server, and compare their outputs.", "N", min=2
    )

    @property
    def draft_model(self) -> str | None:
        """The model that guesses tokens, if one is named."""
        return self.draft if self.draft not in ("auto", "none") else None
