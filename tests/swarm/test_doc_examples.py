"""Every example of the pages: commands and programs run as they stand, on a small swarm, and files are read.

An example that is not run is checked as far as it can be, and the table `NOT_RUN` says why; a block that is neither
command nor program is in `SHOWN`. One that is in no table is run.
"""

from __future__ import annotations

import ast
import io
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest
import trio
import typer
import typer.main

from petalnode.crypto.identity import held_identity
from petalnode.node.cli import app as command_line
from tests.doc_pages import PAGES, name_of
from tests.import_graph import ROOT
from tests.peft_adapters import peft, save_lora
from tests.swarm.certificates import certificate
from tests.swarm.processes import Node, Nodes, environment

MODEL: Final = "tiny-llama"
STANDS_FOR: Final = {
    "smollm2": MODEL,
    "MODEL": MODEL,
    "NAME": MODEL,
    "meta-llama/Llama-3.1-70B-Instruct": MODEL,
    "./my-model": MODEL,
    "./my-adapter": "my-adapter",
    "./poet": "my-adapter",
    "/srv/adapters": "adapters",
    "/srv/adapters.git": "adapters.git",
}
"""What stands for what in a folder with a tiny model."""

UNTIL_NETWORK, PARSED = "checked until it asks the network", "parsed"
NOT_RUN: Final = (
    (r"webrtc-direct", PARSED, "an extra; tests/interop/check_webrtc.py has such servers"),
    (r"--device cuda", PARSED, "GPUs; test_devices.py has a server with two devices"),
    (r"petalnode serve\b", UNTIL_NETWORK, "it runs until it is stopped; test_placement.py and others start servers"),
    (r"petalnode api\b(?! --new)", UNTIL_NETWORK, "it runs until it is stopped; test_api_process.py runs it"),
    (r"petalnode validate\b(?!.*--once)", UNTIL_NETWORK, "it runs until it is stopped"),
    (r"petalnode status --watch", UNTIL_NETWORK, "it runs until it is stopped; test_status.py draws its pictures"),
    (r"petalnode bootstrap\b", UNTIL_NETWORK, "it runs until it is stopped"),
    (r"--compare-chains", UNTIL_NETWORK, "three servers; test_compared_chains.py runs it"),
    (r"--share-receipts", UNTIL_NETWORK, "an auditor; test_auditing.py runs it"),
    (r"--require-pledge", UNTIL_NETWORK, "servers with pledges; test_credits.py runs it"),
    (r"--credits|petalnode credits", UNTIL_NETWORK, "a validator that has issued points; test_credits.py runs it"),
    (r"--adapter poet$", UNTIL_NETWORK, "a server that holds it; test_adapters.py runs it"),
    (r"petalnode join\b|--peer LINK", PARSED, "a link of a swarm that lives; test_links.py follows one"),
    (r"petalnode invite\b", UNTIL_NETWORK, "test_links.py runs it"),
    (r"verify-receipts", PARSED, "receipts of an answer; tests/api/test_receipts.py runs it"),
    (r"verify-evidence", PARSED, "evidence of a fault; test_validate.py runs it"),
    (r"bans --forgive", PARSED, "a banned server; test_evidence_gossip.py runs it"),
    (r"--to me/poems", PARSED, "the Hugging Face hub is on the internet"),
    (r"petalnode self-test", PARSED, "it takes two minutes; test_self_test.py runs it in parts"),
    (r"petalnode (pause|resume|stop)", PARSED, "a server of this user that runs; test_pause.py runs them"),
    (r"petalnode (service|logs)", PARSED, "systemd; test_machine_commands.py has one in its place"),
    (r"petalnode models (verify|remove)", PARSED, "a model of the cache; test_models_command.py runs them"),
    (r"petalnode demo", PARSED, "it downloads a model; test_demo.py runs it with another one"),
)
"""What a command needs that is not here, or why it would not end."""

TOOLS: Final = {
    "pip": "installs packages",
    "pipx": "installs packages",
    "uv": "installs packages",
    ".": "activates the environment that runs this",
    "curl": "asks a server that is not here; tests/api asks all of it",
    "export": "needs the reader's token",
    "ufw": "changes a firewall",
    "git": "counts lines",
    "printf": "makes data, as it stands",
    "python3": "installs a compiler",
    "/tmp/protoc/bin/pip": "installs a compiler",
    "cd": "runs that compiler",
}
"""Programs that are none of this project, and what they do."""

SHOWN: Final = {
    "docs/api.md": ("from openai import", "from anthropic import"),
    "docs/apps.md": (
        "from langchain_openai",
        "import litellm",
        "model_list:",
        "name: petalnode",
        "OPENAI_API_BASE_URL",
    ),
    "docs/lab.md": ("name,device",),
    "docs/fine-tuning.md": ('{"event":"step"', "prompt: 40 steps", "model = PeftModel"),
    "docs/monitoring.md": ("scrape_configs:", '{"time":'),
    "docs/nat.md": ("reachability: public",),
    "docs/placement.md": ("blocks = (free", "the whole model:", "taking blocks", '{"event":"moving"'),
    "docs/planning.md": ("time per token =", "{\n", "name,blocks"),
    "docs/privacy.md": ("$ petalnode chat",),
    "docs/protocol.md": ("varint length", "canonical(domain"),
    "docs/recovery.md": ("LATE: Send what",),
    "docs/validation.md": ('{"event":"verdict"',),
    "docs/troubleshooting.md": (),
}
"""Blocks that are output, formulas, or files; those of docs/planning.md are run below.

The programs of docs/api.md need its server: tests/api runs them. Those of docs/apps.md need packages that are not
installed here; the page says with which versions they were tried."""


@dataclass(frozen=True)
class Block:
    language: str
    text: str


def blocks_of(page: Path) -> list[Block]:
    """Fenced blocks, and those that are indented by four."""
    text = page.read_text()
    fenced = re.findall(r"^( *)```(\w*)\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    rest = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    found = [Block(language, re.sub(rf"^{indent}", "", code, flags=re.MULTILINE)) for indent, language, code in fenced]
    for indented in re.findall(r"(?:(?<=\n\n)|(?<=\A)) {4}\S.*\n(?: {4}.*\n|\n(?= {4}))*", rest):
        found.append(Block("", re.sub(r"^ {4}", "", indented, flags=re.MULTILINE)))
    return found


def is_shown(page: Path, block: Block) -> bool:
    return any(block.text.startswith(beginning) for beginning in SHOWN.get(name_of(page), ()))


def bare(line: str) -> str:
    """A command without the program that measures it or gives it precedence."""
    return re.sub(r"^(/usr/bin/time -f '[^']*'|nice -n -?\d+) ", "", line.strip())


def commands_of(page: Path) -> list[str]:
    """The commands of a page's blocks, and those in the text that have options or are a pipe."""
    lines = [
        line
        for block in blocks_of(page)
        if block.language != "python" and not is_shown(page, block)
        for line in block.text.replace("\\\n", " ").splitlines()
    ]
    rest = re.sub(r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    spans = [" ".join(span.replace("\\|", "|").split()) for span in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", rest)]
    lines += [span for span in spans if re.match(r"(echo .*\| )?petalnode [a-z].* --?\w", span)]
    lines += [span for span in spans if re.match(r"(python|pytest|make|sudo|pip|pipx|uv|ufw|export|git) ", span)]
    commands = [bare(re.split(r"(?:^|\s+)# |\s{2,}\(", line)[0]) for line in lines]
    return list(dict.fromkeys(command for command in commands if command))


def alternatives(command: str) -> list[str]:
    """Without and with what stands in brackets; `a|b` as one and as the other."""
    parts = re.split(r"(\[[^\]]*\])", command)
    choices: list[tuple[str, ...]] = [("", part[1:-1]) if part.startswith("[") else (part,) for part in parts]
    found = {" ".join("".join(chosen).split()) for chosen in product(*choices)}
    return sorted({word for text in found for word in _either(text)})


def _either(text: str) -> Iterator[str]:
    match = re.search(r"(?<=\s)(\w+(?:\|\w+)+)(?=\s|$)", text)
    if match is None:
        yield text
        return
    for word in match[1].split("|"):
        yield from _either(text[: match.start()] + word + text[match.end() :])


@dataclass(frozen=True)
class Place:
    """A folder with a model, an adapter and data, and a server of the model."""

    folder: Path
    server: Node

    def arguments(self, command: str) -> list[str]:
        """A command of petalnode with what is here in the place of what it names."""
        words = shlex.split(command.removeprefix("petalnode "))
        return [self._word(word, before) for before, word in zip(["", *words], words, strict=False)]

    def _word(self, word: str, before: str) -> str:
        if word.startswith(("/ip4/", "MULTIADDR", "VALIDATOR")) or (word == "..." and before == "--peer"):
            return self.server.address
        if word.startswith("12D3KooW") or word in ("PEER", "SERVER"):
            return self.server.peer_id
        if before == "--num-blocks" and word.isdecimal() and int(word) < 80:
            return "3"  # the examples' models have more
        if word == "FILE":
            return {"--data": "poems.jsonl", "--machines": "machines.json"}.get(before, "file")
        return {"POINTS": "500", "...": "hi", **STANDS_FOR}.get(word, word)

    def code(self, text: str) -> str:
        """A program with the same."""
        return text.replace('"smollm2"', repr(MODEL)).replace('"/ip4/..."', repr(self.server.address))


@pytest.fixture(scope="module")
def server(node_starter: Nodes, models: Path) -> Node:
    return node_starter.server(models / MODEL, "0:6", "--cache-tokens", "100000")


@pytest.fixture(scope="module")
def adapter(models: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_lora(models / MODEL, tmp_path_factory.mktemp("adapter") / "my-adapter", ["q_proj", "v_proj"])


@pytest.fixture
def place(server: Node, models: Path, adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    (tmp_path / MODEL).symlink_to(models / MODEL)
    (tmp_path / "poems.jsonl").write_text('{"text": "one two three"}\n{"text": "two one"}\n' * 6)
    certificate(tmp_path)
    (tmp_path / "adapters").mkdir()
    subprocess.run(["git", "init", "--quiet", "--bare", "adapters.git"], cwd=tmp_path, check=True)
    shutil.copytree(adapter, tmp_path / "my-adapter")
    for name, value in environment(tmp_path / "home", PETALNODE_PEERS=server.address).items():
        monkeypatch.setenv(name, value)
    with held_identity(None, "serve", tmp_path / "home" / "data" / "petalnode"):
        pass  # the key of the reader's server
    monkeypatch.chdir(tmp_path)
    return Place(tmp_path, server)


class _AsksTheNetwork(Exception):
    pass


def _ask_nothing(*_: object, **__: object) -> None:
    raise _AsksTheNetwork


def parse(arguments: list[str]) -> None:
    """Has the command line's own parser read all arguments. Raises its errors."""
    command: Any = typer.main.get_command(command_line.command_line(arguments))
    while arguments and hasattr(command, "commands"):
        command, arguments = command.commands[arguments[0]], arguments[1:]
    command.make_context(command.name, list(arguments))


def try_out(command: str, place: Place, monkeypatch: pytest.MonkeyPatch) -> tuple[str, int]:
    """How far a command of petalnode was taken, and its exit code."""
    arguments = command_line.with_values(place.arguments(command))
    how = next((how for pattern, how, _ in NOT_RUN if re.search(pattern, command)), "run")
    if arguments[0] == "chat" and how == "run":
        arguments += ["--max-new-tokens", "2"]
    if arguments[0] == "tune":
        arguments += ["--overwrite", "--sample-tokens", "2"]
    parse(arguments)
    if how == PARSED:
        return how, 0
    with monkeypatch.context() as here:
        here.setattr(sys, "stdin", io.StringIO("hello\n"))
        if how == UNTIL_NETWORK:
            here.setattr(trio, "run", _ask_nothing)
            try:
                return how, command_line.run(arguments)
            except _AsksTheNetwork:
                return how, 0
        return how, command_line.run(arguments)


def check_tool(command: str) -> None:
    """Of a program that is not petalnode: that what it names exists."""
    words = shlex.split(command)
    while "=" in words[0] or words[0] == "sudo":
        words = words[1:]
    match words:
        case ["make", *rest]:
            makefile = (ROOT / "Makefile").read_text()
            for word in rest:
                name, is_variable, _ = word.partition("=")
                assert re.search(rf"^{name} \?=" if is_variable else rf"^{name}:", makefile, re.MULTILINE), command
        case ["python", "-m", module, *rest]:
            path = ROOT / module.removeprefix("petalnode.").replace(".", "/")
            check_options(path.with_suffix(".py") if path.with_suffix(".py").exists() else path / "__main__.py", rest)
        case ["printf", *_]:
            subprocess.run(["bash", "-c", command], check=True)
        case ["python", "-c", *_]:
            pass  # tests/unit/test_tuning_data.py runs it
        case ["python", script, *rest]:
            check_options(ROOT / script, rest)
        case ["pytest", *rest]:
            known = {"-k", "-s", "-n", "--dist", "--no-loadscope-reorder"}
            known |= {"--processor-time-by-file", "--hypothesis-profile"}
            assert {word for word in rest if word.startswith("-")} <= known, command
            assert all((ROOT / word).exists() for word in rest if word.startswith("tests")), command
        case _:
            assert words[0] in TOOLS, command


def check_options(script: Path, arguments: list[str]) -> None:
    """That a program of this project knows all these options: each is one of its texts, or made of one and "--"."""
    constants = [node.value for node in ast.walk(ast.parse(script.read_text())) if isinstance(node, ast.Constant)]
    for word in arguments:
        if word.startswith("--"):
            assert word in constants or {"--", word.removeprefix("--")} <= set(constants), (script, word)


WITH_EXAMPLES = [page for page in PAGES if commands_of(page)]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=name_of)
def test_commands_do_what_they_should(
    page: Path, place: Place, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the page: a result of one is used by the next."""
    for source in (ROOT / "docs/planning.md", page)[: 1 + (page.name == "lab.md")]:
        write_machines(source, place.folder)
    for written in commands_of(page):
        for command in alternatives(written):
            piped = re.fullmatch(r"echo .* \| (petalnode .*)", command)
            command = piped[1] if piped else command
            if not command.startswith("petalnode "):
                check_tool(command)
                continue
            for tried in [command, command.replace("FILE", "machines.csv --num-blocks 80")][: 1 + ("plan" in command)]:
                how, code = try_out(tried, place, monkeypatch)
                said = capsys.readouterr()
                # Whether this machine has enough memory and disk is for the doctor to say.
                assert code in ((0, 1) if "petalnode doctor" in tried else (0,)), (tried, how, said)
                assert "Traceback" not in said.err, (tried, said)


def write_machines(page: Path, folder: Path) -> None:
    """The two files of machines."""
    for block in blocks_of(page):
        if block.text.startswith("{"):
            (folder / "machines.json").write_text(block.text)
        elif block.text.startswith("name,"):
            (folder / "machines.csv").write_text(block.text)


def test_no_block_is_left_out() -> None:
    """Each is a program, a list of commands, or in `SHOWN`; and `SHOWN` and `TOOLS` name nothing that is gone."""
    words = {"petalnode", "make", "python", "pytest", "sudo", *TOOLS}
    used = set()
    for page in PAGES:
        blocks = blocks_of(page)
        for block in blocks:
            if block.language == "python":
                compile(block.text, str(page), "exec")
            elif not is_shown(page, block):
                for line in block.text.replace("\\\n", " ").splitlines():
                    first = next((word for word in bare(line).split() if "=" not in word), "")
                    assert not line.strip() or first in words, (name_of(page), line)
        for beginning in SHOWN.get(name_of(page), ()):
            assert any(block.text.startswith(beginning) for block in blocks), (name_of(page), beginning)
        used.update(word for command in commands_of(page) for word in command.split())
    assert set(TOOLS) <= used, set(TOOLS) - used


PROGRAMS = [page for page in PAGES if any(block.language == "python" for block in blocks_of(page))]


@pytest.mark.parametrize("page", PROGRAMS, ids=name_of)
def test_programs_run(page: Path, place: Place) -> None:
    """With what the text around them says is there."""
    import torch
    from transformers import AutoModelForCausalLM

    from petalnode import LoraTuning

    ids = torch.tensor([[3, 4, 5]])
    (place.folder / "poems-lora").symlink_to("my-adapter")
    names: dict[str, Any] = {
        "torch": torch,
        "PeftModel": peft.PeftModel,
        "AutoModelForCausalLM": AutoModelForCausalLM,
        "LoraTuning": LoraTuning,
        "folder": MODEL,
        "ids": ids,
        "more": ids,
        "messages": [],
        "processor": SimpleNamespace(apply_chat_template=lambda *_, **__: {"input_ids": ids}),
        "batches": [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}],
    }
    for block in blocks_of(page):
        if block.language == "python":
            exec(compile(place.code(block.text), str(page), "exec"), names)
    if hasattr(names["model"], "close"):
        names["model"].close()
