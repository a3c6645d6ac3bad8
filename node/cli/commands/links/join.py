"""`petalnode join`: follows a link, on a machine that may have nothing yet. Says what it will do, and asks."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import trio
import typer

from .....protocols.ids import Span
from ....client.deadlines import DEADLINES
from ....errors import BadInput, ModelError, SwarmError
from ....links.format import INVITE, Invite, check_word, is_cut, open_link
from ....links.making import rank
from ....models import ModelFolder, Need, resolve, split_version
from ....models.cache_dir import size
from ....models.progress import no_progress
from ....models.sources.alias import ALIASES, alias_configuration
from ....network.nat.relay import RelayLimits
from ....placement.joining import span_for_newcomer, why_join
from ....placement.observed import observe_servers
from ....placement.plan import DEFAULT
from ....server.lifecycle.devices import plan_memory
from ....server.lifecycle.options import ServerOptions
from ....server.lifecycle.pausing import PausePolicy
from ....swarm.swarm import Swarm
from ....swarm.view import is_online
from ....weights.remote_model import RemoteModel, find_remote_model
from ...conversation.options import ChatOptions
from ...join import KEY_IN_SIGHT, JoinOptions, joined, joins_swarm
from ...metrics import MetricsOptions
from ...model_choice import check_devices, is_named, model_folder, served_model
from ...option import option
from ...output import Output
from ...process import shown
from ..chat import chat_with, question
from ..serve import ComputeOptions, ServeOptions, run_serve


@dataclass(frozen=True)
class JoinWishes(ComputeOptions):
    """What a person wants of the swarm that a link leads to."""

    chat: bool = option(False, "Chat with the model, and serve nothing.")
    prompt: str | None = option(None, "With --chat: ask this, print the answer and exit.")
    show_route: bool = option(False, "With --chat: show the servers below each answer.")
    yes: bool = option(False, "Do not ask, and go on.")

    def check(self) -> None:
        """
        Raises:
            BadInput: options for serving and for chatting contradict each other.
            MachineError: this machine has no such device.
        """
        if self.chat and (self.count is not None or self.device):
            raise BadInput("--num-blocks and --device are for serving, and --chat serves nothing: leave them out")
        if not self.chat and (self.prompt is not None or self.show_route):
            raise BadInput("--prompt and --show-route go with --chat: add that, or leave them out")
        check_devices(self.devices)


@dataclass(frozen=True)
class Prospect:
    """What following a link will do: the model as commands take it, its blocks that this machine would serve (None: it
    chats), why these, bytes to fetch, and of memory."""

    model: str
    num_blocks: int
    servers: int
    span: Span | None = None
    reason: str = ""
    fetch: int | None = None
    memory: int = 0


@joins_swarm
def join(
    link: Annotated[
        str | None, typer.Argument(help="The link that somebody sent you. Without it you are asked for it.")
    ] = None,
    *,
    wishes: JoinWishes,
    join: JoinOptions,
) -> None:
    """Join a swarm by a link: check it, say what will be fetched and served, ask, and serve (or chat)."""
    output = Output(join.json)
    if join.peer:
        raise BadInput("`petalnode join` takes the link by itself: leave --peer out")
    typed = link is None
    text = _typed() if link is None else link
    invite = open_link(text)
    join.check()
    join = replace(join, peer=[text], new_swarm=False)
    _ = join.target  # whether the key fits
    if not typed and invite.swarm_key is not None:
        output.warn(KEY_IN_SIGHT)
    wishes.check()
    prompt = question(wishes.prompt) if wishes.chat and (wishes.prompt or not sys.stdin.isatty()) else None
    _say_link(output, invite, text)
    _ask("Connect to them", wishes, output)
    with TemporaryDirectory() as scratch:
        prospect = trio.run(_look, scratch, join, wishes, output)
    _say_prospect(output, prospect)
    _ask("Go on", wishes, output)
    if wishes.chat:
        chat_with(prospect.model, ChatOptions(prompt=prompt, show_route=wishes.show_route, yes=True), join)
        return
    assert prospect.span is not None
    server = ServerOptions(prospect.model, num_blocks=len(prospect.span), devices=wishes.devices, kernels="auto")
    trio.run(run_serve, ServeOptions(server, join, RelayLimits(), MetricsOptions(), PausePolicy()))


def _typed() -> str:
    """
    Raises:
        BadInput: nothing came.
    """
    at_terminal = sys.stdin.isatty()
    text = input("the link: ") if at_terminal else sys.stdin.read(INVITE.max_text + 1)
    # Mail breaks lines: of what is pasted the others would go to the next questions, and then to the shell.
    while at_terminal and is_cut(text) and (more := input("its next line (Enter: none): ").strip()):
        text += more
    if not text.strip():
        raise BadInput("there is no link: give it as `petalnode join LINK`, or paste it when you are asked")
    return text


def _ask(text: str, wishes: JoinWishes, output: Output) -> None:
    """
    Raises:
        BadInput: nobody can be asked.
        typer.Exit: the person does not want to.
    """
    if wishes.yes:
        return
    if output.as_json or not sys.stdin.isatty():
        raise BadInput("nobody is here to be asked: add --yes if this is what you want")
    if input(f"{text}? [y/N] ").strip().lower() not in ("y", "yes"):
        output.say("nothing was done")
        raise typer.Exit(0)


def _say_link(output: Output, invite: Invite, text: str) -> None:
    """What the link says, by which a person decides whether anybody is to be called on."""
    word = check_word(text)
    output.emit(
        event="link",
        model=invite.model or None,
        model_version=invite.model_version.hex() or None,
        peers=list(invite.addrs),
        expires=invite.expires,
        private=bool(invite.swarm_key_hash),
        check_word=word,
    )
    model = f"serves {invite.model_argument}" if invite.model else "names no model"
    kind = "a private swarm" if invite.swarm_key_hash else "the public swarm"
    ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(invite.expires))
    output.say(f"this link is good until {ended}, and leads into {kind}, which {model}")
    output.say(f"check word: {word} (who sent you the link sees the same one, if nobody exchanged it)")
    for addr in invite.addrs:
        place = {2: ", in your own network", 3: ", in your own network", 4: ", on this machine"}.get(rank(addr), "")
        output.say(f"  {shown(addr)}{place}")
    output.say("these nodes will learn this machine's address; nothing is fetched yet but what they say of the model")


async def _look(scratch: str, join: JoinOptions, wishes: JoinWishes, output: Output) -> Prospect:
    """Asks the swarm what is served, and finds out what that means for this machine. `scratch` is an empty folder.

    Raises:
        PetalnodeError: the swarm, or the model, cannot be had, or this machine cannot serve it.
    """
    async with joined(join, output, role="join", listens=False) as (swarm, _):
        view = await swarm.refresh(timeout=DEADLINES.refresh)
        asked = join.target.model or await served_model(swarm, output)
        models = view.models(now=time.time())
        fitting = {version: named for version, named in models.items() if is_named(asked, named[0], version)}
        if not fitting:
            served = ", ".join(sorted({name for name, _ in models.values()})[:8]) or "nothing"
            raise SwarmError(
                f"the swarm of this link does not serve {asked} (any more), but {served}: ask for a new link, or give "
                "MODEL to `petalnode chat` or `serve`, with the link as --peer"
            )
        version, (name, num_blocks) = next(iter(fitting.items()))
        folder, remote = await _configuration(swarm, asked, scratch, output)
        if folder.num_blocks != num_blocks:
            raise ModelError(f"{name} has {folder.num_blocks} blocks here, and {num_blocks} in the swarm: not the same")
        servers = [one for one in view.servers(version, now=time.time()) if is_online(one, num_blocks)]
        found = Prospect(f"{split_version(asked)[0]}@{version.hex()[:16]}", num_blocks, len(servers))
        if wishes.chat:
            return replace(found, fetch=_missing(asked, remote, "client"))
        options = ServerOptions(asked, num_blocks=wishes.count, devices=wishes.devices, kernels="auto")
        alias = ALIASES.get(split_version(asked)[0])
        stored = 0 if alias is None else alias.block_bytes
        sizing = await trio.to_thread.run_sync(plan_memory, folder, options, stored)
        seen = observe_servers(swarm.view.servers(version, now=time.time()), num_blocks, swarm.peer_id)
        policy = replace(DEFAULT, boundaries=folder.boundaries)
        span = span_for_newcomer(seen.servers, swarm.peer_id, None, sizing.count, num_blocks, policy=policy)
        reason = why_join(seen.servers, span, num_blocks)
        return replace(found, span=span, reason=reason, fetch=_missing(asked, remote, span), memory=sizing.nbytes)


async def _configuration(
    swarm: Swarm, asked: str, scratch: str, output: Output
) -> tuple[ModelFolder, RemoteModel | None]:
    """(the model's folder, with its configuration; what peers hand on of it). The person has not agreed to more than
    some kilobytes: what is known of an alias without its file goes into the folder `scratch`.

    Raises:
        ModelError, SwarmError, MachineError: the configuration cannot be had.
    """
    remote = None
    with suppress(SwarmError, ModelError):  # nobody hands it on
        remote = await find_remote_model(swarm, asked, no_progress)
    with suppress(ModelError):
        return await trio.to_thread.run_sync(lambda: resolve(asked, need="config", offline=True)), remote
    if remote is not None:
        return await remote.fetch("config", no_progress), remote
    if split_version(asked)[0] in ALIASES:
        return alias_configuration(split_version(asked)[0], Path(scratch)), None
    return await model_folder(asked, output, need="config"), None


def _missing(asked: str, remote: RemoteModel | None, need: Need) -> int | None:
    """Bytes of weights that are still to be fetched; None if that is not known before."""
    with suppress(ModelError):
        resolve(asked, need=need, offline=True)
        return 0
    if remote is not None:
        return remote.missing(need)
    alias = ALIASES.get(split_version(asked)[0])
    return None if alias is None else alias.nbytes


def _say_prospect(output: Output, prospect: Prospect) -> None:
    span = prospect.span
    output.emit(
        event="prospect",
        model=prospect.model,
        num_blocks=prospect.num_blocks,
        servers=prospect.servers,
        blocks=None if span is None else [span.start, span.end],
        fetch_bytes=prospect.fetch,
        memory_bytes=prospect.memory if span is not None else None,
    )
    servers = "1 server" if prospect.servers == 1 else f"{prospect.servers} servers"
    output.say(f"{prospect.model} has {prospect.num_blocks} blocks, on {servers} now")
    known = {
        0: "nothing is to be fetched, all is here",
        None: "its weights will be fetched, from where they are public",
    }
    fetch = known.get(prospect.fetch) or f"at least {size(prospect.fetch or 0)} will be fetched"
    whence = ", from where the model is public, else from its servers" if prospect.fetch else ""
    if span is None:
        output.say(f"to chat, {fetch} (embeddings, head and tokenizer){whence}")
        output.say(
            "who serves its first blocks can read what you ask, and who serves its last blocks what is answered "
            "(docs/privacy.md)"
        )
        return
    output.say(f"this machine would serve {len(span)} blocks, as it looks now {span}: {prospect.reason}")
    output.say(f"{fetch}{whence}; the server will take {size(prospect.memory)} of memory, and runs until Ctrl-C")
    output.say(
        "others see this machine's address, and send it hidden states, from which much of their text can be told; they "
        "see nothing of your files (docs/privacy.md)"
    )
