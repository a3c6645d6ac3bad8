"""A conversation in a swarm: the client, the model and the person's side put together."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path
from typing import TYPE_CHECKING, Final

import trio

from ....protocols.announcement import Announcement
from ...blocks.images.pictures import PICTURES, Picture
from ...client.chat import SavedChat, Text
from ...client.core import ClientOptions, SwarmClient, open_client
from ...client.deadlines import DEADLINES
from ...client.swarm_model import SwarmModel, identify_model
from ...credits.wallet import Wallet
from ...errors import BadInput, PetalnodeError, SwarmError
from ...links.making import LinkWishes, join_command, near_link
from ...models import ModelFolder
from ...models.cache_dir import data_folder
from ...network.addresses import parse_peer
from ...swarm.swarm import Swarm
from ...swarm.view import is_online
from ..dialogue import Chatter, opening
from ..model_choice import check_model
from ..output import Output
from ..process import start
from ..strangers import StrangerNotice, notices_file
from ..terminal import at_terminal
from .client_parts import ClientParts
from .kept import KEPT, kept_chats, kept_folder
from .options import ChatOptions
from .reader import QuestionReader
from .settings import changed, for_a_person

if TYPE_CHECKING:
    from ...client.generation.conversation import Conversation
    from ...client.generation.picture_prompts import PicturePrompts

MAX_CONTEXT: Final = 4096
"""Tokens that a chat reserves at every server at first, unless the model takes fewer."""


@dataclass(frozen=True)
class OpenChat:
    """A conversation that is kept in `file`; with the servers' `caches`, and the client's key, if it is one of
    --session."""

    saved: SavedChat
    file: Path
    caches: bool


async def _identify(swarm: Swarm, folder: ModelFolder, identified: list[SwarmModel]) -> None:
    with suppress(SwarmError):  # nobody answers just now; what was heard at joining has to do
        await swarm.refresh(sample=True, timeout=DEADLINES.refresh)
    identified.append(await identify_model(swarm, folder))


async def chat_in(
    swarm: Swarm,
    folder: ModelFolder,
    options: ChatOptions,
    output: Output,
    kept: OpenChat | None = None,
    peers: Sequence[str] = (),
    parts: ClientParts | None = None,
    *,
    private: bool = False,
) -> None:
    """Answers the prompt, or everything that a person types, over the servers of `swarm`.

    `parts` are being loaded already; without them they are loaded here. `private`: all of this swarm know each other.

    Raises:
        PetalnodeError: a one-shot answer cannot be had. In a chat the reason is printed and the chat goes on.
    """
    reader = None
    if options.prompt is None and not output.as_json and at_terminal() and not output.console.is_dumb_terminal:
        reader = QuestionReader(_earlier_questions())
    talk = Talk(swarm, options, output, kept, tuple(peers), private, reader)
    async with trio.open_nursery() as nursery:
        if parts is None:
            parts = ClientParts(options.adapter, options.draft_model)
            nursery.start_soon(parts.load, folder)
        while (wanted := await talk.goes_on(folder, parts)) is not None:
            other = ClientParts(None, options.draft_model)
            other.join(swarm)
            try:
                check_model(wanted)
                await other.find_and_load(wanted, output)
                parts, folder = other, await other.folder()
            except PetalnodeError as error:
                output.error(str(error))


def _picture_in(file: Path) -> Picture:
    """
    Raises:
        BadInput: it cannot be read, is no picture, or too large.
    """
    try:
        with file.open("rb") as stream:
            return Picture.of(stream.read(PICTURES.nbytes + 1))
    except OSError as error:
        raise BadInput(f"cannot read the picture {file}: {error.strerror}") from None
    except BadInput as error:
        raise BadInput(f"{file}: {error}") from None


def _earlier_questions() -> list[str]:
    chats, _ = kept_chats(kept_folder(), KEPT.shown)
    return [turn.content for chat in reversed(chats) for turn in chat.saved.dialogue.turns if turn.role == "user"]


def session_room(servers: Iterable[Announcement], num_blocks: int) -> int:
    """How many tokens a session through all blocks may have, as the servers say that they have cache for; 0 if some
    block is at nobody's."""
    rooms = [0] * num_blocks
    for server in servers:
        if is_online(server, num_blocks):
            room = min(server.cache_tokens_free, server.max_session_length or server.cache_tokens_free)
            for block in range(server.span.start, server.span.end):
                rooms[block] = max(rooms[block], room)
    return min(rooms, default=0)


@dataclass
class Talk:
    """A conversation in a swarm, with one model after the other.

    Attributes:
        before: the conversation with the model before; None at the beginning.
    """

    swarm: Swarm
    options: ChatOptions
    output: Output
    kept: OpenChat | None
    peers: tuple[str, ...]
    private: bool
    reader: QuestionReader | None
    before: Chatter | None = None

    async def goes_on(self, folder: ModelFolder, parts: ClientParts) -> str | None:
        """Answers with the model of `folder` to the end, or until a person wants another one, which this returns.

        Raises:
            PetalnodeError: as `chat_in`.
        """
        swarm, options = self.swarm, self.options
        pictures = tuple(map(_picture_in, options.image or ())) if self.before is None else ()
        start.stage(f"loading embeddings and head of {folder.name}, and asking the servers")
        identified: list[SwarmModel] = []
        await _identify(swarm, folder, identified)
        model, text, adapter = await parts.loaded()
        # torch and transformers, which the thread has imported: not before others were asked.
        from ...client.generation.conversation import Conversation
        from ...client.generation.picture_prompts import PicturePrompts
        from ...models.adapter import Adapter

        see = PicturePrompts(model, text.tokenizer, folder.path)

        soft_prompt = adapter.soft_prompt if isinstance(adapter, Adapter) else None
        longest = (model.max_positions or MAX_CONTEXT) - (0 if soft_prompt is None else len(soft_prompt))
        asked = ClientOptions(
            allowed=options.allow or (),
            blocked=options.deny or (),
            share_receipts=options.share_receipts or (),
            require_pledge=options.require_pledge,
            compare_chains=options.compare_chains or 1,
            trusted=options.chosen_servers(),
            adapter=adapter,
            codec=options.codec,
        )
        async with open_client(swarm, identified[0], asked) as client:
            if options.credits is not None:
                client.state.payments = Wallet(swarm, swarm.identity, options.credits)
            held = await client.adapter()
            conversation = Conversation(
                client,
                model,
                max_length=await self._context(text, longest, see, pictures),
                stop_tokens=text.stop_tokens,
                soft_prompt=soft_prompt,
                drafts=parts.draft_model or options.draft != "none",
            )
            async with aclosing(conversation):
                identity = adapter.identity if isinstance(adapter, Adapter) else held.hash.hex() if held else ""
                saved = self._saved(client.model.version, identity, folder)
                if saved is not None and self.kept is not None and self.kept.caches:
                    conversation.keep(saved.tokens, saved.session)
                chatter = self._chatter(client, conversation, text, folder, saved)
                chatter.see, chatter.pictures = see, pictures
                chatter.longest = lambda: min(longest, session_room(client.servers(), folder.num_blocks))
                start.done()
                if options.prompt is not None:
                    if chatter.notice is not None:
                        await chatter.notice.permits()
                    await chatter.answer(options.prompt)
                    return None
                if self.before is None:
                    chatter.show_past()
                wanted = await chatter.loop(folder.name)
                self.before = chatter
                if self.kept is not None and chatter.saved is not None:
                    self.kept = replace(self.kept, saved=chatter.saved)
                return wanted

    async def _context(self, text: Text, longest: int, see: PicturePrompts, pictures: tuple[Picture, ...]) -> int:
        """How many tokens the servers are to reserve at first."""
        options, kept = self.options, self.kept
        if options.prompt is not None and kept is None:
            # One question needs no more of the servers' cache than its own length; a conversation will be longer.
            turns = opening(options.system).plus("user", options.prompt, pictures).turns
            seen = await trio.to_thread.run_sync(see.of_turns, turns)
            tokens = text.tokenize(turns) if seen is None else seen.tokens
            return min(longest, len(tokens) + options.max_new_tokens)
        held = kept.saved.session if kept is not None else None
        return min(longest, max(MAX_CONTEXT, held.max_length if held is not None else 0))

    def _saved(self, version: bytes, adapter: str, folder: ModelFolder) -> SavedChat | None:
        """What is kept of the conversation, as one with this model.

        Raises:
            BadInput: a --session file is of another model.
        """
        if self.kept is None:
            return None
        saved = replace(self.kept.saved, model=_name_of(folder))
        if self.kept.caches and self.before is None:
            return saved.check_model(version).with_adapter(adapter)
        return replace(saved, model_version=version, adapter=adapter, tokens=(), session=None)

    def _chatter(
        self, client: SwarmClient, conversation: Conversation, text: Text, folder: ModelFolder, saved: SavedChat | None
    ) -> Chatter:
        from ...client.generation.conversation import Sampling

        swarm, options, output, kept = self.swarm, self.options, self.output, self.kept
        sampling = Sampling(options.max_new_tokens, options.temperature or 0.0, options.top_p or 1.0, options.seed)
        person = options.prompt is None and not output.as_json
        if person:
            named = {"temperature": options.temperature, "top_p": options.top_p}
            sampling = for_a_person(sampling, named, folder.path)
        notice = StrangerNotice(
            client,
            output,
            notices_file(data_folder()),
            named=(*(options.allow or ()), *(options.trusted or ())),
            private=self.private,
            yes=options.yes,
            asks=person and at_terminal(),
        )
        chatter = Chatter(
            conversation,
            text,
            sampling,
            output,
            saved,
            client.disagreements,
            system=options.system,
            session_file=None if kept is None else kept.file,
            keeps_caches=kept is None or kept.caches,
            stops_repetition=person,
            once=options.prompt is not None,
            show_route=options.show_route,
            serve_options=" --peer ".join((shlex.quote(folder.name), *self.peers)),
            is_there=lambda peer: swarm.is_connected(parse_peer(peer)[0]),
            notice=notice,
            is_closed=lambda hop: bool(client.trusted.closed(range(hop.span.start, hop.span.end), folder.num_blocks)),
            link_without=partial(_link_without, client),
            served=lambda: sorted({name for name, _ in swarm.view.models(now=time.time()).values()}),
            reader=self.reader,
        )
        if self.before is not None:
            chatter.system = self.before.system
            chatter.dialogue, chatter.unfinished = self.before.dialogue, self.before.unfinished
            chatter.settings = self.before.settings
            chatter.sampling = reduce(changed, chatter.settings, sampling)
        return chatter


def _link_without(client: SwarmClient, peer_id: str) -> str:
    swarm, model = client.swarm, client.model
    link = near_link(swarm, LinkWishes(model.name, model.version, swarm.psk), without=(peer_id,))
    return join_command(link, swarm.psk)


def _name_of(folder: ModelFolder) -> str:
    """What the model can be called in a later run, from any folder."""
    asked = folder.asked or folder.name
    return str(Path(asked).absolute()) if Path(asked).exists() else asked
