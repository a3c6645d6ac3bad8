"""A chat: its turns, those that fit into the context, their tokens, and the file that keeps it from run to run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from filelock import FileLock, Timeout

from ...crypto.bounded_json import BadJson, JsonLimits, read_json_object
from ...crypto.identity import Identity, write_private
from ..blocks.images.pictures import Picture
from ..errors import BadInput, MachineError, ModelError
from ..models import ModelFolder
from ..models.cache_dir import check_writable
from .session.session import SavedLink, SavedSession

FORMAT: Final = "petalnode-chat/1"
_FILE: Final = JsonLimits(nbytes=16 << 20, values=1 << 20)
"""Of a conversation that others may have written. A model's whole context is less."""


@dataclass(frozen=True)
class ChatMessage:
    """`role` is "system", "user" or "assistant", as chat templates call them. `pictures` are before the text, and are
    kept in no file."""

    role: str
    content: str
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Dialogue:
    """What was said so far, oldest first; the system turn, if any, stands first and always stays."""

    turns: tuple[ChatMessage, ...] = ()

    def plus(self, role: str, content: str, pictures: tuple[Picture, ...] = ()) -> Dialogue:
        return replace(self, turns=(*self.turns, ChatMessage(role, content, pictures)))

    @property
    def system(self) -> str | None:
        """What stands before the first question."""
        return self.turns[0].content if self.turns and self.turns[0].role == "system" else None

    @property
    def questions(self) -> int:
        return sum(turn.role == "user" for turn in self.turns)

    def without_newest(self) -> tuple[Dialogue, str, str]:
        """What was said before the newest question; that question; and what of its answer there is, perhaps ""."""
        end = max(index for index, turn in enumerate(self.turns) if turn.role == "user")
        answer = "".join(turn.content for turn in self.turns[end + 1 :])
        return replace(self, turns=self.turns[:end]), self.turns[end].content, answer

    def without_oldest(self) -> Dialogue | None:
        """Without the oldest question and its answer; None if only the newest question is left."""
        start = int(self.system is not None)
        end = start + 1
        while end < len(self.turns) and self.turns[end].role != "user":
            end += 1
        if end >= len(self.turns):
            return None
        return replace(self, turns=self.turns[:start] + self.turns[end:])


def fit(
    dialogue: Dialogue, tokenize: Callable[[Sequence[ChatMessage]], list[int]], limit: int
) -> tuple[Dialogue, list[int], int]:
    """Drops the oldest turns until the prompt has at most `limit` tokens.

    Returns:
        What is left, its tokens, and how many turns went. If the newest question alone is too long, its tokens are
        more than `limit`: the caller says so.
    """
    turns = len(dialogue.turns)
    while True:
        tokens = tokenize(dialogue.turns)
        shorter = dialogue.without_oldest() if len(tokens) > limit else None
        if shorter is None:
            return dialogue, tokens, turns - len(dialogue.turns)
        dialogue = shorter


class Text:
    """Tokenizer and chat template of a model."""

    def __init__(self, folder: ModelFolder) -> None:
        from transformers.generation.configuration_utils import GenerationConfig

        self._tokenizer = load_tokenizer(folder)
        stops: set[int] = set()
        try:
            configured = GenerationConfig.from_pretrained(folder.path, local_files_only=True).eos_token_id
        except OSError:
            configured = folder.config.get("eos_token_id")
        for ids in (configured, self._tokenizer.eos_token_id):
            stops.update([ids] if isinstance(ids, int) else ids or [])
        self.stop_tokens = tuple(sorted(stops))

    def tokenize(self, turns: Sequence[ChatMessage]) -> list[int]:
        """The prompt for the next answer. A model without a chat template gets the plain text.

        Raises:
            BadInput: the template will not have these turns, such as a system prompt.
        """
        if not self._tokenizer.chat_template:
            return list(self._tokenizer("\n".join(turn.content for turn in turns))["input_ids"])
        return self._templated([{"role": turn.role, "content": turn.content} for turn in turns])

    @property
    def tokenizer(self) -> Any:
        """The one of transformers."""
        return self._tokenizer

    @property
    def template(self) -> str:
        """The chat template, a text of Jinja; empty if the model has none."""
        found = self._tokenizer.chat_template
        return str(found.get("default", "") if isinstance(found, dict) else found or "")

    def chat_prompt(self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """The prompt for the next answer to messages, by the chat template, with tools where it takes some.

        Raises:
            BadInput: the template will not have these messages, or the model has none.
        """
        if not self.template:
            raise BadInput("this model has no chat template: use completions, with a prompt of your own")
        return self._templated(list(messages), list(tools) or None)

    def _templated(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        from jinja2.exceptions import TemplateError

        try:
            return list(
                self._tokenizer.apply_chat_template(
                    messages, tools=tools, add_generation_prompt=True, return_dict=True
                )["input_ids"]
            )
        except (TemplateError, TypeError, ValueError, KeyError, RecursionError) as error:
            raise BadInput(f"the model's chat template does not take these messages: {error}") from None

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with those that the tokenizer puts before every text."""
        return list(self._tokenizer(text)["input_ids"])

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def special_token(self, text: str) -> int | None:
        """The id of the special token with this text; None if there is none."""
        found = self._tokenizer.added_tokens_decoder.items()
        return next((token for token, added in found if added.special and added.content == text), None)

    def token_text(self, token: int) -> str:
        """One token as text, special ones by their names; with U+FFFD where it is a part of a character."""
        return str(self._tokenizer.decode([token], skip_special_tokens=False))

    def stream(self, before: Sequence[int] = (), *, special: bool = False) -> TextStream:
        """The text of tokens that come one by one, as soon as it is whole characters.

        `before` are the tokens that the text goes on from: some tokenizers write the first word without its space. With
        `special`, special tokens are written, too.
        """
        from tokenizers.decoders import DecodeStream

        made = partial(DecodeStream, skip_special_tokens=not special)
        return TextStream(self._tokenizer.backend_tokenizer, made, made(ids=list(before)) if before else made())


@dataclass
class TextStream:
    """A tokenizer, and what it has decoded of a text."""

    _tokenizer: Any
    _make: Any
    _decoder: Any

    def add(self, token: int) -> str:
        """The text that this token makes whole; "" if there is none."""
        try:
            return self._decoder.step(self._tokenizer, token) or ""
        except Exception as error:  # tokenizers has no narrower one
            if not str(error).startswith("Invalid prefix"):
                raise
        # Bytes that are no character change how tokens before them are read, which were shown: begin behind them.
        self._decoder = self._make(ids=[token])
        return f"\ufffd{self._decoder.step(self._tokenizer, token) or ''}"


def load_tokenizer(folder: ModelFolder) -> Any:
    """
    Raises:
        ModelError: the folder has none.
    """
    from transformers.models.auto.tokenization_auto import AutoTokenizer

    try:
        found = AutoTokenizer.from_pretrained(folder.path, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ModelError(f"{folder.path} has no tokenizer that can be used ({error}); copy its files too") from None
    # Of some architectures transformers makes one without a vocabulary, by which every text has no tokens.
    if len(found) <= len(found.all_special_tokens):
        raise ModelError(f"{folder.path} has no tokenizer; copy its files too, such as tokenizer.json")
    return found


# --- the file


@dataclass(frozen=True)
class SavedChat:
    """`tokens` are those that the servers of `session` hold, with the adapter of this identity; `model_version` is None
    before the first answer. `unfinished`: the answer to the newest question was cut off, or never came. `model` is
    what a person called the model."""

    identity: Identity
    model_version: bytes | None = None
    dialogue: Dialogue = field(default_factory=Dialogue)
    tokens: tuple[int, ...] = ()
    session: SavedSession | None = None
    adapter: str = ""
    unfinished: bool = False
    model: str = ""

    def check_model(self, version: bytes) -> SavedChat:
        """This chat, as one of the model of this version.

        Raises:
            BadInput: it was held with another model.
        """
        if self.model_version not in (None, version):
            raise BadInput(
                "this conversation was held with another model "
                f"(version {(self.model_version or b'').hex()[:12]}): name that one, or another --session file"
            )
        return replace(self, model_version=version)

    def with_adapter(self, identity: str) -> SavedChat:
        """This chat, to go on with the adapter of this identity: another one's session is of no use for that."""
        return self if identity == self.adapter else replace(self, tokens=(), session=None, adapter=identity)

    def after(self, dialogue: Dialogue, tokens: Sequence[int], session: SavedSession | None) -> SavedChat:
        """The chat one answer later."""
        return replace(self, dialogue=dialogue, tokens=tuple(tokens), session=session, unfinished=False)

    def asking(self, dialogue: Dialogue) -> SavedChat:
        """The chat while its newest question is being answered. Servers may hold more of it than is known here."""
        return replace(self, dialogue=dialogue, tokens=(), session=None, unfinished=True)

    def save(self, path: Path) -> None:
        """Writes the file, readable by the owner only, all of it or nothing.

        Raises:
            MachineError: it cannot be written.
        """
        try:
            write_private(path, json.dumps(self._to_json()).encode())
        except OSError as error:
            raise MachineError(f"cannot write the conversation to {path}: {error.strerror}") from error

    def _to_json(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "identity": self.identity.seed.hex(),
            "model_version": None if self.model_version is None else self.model_version.hex(),
            "turns": [[turn.role, turn.content] for turn in self.dialogue.turns],
            "tokens": list(self.tokens),
            "adapter": self.adapter,
            "unfinished": self.unfinished,
            "model": self.model,
            "session": None
            if self.session is None
            else {
                "max_length": self.session.max_length,
                "position": self.session.position,
                "route_epoch": self.session.route_epoch,
                "codec": self.session.codec,
                "links": [
                    [link.peer_id, link.start, link.end, link.nonce.hex(), link.epoch.hex()]
                    for link in self.session.links
                ],
            },
        }

    @classmethod
    def read(cls, path: Path) -> SavedChat:
        """
        Raises:
            FileNotFoundError: there is no such file.
            BadInput: it is no conversation.
        """
        try:
            return cls._from_json(json.loads(path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise
        except (OSError, UnicodeDecodeError) as error:
            raise BadInput(f"cannot read the conversation {path}: {error}") from None
        except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError):
            raise BadInput(f"{path} is no saved conversation: give another --session file") from None

    @classmethod
    def _from_json(cls, data: dict[str, Any]) -> SavedChat:
        if data["format"] != FORMAT:
            raise ValueError("unknown format")
        session = data["session"]
        return cls(
            identity=Identity.from_seed(bytes.fromhex(data["identity"])),
            model_version=None if data["model_version"] is None else bytes.fromhex(data["model_version"]),
            dialogue=Dialogue(tuple(ChatMessage(str(role), str(content)) for role, content in data["turns"])),
            tokens=tuple(int(token) for token in data["tokens"]),
            adapter=str(data.get("adapter", "")),
            model=str(data.get("model", "")),
            unfinished=bool(data.get("unfinished", False)) and any(role == "user" for role, _ in data["turns"]),
            session=None
            if session is None
            else SavedSession(
                links=tuple(
                    SavedLink(peer, int(start), int(end), bytes.fromhex(nonce), bytes.fromhex(epoch))
                    for peer, start, end, nonce, epoch in session["links"]
                ),
                max_length=int(session["max_length"]),
                position=int(session["position"]),
                route_epoch=int(session["route_epoch"]),
                codec=str(session.get("codec", "none")),
            ),
        )


@contextmanager
def held_chat(path: Path) -> Iterator[SavedChat]:
    """The conversation in `path`, a new one if there is no such file. No other process can hold it meanwhile.

    Raises:
        BadInput: the file is no conversation.
        MachineError: another process holds it, or it cannot be read.
    """
    if path.is_dir():
        raise BadInput(f"--session {path} is a folder: give a file")
    lock = FileLock(path.with_name(path.name + ".lock"), timeout=0)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise MachineError(f"the conversation {path} is open in another process: close that one first") from None
    except OSError as error:
        raise MachineError(f"cannot use {path}: {error.strerror}") from error
    except NotImplementedError:  # what filelock raises for a disk without locks
        raise MachineError(f"cannot use {path}: its disk has no file locks; give another --session file") from None
    try:
        check_writable(path.parent, f"Saving the conversation in {path}", "Make room there, or give another file.")
        try:
            saved = SavedChat.read(path)
        except FileNotFoundError:
            saved = SavedChat(Identity.generate())
        yield saved
    finally:
        lock.release()


def read_dialogue(path: Path) -> Dialogue:
    """The turns in a file, of `--session` or with `{"messages": [{"role": .., "content": ..}]}` as APIs have them.

    Raises:
        BadInput: it is neither, or cannot be read.
    """
    try:
        data = read_json_object(path, _FILE)
        pairs = data["turns"] if "turns" in data else [(turn["role"], turn["content"]) for turn in data["messages"]]
        turns = tuple(ChatMessage(role, content) for role, content in pairs)
    except OSError as error:
        raise BadInput(f"cannot read {path}: {error.strerror}") from None
    except (BadJson, LookupError, TypeError, ValueError):
        raise BadInput(f"{path} is no conversation: /save FILE writes one") from None
    first = int(Dialogue(turns).system is not None)
    for number, turn in enumerate(turns):
        role = "system" if number < first else ("user", "assistant")[(number - first) % 2]
        if turn.role != role or not isinstance(turn.content, str):
            raise BadInput(f"{path}: turn {number + 1} is no text of {role!r}; user and assistant take turns")
    return Dialogue(turns)
