"""`petalnode chat`: talk to the model that a swarm serves."""

from __future__ import annotations

import os
import re
import stat
import sys
from dataclasses import replace
from typing import Final

import trio

from ....crypto.identity import Identity
from ...client.chat import held_chat
from ...errors import BadInput
from ...network.addresses import parse_peer
from ..conversation.client_parts import ClientParts, import_generation
from ..conversation.kept import KeptChat, kept_chat, kept_chats, kept_folder, listed
from ..conversation.options import ChatOptions
from ..conversation.talk import OpenChat, chat_in
from ..join import JoinOptions, joined, joins_swarm
from ..model_choice import SwarmModelArgument, check_adapter, check_model, check_seed, linked_model, served_model
from ..output import Output
from ..process import start, text_given
from ..terminal import at_terminal

_LONGEST_QUESTION: Final = 1 << 20
"""Characters. To count the tokens of longer ones would take long."""
_UNDECODED: Final = re.compile("[\ud800-\udfff]")
"""Bytes that are no text, as Python hands them on in a locale without letters."""


@joins_swarm
def chat(model: SwarmModelArgument = None, *, options: ChatOptions, join: JoinOptions) -> None:
    """Chat with the model that a swarm serves."""
    join.check()
    for address in (*(options.share_receipts or ()), *([options.credits] if options.credits else ())):
        parse_peer(address)
    options.chosen_servers()  # before anybody is asked
    check_seed(options.seed)
    model = linked_model(model, join.target)
    check_model(model)
    if options.draft_model is not None:
        check_model(options.draft_model)
        if options.compare_chains is not None:
            raise BadInput(
                "--draft MODEL needs steps under way side by side, and --compare-chains has none: give --draft auto"
            )
    if options.adapter is not None:
        check_adapter(options.adapter)
    options = replace(options, prompt=question(options.prompt))
    if options.credits and join.identity is None:
        raise BadInput("--credits spends the points of a key: give its file with --identity FILE")
    chat_with(model, options, join)


def chat_with(model: str | None, options: ChatOptions, join: JoinOptions) -> None:
    """Chats as `options` say, and keeps the conversation where they or a person at a terminal want that.

    Raises:
        PetalnodeError, typer.Exit: as `run_chat`.
    """
    if options.session is not None:
        if join.identity is not None:
            raise BadInput("--session FILE contains a key of its own: leave --identity out")
        if options.resume is not None:
            raise BadInput("--resume goes on with a conversation that was kept, and --session FILE names one: give one")
        with held_chat(options.session) as saved:
            trio.run(run_chat, model, options, join, OpenChat(saved, options.session, True))
        return
    chosen = None if options.resume is None else _kept(options.resume, Output(join.json))
    if chosen is None and (options.prompt is not None or join.json or not at_terminal() or not options.keep):
        trio.run(run_chat, model, options, join, None)
        return
    with kept_chat(None if chosen is None else chosen.path) as (saved, file):
        # Servers are not told that it is the same person as then.
        saved = replace(saved, identity=Identity.generate(), model=model or saved.model)
        trio.run(run_chat, model or saved.model or None, options, join, OpenChat(saved, file, False))
        if options.prompt is None and file.exists():
            Output(join.json).say("(kept: `petalnode chat --resume` goes on with it)", style="dim")


def _kept(number: int, output: Output) -> KeptChat:
    """The conversation of this number, or the one that a person chooses where it is 0.

    Raises:
        BadInput: there is none.
    """
    chats, damaged = kept_chats(kept_folder())
    for path in damaged:
        output.warn(f"{path} is no conversation (any more), and is left out: remove it, or bring it back from a copy")
    if not chats:
        raise BadInput("no conversation was kept yet: `petalnode chat` keeps those at a terminal")
    if not number:
        start.done()
        for line in listed(chats):
            output.say(line)
        if not at_terminal():
            raise BadInput("which one? Give its number: --resume N")
        number = int(line) if (line := input(f"which one? [1-{len(chats)}] ").strip()).isdecimal() else 0
    if not 1 <= number <= len(chats):
        raise BadInput(f"there is no such conversation: give a number from 1 to {len(chats)}")
    return chats[number - 1]


def question(prompt: str | None, example: str = "") -> str | None:
    """The one question to be answered: that of --prompt, and behind it what comes through a pipe; None at a terminal.
    Where nothing comes, it is the `example`.

    Raises:
        BadInput: it is empty, far too long or no text.
    """
    piped = _piped(prompt is not None)
    if prompt is None and piped is None:
        return None
    if prompt is None and not (piped or "").strip():
        if not example:
            raise BadInput("nothing came through the pipe: there is no question")
        prompt = example
    prompt = "\n\n".join(part for part in (text_given(prompt or "").strip(), (piped or "").strip()) if part)
    if not prompt:
        raise BadInput("--prompt is empty: there is no question")
    if len(prompt) > _LONGEST_QUESTION:
        raise BadInput(f"the question has more than {_LONGEST_QUESTION:,} characters")
    return prompt


def _piped(beside: bool) -> str | None:
    """What standard input has; None if that is a terminal. `beside`: there is a question, and only a pipe or a file is
    read: what else has no terminal, such as a service, may never send or end anything.

    Raises:
        BadInput: it is no text.
    """
    if sys.stdin.isatty():
        return None
    if beside:
        try:
            kind = os.fstat(sys.stdin.fileno()).st_mode
        except (OSError, ValueError):
            return None
        if not (stat.S_ISFIFO(kind) or stat.S_ISREG(kind)):
            return None
        start.stage("reading standard input (`< /dev/null` leaves it out)")
    try:
        text = sys.stdin.read(_LONGEST_QUESTION + 1)
    except UnicodeDecodeError as error:
        raise BadInput(f"what came through the pipe is no text in {error.encoding}: {error.reason}") from None
    if "\0" in text or _UNDECODED.search(text):
        raise BadInput("what came through the pipe is binary, and no text")
    return text


async def run_chat(model: str | None, options: ChatOptions, join: JoinOptions, kept: OpenChat | None) -> None:
    """Chats as `options` say, in the swarm of `join`. Raises PetalnodeError."""
    output = Output(join.json)
    parts = ClientParts(options.adapter, options.draft_model)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(import_generation)
        if model is not None:  # what is named is loaded while others are still to answer
            nursery.start_soon(parts.find_and_load, model, output)
        identity = kept.saved.identity if kept is not None else None
        start.stage("joining the swarm")
        async with joined(join, output, role="chat", listens=False, identity=identity) as (swarm, _):
            if join.identity is not None:
                output.note(f"the peer id of this client is {swarm.peer_id}")
            parts.join(swarm)
            start.stage("looking for the model")
            if model is None:
                nursery.start_soon(parts.find_and_load, await served_model(swarm, output), output)
            private = join.psk is not None
            await chat_in(swarm, await parts.folder(), options, output, kept, join.peers, parts, private=private)
