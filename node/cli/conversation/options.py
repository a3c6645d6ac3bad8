"""The options of `petalnode chat`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from ..strangers import ServerChoice


@dataclass(frozen=True)
class ChatOptions(ServerChoice):
    """What a person wants of a conversation, and of its servers."""

    prompt: Annotated[
        str | None,
        typer.Option(help="Ask this one question, print the answer and exit. A pipe's text follows it."),
    ] = None
    image: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A picture for the first question, where the model takes pictures. It is encoded on this machine. "
            "Repeatable.",
        ),
    ] = None
    system: Annotated[str | None, typer.Option(help="System prompt: instructions before the conversation.")] = None
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 512
    temperature: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=99,
            help="Sampling temperature; 0 is greedy. Default: greedy with --prompt and --json; at a terminal the "
            "model's own, else 0.7.",
        ),
    ] = None
    top_p: Annotated[
        float | None,
        typer.Option(min=0.01, max=1, help="Sample from the most likely tokens of this total probability."),
    ] = None
    seed: Annotated[int | None, typer.Option(help="Random seed, to make sampling repeatable.")] = None
    draft: Annotated[
        str,
        typer.Option(
            metavar="auto|none|MODEL",
            help="auto: guess tokens from the text so far, and by the model's MTP head if it has "
            "one, and have the servers check several at once where that is quicker; the answer is the same. MODEL: "
            "have this model, a smaller one with the same tokenizer that runs here, guess too. none: one token after "
            "the other.",
        ),
    ] = "auto"
    show_route: Annotated[bool, typer.Option(help="Print which servers answered, and the tokens per second.")] = False
    yes: Annotated[
        bool, typer.Option("--yes", help="Do not say or ask that strangers' servers will see the text; for scripts.")
    ] = False
    session: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Save the conversation in this file; if the file exists, continue it."),
    ] = None
    resume: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="[N]",
            help="Go on with the N-th newest of earlier conversations; without N, choose from a list.",
        ),
    ] = None
    keep: Annotated[
        bool, typer.Option("--keep/--no-keep", help="Keep what is said at a terminal on this machine, for --resume.")
    ] = True
    adapter: Annotated[
        str | None,
        typer.Option(metavar="PATH|NAME", help="A folder with a peft adapter, or the name of one that servers hold."),
    ] = None
    share_receipts: Annotated[
        list[str] | None,
        typer.Option(
            metavar="MULTIADDR",
            help="Send receipts and hidden states to this auditor (a `petalnode validate`), which can infer the text "
            "from them, and publishes those of a wrong answer; repeatable.",
        ),
    ] = None
    require_pledge: Annotated[
        int | None,
        typer.Option(min=0, metavar="POINTS", help="Use only servers that pledge at least this many points."),
    ] = None
    credits: Annotated[
        str | None,
        typer.Option(
            metavar="MULTIADDR",
            help="Pay busy servers for priority with the points of --identity; MULTIADDR is the validator that "
            "issued them.",
        ),
    ] = None
    compare_chains: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="N", help="Run every step on N chains that share no server, and compare their outputs."
        ),
    ] = None

    @property
    def draft_model(self) -> str | None:
        """The model that guesses tokens, if one is named."""
        return self.draft if self.draft not in ("auto", "none") else None
