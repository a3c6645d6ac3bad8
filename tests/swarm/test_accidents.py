"""Every command in accidents: its exit code, one line that can be read, no traceback, and nothing left behind.

An accident is made in the command's own process before it begins, so that nothing depends on how fast anything is.
"""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
import trio
from rich.table import Table
from safetensors.numpy import save_file

from petalnode.crypto.identity import Identity
from petalnode.crypto.swarm_key import make_swarm_key
from petalnode.node.cli import app as command_line
from petalnode.node.cli import model_choice
from petalnode.node.cli.join import JoinOptions
from petalnode.node.cli.model_choice import why_no_device
from petalnode.node.cli.output import Output
from petalnode.node.client.api.runtime import TrioThread
from petalnode.node.errors import BadInput
from petalnode.node.links.making import LINKS, LinkWishes, make_link
from petalnode.node.tuning.repository import FolderRepository, HubRepository, repository_of
from tests.swarm import warm_python
from tests.swarm.processes import STOP_TIMEOUT, Outcome, environment, wait_ended

PEER = "12D3KooWBhrhHZJGkd5mZzQm7dUeUqBvF9ypJTJQTtjrcDMWFXQV"
NOBODY = f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}"

COMMANDS = {
    "help": "--help",
    "demo": "demo --servers 1 --prompt hi",
    "serve": "serve {models}/tiny-llama --peer {nobody} --listen /ip4/127.0.0.1/tcp/0 --blocks 0:1",
    "chat": "chat {models}/tiny-llama --peer {nobody}",
    "api": "api {models}/tiny-llama --peer {nobody} --http-port 0",
    "status": "status --peer {nobody}",
    "bootstrap": "bootstrap --peer {nobody} --listen /ip4/127.0.0.1/tcp/0",
    "doctor": "doctor --peer {nobody}",
    "self-test": "self-test --timeout 1 --new-swarm",
    "swarm-key": "swarm-key {scratch}/swarm.key",
    "manifest": "manifest {models}/tiny-llama",
    "models": "models",
    "plan": "plan --machines {scratch}/machines.json --num-blocks 6 --block-mb 1 --seconds 0.01",
    "tune": "tune {models}/tiny-llama --peer {nobody} --data {scratch}/data.jsonl --out {scratch}/out",
    "adapters": "adapters search --at {scratch}",
    "validate": "validate {models}/tiny-llama --peer {nobody} --once",
    "verify-evidence": "verify-evidence {scratch}/data.jsonl {models}/tiny-llama",
    "verify-receipts": "verify-receipts {scratch}/data.jsonl",
    "bans": "bans",
    "pause": "pause",
    "resume": "resume",
    "stop": "stop",
    "service": "service install --show smollm2",
    "update": "update",
    "completion": "completion bash",
    "man": "man",
    "credits": "credits balance {nobody} --key {scratch}/node.key",
}
"""Without a network each of them ends by itself."""
ALL = tuple(COMMANDS)

_SIGNAL = """
import signal
from petalnode.node.cli import app
command_line = app.command_line
def interrupted(arguments):
    signal.raise_signal(signal.{})
    return command_line(arguments)
app.command_line = interrupted
"""


@dataclass(frozen=True)
class Accident:
    """Python that runs before the command; the codes that it may end with, all that mean something if none are given;
    and what its one line says."""

    before: str
    codes: tuple[int, ...] = (0, 1, 2, 3, 4)
    says: str = ""
    commands: tuple[str, ...] = ("help", "chat", "status", "doctor", "swarm-key", "tune", "bans")


ACCIDENTS = {
    "Ctrl-C at the start": Accident(_SIGNAL.format("SIGINT"), (130,), "interrupted$", ALL),
    "SIGTERM at the start": Accident(_SIGNAL.format("SIGTERM"), (143,), "stopped by SIGTERM$", ("chat",)),
    "SIGHUP at the start": Accident(_SIGNAL.format("SIGHUP"), (129,), "stopped by SIGHUP$", ("tune",)),
    "no standard streams": Accident(
        "import os, sys\nos.close(0), os.close(1)\nsys.stdin = sys.stdout = None", commands=ALL
    ),
    "a full disk behind standard output": Accident(
        "import os\nos.dup2(os.open('/dev/full', os.O_WRONLY), 1)", (1, 2, 3, 4), commands=ALL
    ),
    "nobody reads standard output": Accident("import os\nr, w = os.pipe()\nos.close(r), os.dup2(w, 1)"),
    "an ASCII terminal": Accident(
        "import sys\nfor n, name in enumerate(('stdout', 'stderr'), 1):\n"
        " setattr(sys, name, open(n, 'w', encoding='ascii', closefd=False))"
    ),
    "a full disk": Accident("import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))", commands=ALL),
    "a working folder that is gone": Accident(
        "import os, tempfile\ngone = tempfile.mkdtemp()\nos.chdir(gone), os.rmdir(gone)",
        commands=("help", "chat", "status", "models", "plan", "tune", "service"),
    ),
    "no data folder": Accident("import os\nos.environ.update(HOME='/proc/x', XDG_DATA_HOME='/proc/x')"),
    "no open file more": Accident("import resource\nresource.setrlimit(resource.RLIMIT_NOFILE, (14, 14))"),
}  # fmt: skip

CASES = [(command, name) for name, accident in ACCIDENTS.items() for command in accident.commands]
_NO_INDEX = {"PIP_INDEX_URL": "http://127.0.0.1:1/simple", "PIP_EXTRA_INDEX_URL": "", "PIP_RETRIES": "0"}
"""A demo does not download its model."""
_RUN = "\nimport runpy\nrunpy.run_module('petalnode', run_name='__main__', alter_sys=True)"


@pytest.fixture(scope="module")
def outcomes(home: Path, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Outcome]]:
    """All commands in all accidents, two at a time."""

    def run(command: str, accident: str) -> Outcome:
        scratch = tmp_path_factory.mktemp(command)
        (scratch / "data.jsonl").write_text('{"text": "one two"}\n')
        machines = [{"name": name, "blocks": 6, "ms_per_block": 10} for name in ("one", "two")]
        (scratch / "machines.json").write_text(json.dumps(machines))
        arguments = COMMANDS[command].format(models=models, nobody=NOBODY, scratch=scratch).split()
        started = warm_python.start(
            [sys.executable, "-c", ACCIDENTS[accident].before + _RUN, *arguments],
            environment(home, **_NO_INDEX),
            scratch,
        )
        try:
            assert started.stdin is not None and started.stdout is not None and started.stderr is not None
            started.stdin.close()
            code = wait_ended(started, STOP_TIMEOUT)
            # Pipes hold all that a command says here; a file would be under the limits of some accidents.
            with started.stdout, started.stderr:
                return Outcome(code, started.stdout.read(), started.stderr.read())
        finally:
            started.kill()

    with ThreadPoolExecutor(max_workers=2) as pool:
        waiting: dict[tuple[str, str], Future[Outcome]] = {case: pool.submit(run, *case) for case in CASES}
        yield lambda *case: waiting[case].result()
        for future in waiting.values():
            future.cancel()


@pytest.mark.parametrize(("command", "accident"), CASES)
def test_an_accident_is_one_line(command: str, accident: str, outcomes: Callable[..., Outcome]) -> None:
    expected, outcome = ACCIDENTS[accident], outcomes(command, accident)
    assert "Traceback" not in outcome.err + outcome.out and "Exception" not in outcome.err, outcome
    assert outcome.code in expected.codes, outcome
    lines = [line for line in outcome.err.splitlines() if line.startswith("petalnode: ")]
    # These two tell what they have found as their result.
    assert len(lines) == 1 or not outcome.code or (command in ("doctor", "self-test") and outcome.code == 1), outcome
    if expected.says:
        assert re.search(expected.says, lines[0]), outcome


def test_what_was_typed_is_printed_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    typed = ":smile: [red]a:b[/red] \\[x]"
    output = Output(False)
    output.say(typed)
    output.note(typed)
    output.error(typed)
    table = Table(box=None)
    table.add_row(typed)
    output.table(table)
    shown = capsys.readouterr()
    assert shown.out.count(typed) == 2 and shown.err.count(typed) == 2


def test_the_help_says_what_the_commands_say() -> None:
    """It has the texts without the commands, which take long to import."""
    commands = command_line.every_command().commands
    texts = {name: " ".join((command.help or "").split("\n\n")[0].split()) for name, command in commands.items()}
    assert texts == command_line.COMMANDS


FREED = """
import signal, sys, time
from petalnode.node.cli import process

class Freed:
    def __del__(self):
        signal.raise_signal(int(sys.argv[1]))
        time.sleep(0)

process.prepare()
try:
    Freed()
    for _ in range(60_000):
        time.sleep(0.01)
except KeyboardInterrupt as error:
    sys.exit(process.exit_code(error))
"""


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "interrupted"), (signal.SIGTERM, "stopped by SIGTERM")])
def test_signal_where_nothing_can_be_raised_is_kept(number: signal.Signals, said: str) -> None:
    ended = subprocess.run([sys.executable, "-c", FREED, str(int(number))], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (128 + number, f"petalnode: {said}\n")


@pytest.mark.parametrize("name", ["chat", "api", "status", "bootstrap", "serve", "validate", "doctor", "credits"])
def test_an_interrupt_at_work_is_told(
    name: str, models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    Identity.generate().save(tmp_path / "node.key")
    monkeypatch.setattr(trio, "run", interrupted)
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    arguments = COMMANDS[name].format(models=models, nobody=NOBODY, scratch=tmp_path).split()
    assert command_line.run(arguments) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "petalnode: interrupted"


_TURNS = [{"role": "user", "content": "who?"}, {"role": "assistant", "content": "me"}]
MISTAKES = {
    "a device": ("serve {llama} --device tpu", "--device tpu: use auto, cpu, mps, cuda or cuda:N"),
    "one device twice": ("serve {llama} --device cuda --device cuda:0", "--device cuda:0 is given twice: name each"),
    "any device among others": ("serve {llama} --device cpu --device auto", "--device auto is one device: name all"),
    "devices without blocks": (
        "serve {llama} --blocks 0:2 --device cpu --device cpu --device cpu",
        "3 devices are more than 2 blocks: give --device fewer times",
    ),
    "a dtype": ("serve {llama} --dtype float8", "'--dtype': float8: use auto, float32, bfloat16, float16"),
    "blocks": ("serve {llama} --blocks 25:99", "--blocks 25:99: tiny-llama has 6 blocks"),
    "typed markup": ("serve {llama} --blocks a:b", "--blocks a:b"),
    "an adapter that is none": ("serve {llama} --adapter {empty}", "{empty} holds no adapter"),
    "an adapter of NaN": ("serve {llama} --adapter {nan}", "w.lora_A holds NaN or infinity"),
    "a chat's adapter of NaN": ("chat {llama} --prompt hi --adapter {nan}", "w.lora_A holds NaN or infinity"),
    "sharing an adapter of NaN": ("adapters push {nan} --to {empty}", "w.lora_A holds NaN or infinity"),
    "no such model": ("chat {empty}/nothing --prompt hi", "There is no folder or file {empty}/nothing"),
    "a home of nobody": ("serve ~nobody-is-called-so/model", "a path begins with ~.* is not known: write it out"),
    "an empty prompt": ("chat {llama} --prompt=", "--prompt is empty"),
    "a peer id": ("chat {llama} --prompt hi --deny me", "--deny me: this is no peer id"),
    "an address": ("status --peer /ip4/1.2.3.4/tpc/1", "'tpc' is none of its parts"),
    "an address to listen at": (
        "bootstrap --listen foo",
        "'foo' is no multiaddr: it does not begin with a slash; it looks like /ip4/0.0.0.0/tcp/31330",
    ),
    "a device to tune with": ("tune {llama} --data {data} --device tpu", "--device tpu"),
    "one label": ("tune {llama} --data {data}", "all examples have the label 'a'"),
    "a folder that cannot be": ("tune {llama} --data {texts} --out {texts}/out", "Saving in --out .*Not a directory"),
    "a validator's device": ("validate {llama} --device tpu", "--device tpu"),
    "blocks and a number": ("serve {llama} --blocks 0:1 --num-blocks 2", "--blocks and --num-blocks both choose"),
    "a name that nodes refuse": ("serve {llama} --name {long}", "--name: other nodes take at most 256 characters"),
    "points without end": ("serve {llama} --pledge 99999999999999999999", "--pledge 9+: other nodes take at most"),
    "an adapter of another model": ("serve {llama} --adapter {other}", "the adapter other is not for this model"),
    "one adapter twice": ("serve {llama} --adapter {fit} --adapter {fit}", "two adapters are called fit"),
    "a layer": (
        "tune {llama} --data {texts} --method lora --target-modules q_proj,v_prj",
        "block is called v_prj; there",
    ),
    "layers of prompts": ("tune {llama} --data {texts} --target-modules q_proj", "add --method lora"),
    "no tokenizer": ("tune {gpt2} --data {texts}", "tiny-gpt2 has no tokenizer"),
    "a number below": ("serve {llama} --pledge -1", "Invalid value for '--pledge'.*`petalnode serve --help` says what"),
    "a chat's seed": (
        "chat {llama} --prompt hi --seed 99999999999999999999",
        "--seed 9+: give a number of at most 64",
    ),
    "a server of two kinds": ("api {llama} --allow {peer} --deny {peer}", "--allow and --deny both name {peer}"),
    "a file for evidence": ("validate {llama} --evidence-dir {texts}", "--evidence-dir .*texts.jsonl is a file"),
    "a device to check with": ("verify-evidence {texts} {llama} --device tpu", "--device tpu"),
    "an option": ("status --frobnicate", "No such option: --frobnicate: `petalnode status --help` says what it takes"),
    "no value": ("status --json=3", "does not take a value: `petalnode status --help`"),
    "a command": ("statsu", "No such command 'statsu'"),
    "a CSV file": ("tune {llama} --data {csv}", "{csv} is a CSV file, and --data takes JSONL.*python -c .*jsonl$"),
    "a parquet file": ("tune {llama} --data {parquet}", "{parquet} is a parquet file.*read_parquet"),
    "no answer": ("tune {llama} --data {question}", 'line 1: "messages" takes a question and behind it an answer'),
    "messages as plain text": (
        "tune {llama} --data {chats} --no-chat-template",
        '"messages" are learned by the model\'s chat template, and --no-chat-template was given',
    ),
    "nothing to learn from": ("tune {llama}", "what to learn from\\? Give --data FILE"),
    "two lengths": ("tune {llama} --data {texts} --epochs 1 --steps 2", "--epochs and --steps both say how long"),
    "patience without a look": ("tune {llama} --data {texts} --patience 2", "--patience needs evaluations"),
    "a link that is cut": ("join petalnode:aeacu", "this link is cut, its end is missing: copy all of it"),
    "a link with other signs": ("join petalnode:a!1", "this link has signs that no link has: copy all of it"),
    "no link": ("join somewhere", "this is no link: they begin with petalnode:"),
    "a link that has ended": ("join {ended}", "this link ended at 2023-11-14 .*petalnode invite"),
    "a link with another letter": ("join {altered}", "this link was altered, its signature does not hold: ask for it"),
    "a link into a private swarm": ("chat --peer {private} --prompt hi", "--swarm-key FILE"),
    "a link of another swarm than the key": ("status --peer {public} --swarm-key {key}", "of the public swarm"),
    "a link of another private swarm": ("status --peer {private} --swarm-key {key}", "of another private swarm"),
    "links of two swarms": ("status --peer {public} --peer {open}", "of several swarms"),
    "a link of a newer petalnode": ("join petalnode:77777777", "of a newer petalnode .*: update petalnode"),
    "a link and an address": ("join petalnode:aeacu --peer {nobody}", "takes the link by itself: leave --peer out"),
    "a question without a chat": ("join {public} --prompt hi", "--prompt and --show-route go with --chat"),
    "blocks of a chat": ("join {public} --chat --num-blocks 2", "--chat serves nothing: leave them out"),
    "a service of an old link": ("service install --peer {ended}", "this link ended at 2023-11-14"),
    "a service's option": ("service install --num-block 2", "No such option: --num-block"),
    "a link as a model": ("chat petalnode:aeacu --prompt hi --peer {nobody}", "this is a link, and no MODEL"),
    "a model of no known size": ("fit none/such", "the size of none/such is not known: `petalnode fit` lists"),
    "a file of machines": ("fit --machines {empty}/none", "{empty}/none cannot be read: No such file or directory$"),
    "a mistyped command": ("fitt", "No such command 'fitt'. Did you mean 'fit'\\? `petalnode --help` says"),
    "a swarm that is new and old": (
        "status --new-swarm --peer {nobody}",
        "--new-swarm starts a swarm and --peer joins",
    ),
    "a key in sight": (
        f"status --peer {NOBODY} --swarm-key {'ab' * 32}",
        "--swarm-key takes the key's file, and not the key",
    ),
    "hours": ("serve {llama} --between 25:00-07:00", "--between 25:00-07:00"),
    "a shell": ("completion tcsh", "tcsh: give bash, zsh or fish"),
    "binary input": ("chat {llama}", "what came through the pipe is binary, and no text"),
    "a conversation that is none": ("chat {llama} --prompt hi --session {texts}", "texts.jsonl"),
    "a temperature": ("chat {llama} --prompt hi --temperature -1", "--temperature"),
    "a rate": ("bootstrap --max-upload fast", "--max-upload fast"),
}


def _links(folder: Path) -> dict[str, str]:
    """Links of all kinds, and the file of a key that none of them is for."""
    maker, now, secret = Identity.from_seed(bytes(32)), time.time(), "ab" * 32
    wishes = {"public": LinkWishes(), "private": LinkWishes(psk=secret), "open": LinkWishes(psk=secret, with_key=True)}
    made = {name: make_link(wish, (NOBODY,), maker, now)[0] for name, wish in wishes.items()}
    made["ended"] = make_link(LinkWishes(), (NOBODY,), maker, 1_700_000_000 - LINKS.lifetime)[0]
    made["altered"] = made["public"][:-3] + ("aaa" if not made["public"].endswith("aaa") else "bbb")
    make_swarm_key(folder / "key")
    return made | {"key": str(folder / "key")}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistake_is_told_before_network_is_asked(
    name: str,
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "empty").mkdir()
    bad = tmp_path / "nan"
    bad.mkdir()
    save_file({"w.lora_A": np.array([1.0, np.nan], dtype=np.float32)}, bad / "adapter_model.safetensors")
    (bad / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (tmp_path / "data.jsonl").write_text('{"text": "x", "label": "a"}\n{"text": "y", "label": "a"}\n')
    (tmp_path / "texts.jsonl").write_text('{"text": "one two"}\n')
    for adapter, layer in (("fit", "model.layers.0.self_attn.q_proj"), ("other", "transformer.h.0.attn.c_attn")):
        halves = {"A": (4, 64), "B": (64, 4)}
        lora = {f"base_model.model.{layer}.lora_{half}.weight": np.zeros(shape, "f4") for half, shape in halves.items()}
        (tmp_path / adapter).mkdir()
        save_file(lora, tmp_path / adapter / "adapter_model.safetensors")
        (tmp_path / adapter / "adapter_config.json").write_text('{"peft_type": "LORA", "lora_alpha": 6, "r": 4}')
    places = {"llama": models / "tiny-llama", "gpt2": models / "tiny-gpt2", "empty": tmp_path / "empty", "nan": bad}
    places |= {"fit": tmp_path / "fit", "other": tmp_path / "other", "long": Path("n" * 257), "peer": Path(PEER)}
    files = {"csv": "text\none\n", "parquet": "PAR1"}
    files |= {name: json.dumps({"messages": _TURNS[:turns]}) for name, turns in (("question", 1), ("chats", 2))}
    for ending, text in files.items():
        places[ending] = tmp_path / f"file.{ending}"
        places[ending].write_text(text)
    links = _links(tmp_path)
    places |= {"nobody": Path(NOBODY), "data": tmp_path / "data.jsonl", "texts": tmp_path / "texts.jsonl"}
    monkeypatch.setattr(trio, "run", lambda *arguments: pytest.fail(f"went on to {arguments[0]}"))
    monkeypatch.setattr(TrioThread, "__init__", lambda *arguments: pytest.fail(f"went on to {arguments[1]}"))
    monkeypatch.delenv("PETALNODE_PEERS", raising=False)
    command, says = MISTAKES[name]
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\x7fELF\0\1")))
    arguments = command.format(**places, **links).split()
    assert command_line.run(arguments) == (4 if name == "a folder that cannot be" else 2)
    # A slow machine says what it waits for besides.
    (line,) = [line for line in capsys.readouterr().err.splitlines() if not line.endswith(" ...")]
    assert line.startswith("petalnode: ") and re.search(says.format(**places), line), line


@pytest.mark.parametrize(
    ("built", "driver", "device", "reason"),
    [
        ("cuda: Optional[str] = None\nhip: Optional[str] = None\n", False, "cuda", "one without CUDA"),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", False, "cuda:1", "no driver for NVIDIA cards"),
        ("cuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n", True, "cuda", None),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.3'\n", False, "cuda", None),
        ("another = 1\n", False, "cuda", None),
        ("", False, "mps", "only macOS has it"),
    ],
    ids=["no CUDA", "no driver", "CUDA", "ROCm", "an unknown build", "no macOS"],
)
def test_impossible_device_is_told_without_torch(
    built: str, driver: bool, device: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it may be here, torch is asked."""

    def load(_: str) -> None:
        if not driver:
            raise OSError

    (tmp_path / "version.py").write_text(built)
    spec = ModuleSpec("torch", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr(model_choice, "find_spec", lambda _: spec)
    monkeypatch.setattr(model_choice.ctypes, "CDLL", load)
    found = why_no_device(device, "linux")
    assert found is None if reason is None else reason in str(found)
    assert why_no_device("mps", "darwin") is None


def test_the_variable_with_a_bad_address_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PETALNODE_PEERS", "garbage")
    assert command_line.run(["status"]) == 2
    said = capsys.readouterr().err
    assert "the variable PETALNODE_PEERS: 'garbage' is no multiaddr" in said and said.count("garbage") == 1


def test_a_mistyped_folder_is_no_public_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shared" / "adapters").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    for mistyped in ("shared/adaptors", "shraed/adapters"):
        with pytest.raises(BadInput, match=r"there is shared/adapters.*hub:"):
            repository_of(mistyped, writes=True)
    assert isinstance(repository_of("shared/adapters", writes=True), FolderRepository)
    for named in ("hub:shared/adaptors", "me/poems"):
        assert isinstance(repository_of(named, writes=True), HubRepository)
    with pytest.raises(BadInput, match="hub:ORG/NAME"):
        repository_of("hub:poems")


def test_readable_swarm_key_is_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    key = tmp_path / "swarm.key"
    make_swarm_key(key)
    JoinOptions(swarm_key=key, mdns=False).check()
    assert not capsys.readouterr().err
    key.chmod(0o644)
    JoinOptions(swarm_key=key, mdns=False).check()
    assert f"chmod 600 {key}" in capsys.readouterr().err


def test_help_explains_the_most_needed_and_names_others() -> None:
    def shown(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "petalnode", *arguments],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
            env=os.environ | {"COLUMNS": "200"},
        )
        return done.stdout + done.stderr

    short, long = shown("chat", "--help"), shown("chat", "--help-all")
    assert "Save the conversation" in short and "Sample from the most" not in short and "--top-p" in short
    assert (
        "Sampling temperature" in short
        and "System prompt" in short
        and "Sample from the most" in long
        and "More options" not in long
    )
