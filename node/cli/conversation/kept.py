"""Conversations that were kept on this machine, the newest first, and files of others."""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ....crypto.identity import write_private
from ...client.chat import Dialogue, SavedChat, held_chat
from ...errors import BadInput, MachineError
from ...models.cache_dir import data_folder

_CLIPBOARDS: Final = (("wl-copy",), ("xclip", "-selection", "clipboard"), ("pbcopy",))


@dataclass(frozen=True)
class KeptLimits:
    """How many conversations are kept, and how many a person is shown."""

    chats: int = 100
    shown: int = 20
    title: int = 60  # characters
    clipboard: int = 75_000  # bytes; terminals take some 100,000 of base64


KEPT: Final = KeptLimits()


@dataclass(frozen=True)
class KeptChat:
    """A conversation of an earlier run; `when` is its last answer, in seconds since 1970."""

    path: Path
    when: float
    saved: SavedChat

    @property
    def title(self) -> str:
        """Its first question, in one line."""
        asked = next((turn.content for turn in self.saved.dialogue.turns if turn.role == "user"), "")
        line = " ".join(asked.split())
        return line if len(line) <= KEPT.title else f"{line[: KEPT.title - 1]}…"


def kept_folder() -> Path:
    return data_folder() / "chats"


def kept_chats(folder: Path, most: int | None = None) -> tuple[list[KeptChat], list[Path]]:
    """(those of `folder`, or the `most` newest, the newest first; files among them that are none)."""
    found, damaged = list[KeptChat](), list[Path]()
    for path in _newest(folder)[:most]:
        try:
            found.append(KeptChat(path, path.stat().st_mtime, SavedChat.read(path)))
        except FileNotFoundError:
            continue  # it was one too many just now
        except (BadInput, OSError):
            damaged.append(path)
    return [chat for chat in found if chat.saved.dialogue.questions], damaged


def _newest(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"), key=_written_at, reverse=True)


def _written_at(path: Path) -> float:
    with suppress(OSError):
        return path.stat().st_mtime
    return 0.0


@contextmanager
def kept_chat(path: Path | None) -> Iterator[tuple[SavedChat, Path]]:
    """A new conversation to be kept, or the one in `path`; nothing is left of one without a question.

    Raises:
        BadInput, MachineError: as `held_chat`.
    """
    folder = kept_folder()
    if path is None:
        path = folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}.json"
        folder.mkdir(parents=True, exist_ok=True)
        os.chmod(folder, 0o700)
        for old in _newest(folder)[KEPT.chats - 1 :]:
            old.unlink(missing_ok=True)
            old.with_name(f"{old.name}.lock").unlink(missing_ok=True)
    try:
        with held_chat(path) as saved:
            yield saved, path
    finally:
        if not path.exists():
            path.with_name(f"{path.name}.lock").unlink(missing_ok=True)


def save_dialogue(path: Path, dialogue: Dialogue) -> None:
    """Writes a conversation for other programs: as text if the name ends in .md or .txt, else as JSON.

    Raises:
        MachineError: the file cannot be written.
    """
    if path.suffix in (".md", ".txt"):
        text = "\n\n".join(f"**{turn.role}**\n\n{turn.content}" for turn in dialogue.turns) + "\n"
    else:
        messages = [{"role": turn.role, "content": turn.content} for turn in dialogue.turns]
        text = json.dumps({"messages": messages}, ensure_ascii=False, indent=1) + "\n"
    try:
        write_private(path, text.encode("utf-8", "replace"))
    except OSError as error:
        raise MachineError(f"cannot write {path}: {error.strerror}") from None


def copy(text: str) -> str:
    """Puts `text` on the clipboard; says how. Raises BadInput if it is too long for the terminal's."""
    for command in _CLIPBOARDS:
        with suppress(OSError, subprocess.SubprocessError):  # it is not installed, or fails
            quiet = subprocess.DEVNULL
            subprocess.run(command, input=text.encode(), stdout=quiet, stderr=quiet, check=True, timeout=5)
            return f"copied, by {command[0]}"
    data = text.encode("utf-8", "replace")
    if len(data) > KEPT.clipboard:
        raise BadInput("the answer is too long for the terminal's clipboard: /save FILE writes it")
    sys.stdout.write(f"\x1b]52;c;{base64.b64encode(data).decode()}\a")  # "Manipulate Selection Data" of xterm
    sys.stdout.flush()
    return "copied, if this terminal lets programs do so (OSC 52)"


def asked_so_far(dialogue: Dialogue) -> str:
    """How many questions, in words."""
    return "1 question" if dialogue.questions == 1 else f"{dialogue.questions} questions"


def listed(chats: Sequence[KeptChat]) -> list[str]:
    """A line for each of the newest, with its number; and how many are older."""
    lines = [
        f"{number:3}  {time.strftime('%Y-%m-%d %H:%M', time.localtime(chat.when))}  "
        f"{_short(chat.saved.model) or 'a model'}, {asked_so_far(chat.saved.dialogue)}: {chat.title}"
        for number, chat in enumerate(chats[: KEPT.shown], 1)
    ]
    older = [f"     older ones have the numbers {len(lines) + 1} to {len(chats)}"]
    return lines + older * (len(lines) < len(chats))


def _short(model: str) -> str:
    """A folder or file by its own name; a model of a hub keeps its owner's."""
    return Path(model).name if Path(model).is_absolute() else model
