"""Python processes that start in a fraction of the time that torch, transformers and libp2p take to import.

Each is a process of its own: its own pipes, environment, folder, signals and exit code. It is a copy (fork) of one that
has imported everything and done nothing yet, in which the program runs as Python itself would run it. A command that
`ip netns exec` begins runs in that network namespace. Servers of test_demo.py have the usual start, with its imports.
The workers of xdist are such copies too (warm_worker.py). Programs that are to show what a node without a model takes
(`_LIGHT`) are copies of another process, which has imported no torch.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import IO, Any, Final, TypeAlias

_ROOT: Final = Path(__file__).parents[2]

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False  # what one process has compiled is for the next one

_READ_AT_IMPORT: Final = ("LD_", "MKL_", "OMP_", "PYTHON")
"""Variables, or how their names begin, that a copy takes no notice of any more."""

_ENVIRONMENT: Final = {name: value for name, value in os.environ.items() if name.startswith(_READ_AT_IMPORT)} | {
    "OMP_NUM_THREADS": "1",
    "PYTHONUNBUFFERED": "1",
}
"""Those of the process that is copied. Programs that want others are started the usual way."""

_CLONE_NEWNET: Final = 0x40000000  # of setns(2); Python has it from 3.12 on

_MODELS: Final = ("llama", "gpt2", "gemma3")
_LIGHT: Final = ("benchmarks.light_node",)


class WarmProcess:
    """A copy of the warm process; a small `subprocess.Popen` with pipes that carry text lines."""

    def __init__(self, pid: int, status: int, args: list[str], pipes: Sequence[int | None]) -> None:
        self.pid = pid
        self.args = args
        self.returncode: int | None = None
        self.used = 0.0  # seconds of processor time, once it is known how it ended
        self._status = status
        self._lock = threading.Lock()
        modes = ("w", "r", "r")
        self.stdin, self.stdout, self.stderr = (
            None if pipe is None else open(pipe, mode, buffering=1)  # noqa: SIM115
            for pipe, mode in zip(pipes, modes, strict=True)
        )

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        return self._waited(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code.

        Raises:
            subprocess.TimeoutExpired: it runs on.
        """
        deadline = None if timeout is None else monotonic() + timeout
        # Another thread that waits longer shall not hold up a poll: nobody waits under the lock for long.
        while (code := self._waited(0.2 if deadline is None else min(0.2, max(0.0, deadline - monotonic())))) is None:
            if deadline is not None and monotonic() >= deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Nothing happens if it has ended."""
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def _waited(self, seconds: float) -> int | None:
        with self._lock:
            if self.returncode is None and select.select([self._status], [], [], seconds)[0]:
                said = os.read(self._status, 64)
                os.close(self._status)
                assert said, f"the process that {self.args} was copied from has ended"
                code, used = said.split()
                self.returncode, self.used = int(code), float(used)
            return self.returncode


Process: TypeAlias = "WarmProcess | subprocess.Popen[str]"


def environment() -> dict[str, str]:
    """That of this process, changed so that programs start warm in it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", *_READ_AT_IMPORT))}
    return kept | {"HF_HUB_OFFLINE": "1"} | _ENVIRONMENT


def python_environment() -> dict[str, str]:
    """That of this process, with which Python starts warm."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_READ_AT_IMPORT)} | _ENVIRONMENT


def worker_command() -> str:
    """What xdist has to call instead of Python, as one line for a shell."""
    return shlex.join([sys.executable, str(Path(__file__).with_name("warm_worker.py")), str(_address())])


def start(
    command: Sequence[str],
    env: Mapping[str, str],
    cwd: Path | None = None,
    *,
    stdin: int | IO[Any] = subprocess.PIPE,
    stdout: int | IO[Any] = subprocess.PIPE,
    stderr: int | IO[Any] = subprocess.PIPE,
) -> Process:
    """Like `subprocess.Popen(..., text=True, bufsize=1)`, and warm if it is this Python and can be."""
    namespace, program = _split(command)
    if _can_be_warm(program, env):
        return _warm(program[2] if program[2:3] and program[2] in _LIGHT else "").start(
            program, env, cwd, (stdin, stdout, stderr), namespace
        )
    return subprocess.Popen(
        list(command), stdin=stdin, stdout=stdout, stderr=stderr, text=True, bufsize=1, env=dict(env), cwd=cwd
    )


def _split(command: Sequence[str]) -> tuple[str | None, list[str]]:
    """The network namespace that a command line names, and the rest of it."""
    match list(command):
        case ["ip", "netns", "exec", namespace, *program]:
            return namespace, program
        case program:
            return None, program


def _can_be_warm(command: Sequence[str], env: Mapping[str, str]) -> bool:
    at_import = {name: value for name, value in env.items() if name.startswith(_READ_AT_IMPORT)}
    if sys.platform != "linux":  # what macOS' own libraries start at import does not survive a copy
        return False
    plain = len(command) > 1 and (command[1] in ("-m", "-c") or not command[1].startswith("-"))
    return command[0] == sys.executable and plain and at_import == _ENVIRONMENT


class _Template:
    """The process that is copied, which starts when the first copy is wanted, and ends with this one. It has imported
    everything, or one module."""

    def __init__(self, module: str = "") -> None:
        self._module = module
        self._home = tempfile.TemporaryDirectory(prefix="warm-python-")
        self.address = Path(self._home.name, "socket")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.address))
        self._listener.listen(64)
        self._lifeline, self._theirs = socket.socketpair()
        self._process: subprocess.Popen[bytes] | None = None
        threading.Thread(target=self._start, daemon=True).start()

    def _start(self) -> None:
        select.select([self._listener], [], [])
        private = {"HOME": self._home.name, "XDG_CACHE_HOME": self._home.name, "XDG_DATA_HOME": self._home.name}
        passed = [self._listener.fileno(), self._theirs.fileno()]
        with _errors_of(self.address).open("w") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.swarm.warm_python", *map(str, passed), self._module],
                stdin=subprocess.DEVNULL,
                stdout=errors,
                stderr=errors,
                pass_fds=passed,
                cwd=_ROOT,
                env=os.environ | private | _ENVIRONMENT,
            )
        self._listener.close()
        self._theirs.close()

    def end(self) -> None:
        self._lifeline.close()
        if self._process is not None:
            self._process.wait()
        self._home.cleanup()


def _errors_of(address: Path) -> Path:
    return address.with_name("errors")


class _WarmPython:
    """The way to the process that is copied. What was started here is killed when this process ends."""

    def __init__(self, address: Path) -> None:
        self._lock = threading.Lock()
        self._channel = socket.socket(socket.AF_UNIX)
        self._errors = _errors_of(address)
        self._channel.connect(str(address))

    def start(
        self,
        command: list[str],
        env: Mapping[str, str],
        cwd: Path | None,
        streams: Sequence[int | IO[Any]],
        namespace: str | None = None,
    ) -> WarmProcess:
        status, theirs = os.pipe()
        given, kept, ours = [], [theirs], []
        for number, stream in enumerate(streams):
            pipe = None
            if stream == subprocess.PIPE:
                read, write = os.pipe()
                pipe, other = (write, read) if number == 0 else (read, write)
                kept.append(other)
            elif stream == subprocess.DEVNULL:
                kept.append(other := os.open(os.devnull, os.O_RDWR))
            else:
                other = stream if isinstance(stream, int) else stream.fileno()
            given.append(other)
            ours.append(pipe)
        request = {"arguments": command[1:], "env": dict(env), "cwd": str(cwd or Path.cwd()), "namespace": namespace}
        with self._lock:
            data = json.dumps(request).encode() + b"\n"
            try:
                sent = socket.send_fds(self._channel, [data], [*given, theirs])
                self._channel.sendall(data[sent:])
                answer = self._channel.recv(64)
            except ConnectionError:
                answer = b""
        for descriptor in kept:
            os.close(descriptor)
        assert answer, self._errors.read_text()
        process = WarmProcess(int(answer), status, command, ours)
        _copies.append(process)
        return process


_template: dict[str, _Template] = {}
_shared: list[Path] = []
_started: dict[str, _WarmPython] = {}
_starting = threading.Lock()
_copies: list[WarmProcess] = []


def template(module: str = "") -> Path:
    """Where the process that is copied is reached: this process owns it."""
    if module not in _template:
        _template[module] = _Template(module)
        atexit.register(_template[module].end)
    return _template[module].address


def _address(module: str = "") -> Path:
    return _shared[0] if _shared and not module else template(module)


def share(address: Path) -> None:
    """From now on processes are copied from that of another process, which has told its address."""
    _shared.append(address)


def elsewhere() -> list[WarmProcess]:
    """The processes started from here, ended ones included, if they are no descendants of this one."""
    return list(_copies) if _shared else []


def _warm(module: str) -> _WarmPython:
    with _starting:
        if module not in _started:
            _started[module] = _WarmPython(_address(module))
        return _started[module]


# --- below here: the process that is copied


class _Copies:
    """Makes copies on request, and tells how they end."""

    def __init__(self, listener: socket.socket, lifeline: socket.socket) -> None:
        self._listener = listener
        self._lifeline = lifeline
        self._channels: list[socket.socket] = []
        self._status: dict[int, tuple[int, socket.socket]] = {}  # by process: where to tell its end, who wanted it
        self._woken, self._wake = socket.socketpair()

    def requested(self) -> list[str] | None:
        """Returns in each copy, with the arguments of Python; and here at the end, when no copy runs any more."""
        self._woken.setblocking(False)
        self._wake.setblocking(False)
        signal.set_wakeup_fd(self._wake.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        # Ctrl-C at a terminal is for the tests and for what they started; there, none of those that come is lost.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        while True:
            ready, _, _ = select.select([self._lifeline, self._listener, self._woken, *self._channels], [], [])
            if self._lifeline in ready:
                break
            if self._woken in ready:
                self._woken.recv(4096)
                self._tell_ends()
            if self._listener in ready:
                self._channels.append(self._listener.accept()[0])
            for channel in set(ready) & set(self._channels):
                arguments = self._answer(channel)
                if arguments is not None:
                    return arguments
        self._kill(None)
        return None

    def _answer(self, channel: socket.socket) -> list[str] | None:
        """Makes one copy, or kills those whose owner has gone."""
        data, descriptors, _, _ = socket.recv_fds(channel, 1 << 16, 4)
        if not data:
            self._kill(channel)
            self._channels.remove(channel)
            channel.close()
            return None
        while not data.endswith(b"\n"):
            data += channel.recv(1 << 16)
        request = json.loads(data)
        pid = os.fork()
        if pid == 0:
            self._become(request, descriptors)
            return list(request["arguments"])
        for descriptor in descriptors[:3]:
            os.close(descriptor)
        self._status[pid] = descriptors[3], channel
        channel.sendall(str(pid).encode())
        return None

    def _kill(self, owner: socket.socket | None) -> None:
        for pid, (_, channel) in self._status.items():
            if owner in (None, channel):
                os.kill(pid, signal.SIGKILL)

    def _tell_ends(self) -> None:
        for pid, (status, _) in list(self._status.items()):
            ended, how, used = os.wait4(pid, os.WNOHANG)
            if ended:
                # Whoever would read it may be gone.
                with suppress(BrokenPipeError):
                    told = f"{os.waitstatus_to_exitcode(how)} {used.ru_utime + used.ru_stime:.2f}"
                    os.write(status, told.encode())
                os.close(status)
                del self._status[pid]

    def _become(self, request: dict[str, Any], descriptors: list[int]) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for held in (*self._channels, self._listener, self._lifeline, self._woken, self._wake):
            held.close()
        for number, descriptor in enumerate(descriptors[:3]):
            os.dup2(descriptor, number)
        for descriptor in (*descriptors, *(status for status, _ in self._status.values())):
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["env"])
        if request["namespace"] is not None:
            _enter_network_namespace(request["namespace"])
        os.chdir(request["cwd"])
        _read_hub_settings()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _read_hub_settings() -> None:
    """Reads the variables of huggingface_hub anew, which it has read when it was imported."""
    from importlib import reload

    from huggingface_hub import constants

    reload(constants)


def _enter_network_namespace(name: str) -> None:
    import ctypes

    with open(f"/run/netns/{name}") as namespace:
        if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {name}")


def _import_everything() -> None:
    from importlib import import_module
    from pkgutil import walk_packages

    import hypothesis
    import transformers
    import zeroconf
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    import petalnode.node

    for module in walk_packages(petalnode.node.__path__, "petalnode.node."):
        if "webrtc." not in module.name:  # an extra
            import_module(module.name)
    for name in ("libp2p.utils.connection_shutdown", "multiaddr.codecs.cid"):  # imported late by their packages
        import_module(name)
    for model in _MODELS:
        import_module(f"transformers.models.{model}.modeling_{model}")
    get_checkpoint_conversion_mapping(_MODELS[0])  # hundreds of regular expressions
    _parse_a_command_line()
    for imported in weakref.finalize._registry:  # type: ignore[attr-defined]
        imported.atexit = False  # torch would take down each of its operators
    assert transformers.AutoTokenizer and transformers.AutoModelForCausalLM and zeroconf.Zeroconf and hypothesis.given


def _parse_a_command_line() -> None:
    """Typer imports pydantic when it first takes an option: half of the time that a server needs to start."""
    import typer

    app = typer.Typer()

    @app.command()
    def command(number: int = 0) -> None:
        pass

    app(["--number", "1"], standalone_mode=False)


def _run(arguments: list[str]) -> None:
    """What `python ARGUMENTS` does."""
    import runpy
    from types import ModuleType

    import numpy as np

    np.random.seed()
    match arguments:
        case ["-m", name, *rest]:
            if name == "petalnode":
                from transformers.utils import logging

                logging.set_verbosity_error()  # as `petalnode` has it before it imports transformers
            sys.path[0] = os.getcwd()
            sys.argv = [name, *rest]
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.path[0] = ""
            sys.argv = ["-c", *rest]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(main))
        case [path, *rest]:
            sys.path[0] = str(Path(path).parent)
            sys.argv = [path, *rest]
            runpy.run_path(path, run_name="__main__")


def _run_to_end(arguments: list[str]) -> None:
    """Ends the process in order, but for freeing all that was imported, which takes longer than many a program."""
    code = 0
    try:
        _run(arguments)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except Exception:
        traceback.print_exc()
        code = 1
    # A KeyboardInterrupt is left to the interpreter, which ends by the signal.
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter does first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)


def _main() -> None:
    import gc
    from importlib import import_module

    *descriptors, module = sys.argv[1:]
    if module:
        import_module(module)
    else:
        _import_everything()
    gc.collect()
    gc.freeze()
    assert threading.active_count() == 1, f"no copy has these threads: {threading.enumerate()}"
    arguments = _Copies(*(socket.socket(fileno=int(descriptor)) for descriptor in descriptors)).requested()
    if arguments is not None:
        _run_to_end(arguments)


if __name__ == "__main__":
    _main()
