"""Makes docs/demo.svg and docs/friends.svg: runs the real program in pseudo-terminals, and draws what it printed.
docs/friends.cast has it in real time, for `asciinema play`.

python -m docs.record_demo [question]
python -m docs.record_demo --friends     # needs root: three machines, as network namespaces, one of them behind a NAT
"""

from __future__ import annotations

import codecs
import json
import os
import pty
import re
import select
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 100, 30
PATIENCE = 900.0  # seconds for a command to say what is waited for


@dataclass
class Terminal:
    """A command in a pseudo-terminal of COLUMNS x ROWS, and what it has written so far."""

    command: Sequence[str]
    env: Mapping[str, str]
    printed: bytes = b""
    seen: int = 0  # characters of it that were waited for
    played: list[tuple[float, str]] = field(default_factory=list)  # what came when

    def __post_init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._controller, terminal = pty.openpty()
        size = {"COLUMNS": str(COLUMNS), "LINES": str(ROWS), "TERM": "xterm-256color"}
        self.process = subprocess.Popen(
            self.command, stdin=terminal, stdout=terminal, stderr=terminal, env=self.env | size
        )
        os.close(terminal)

    def read(self, until: str = "") -> str:
        """What is printed up to `until` (a regular expression) behind what was waited for before, else all of it."""
        while not (until and (found := re.compile(until).search(self.text, self.seen))):
            if not select.select([self._controller], [], [], PATIENCE)[0]:
                raise SystemExit(f"{self.command} says nothing more, without {until!r}:\n{self.text}")
            try:
                data = os.read(self._controller, 65536)
            except OSError:  # the terminal is gone with the program
                data = b""
            if not data:
                if self.process.wait() != 0 or until:
                    raise SystemExit(f"{self.command} failed:\n{self.text}")
                return self.text
            self.printed += data
            self.played.append((time.monotonic(), self._decoder.decode(data)))
        self.seen = found.end()
        return self.text[: self.seen]

    @property
    def text(self) -> str:
        return self.printed.decode(errors="replace").replace("\r\n", "\n")

    def answer(self, question: str, keys: str) -> None:
        self.read(question)
        os.write(self._controller, keys.encode())

    def end(self) -> None:
        self.process.terminate()
        self.process.wait()


def settled(printed: str) -> str:
    """What stays on the screen: bars and panels are drawn over."""
    lines, row, over = [""], 0, False
    for sign in re.findall(r"\x1b\[\d*[AK]|\x1b\[\?25[lh]|\x1b\[[\d;]*m|[\r\n]|[^\x1b\r\n]+", printed):
        if sign == "\n":
            row, over = row + 1, False
            lines += [""] * (row == len(lines))
        elif sign.endswith("A") and sign.startswith("\x1b"):
            row = max(0, row - int(sign[2:-1] or 1))
        elif sign.startswith("\x1b[2K"):
            lines[row] = ""
        elif sign == "\r":
            over = True
        elif not sign.startswith("\x1b[?"):
            lines[row], over = ("" if over else lines[row]) + sign, False
    return "\n".join(lines).rstrip("\n") + "\n"


def draw(printed: str, name: str, title: str) -> None:
    console = Console(record=True, width=COLUMNS, file=open(os.devnull, "w"))  # noqa: SIM115
    console.print(Text.from_ansi(printed))
    target = Path(__file__).with_name(name)
    target.write_text(console.export_svg(title=title))
    print(f"wrote {target.name}:\n{printed}")


def play(played: Sequence[tuple[float, str]], name: str, title: str) -> None:
    """Writes an asciicast (version 2) of what came when, in seconds of one clock; of a bar's pictures one a second."""
    lines: list[object] = [{"version": 2, "width": COLUMNS, "height": ROWS, "title": title}]
    drawn = float("-inf")
    for when, text in played:
        is_bar = text.startswith("\r\x1b[2K") and "\n" not in text
        if not is_bar or when - drawn >= 1:
            lines.append([round(when - played[0][0], 3), "o", text])
            drawn = when if is_bar else float("-inf")
    made = "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in lines)
    Path(__file__).with_name(name).write_text(made, encoding="utf-8")


def demo(question: str) -> None:
    printed = Terminal([sys.executable, "-m", "petalnode", "demo", "--prompt", question], os.environ).read()
    draw(f'$ make demo PROMPT="{question}"\n{printed}', "demo.svg", "petalnode demo")


def friends() -> None:
    """From nothing to two machines that answer together. The first has the model, the others have empty disks, and no
    network but this one: the weights come from the first."""
    from tests.nat.lab import Host, open_lab
    from tests.nat.nodes import LabNodes

    began, shown, running, played = time.monotonic(), [], [], list[tuple[float, str]]()

    def say(text: str) -> None:
        shown.append(text)
        played.append((time.monotonic(), text.replace("\n", "\r\n")))

    def run(host: Host, who: str, *arguments: str) -> Terminal:
        typed = f"$ petalnode {shlex.join(arguments)}\n"
        say(f"\n\x1b[2m# {who}, after {time.monotonic() - began:.0f} s\x1b[0m\n{typed}")
        command = host.command([sys.executable, "-m", "petalnode", *arguments])
        running.append(Terminal(command, nodes.env(host) | own.get(host.name, {}), played=played))
        return running[-1]

    with tempfile.TemporaryDirectory() as homes, open_lab() as lab:
        nodes = LabNodes(Path(homes))
        mine, friend, guest = lab.host("mine"), lab.nat("home").host("friend"), lab.host("guest")
        own = {"mine": {"PETALNODE_CACHE": os.environ.get("PETALNODE_CACHE", str(Path.home() / ".cache/petalnode"))}}
        try:
            serving = run(mine, "your machine", "serve", "smollm2", "--num-blocks", "15", "--new-swarm")
            shown.append(settled(serving.read("petalnode join petalnode:\\S+\\s")))
            inviting = run(mine, "your machine, another terminal", "invite")
            shown.append(inviting.read())
            link = re.findall(r"petalnode:[a-z2-7]+", inviting.text)[0]
            half = ("join", link, "--num-blocks", "15")
            joining = run(friend, "your friend's machine, behind a router, with an empty disk", *half)
            joining.answer(r"\[y/N\] ", "y\n")
            joining.answer(r"\[y/N\] ", "y\n")
            shown.append(settled(joining.read("petalnode join petalnode:\\S+\\s")))
            question = ("--chat", "--show-route", "--yes", "--prompt", "What is the capital of France?")
            shown.append(settled(run(guest, "a third machine, with an empty disk", "join", link, *question).read()))
            say(f"\n\x1b[2m# after {time.monotonic() - began:.0f} s\x1b[0m\n")
        finally:
            print("".join(terminal.text for terminal in running))
            for terminal in running:
                terminal.end()
    draw("".join(shown), "friends.svg", "two friends' machines")
    play(played, "friends.cast", "two friends' machines")


if __name__ == "__main__":
    if "--friends" in sys.argv:
        friends()
    else:
        demo(sys.argv[1] if len(sys.argv) > 1 else "What is the capital of France?")
