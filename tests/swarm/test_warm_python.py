"""Programs that start warm behave as if Python had started them."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import petalnode as petalnode_package
from tests.swarm import warm_python
from tests.swarm.processes import Running, environment, petalnode

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="programs start the usual way elsewhere")


def started(code: str, *arguments: str, home: Path, **variables: str) -> Running:
    return Running([sys.executable, "-c", code, *arguments], environment(home, **variables), home)


def test_it_has_its_own_environment_and_streams(tmp_path: Path) -> None:
    code = """if True:
        import os, sys
        print(sys.argv, os.environ["OWN"], os.getcwd(), __name__, "torch" in sys.modules)
        print(sys.stdin.readline().upper(), file=sys.stderr)
    """
    process = started(code, "a", "b c", home=tmp_path, OWN="mine")
    assert isinstance(process.process, warm_python.WarmProcess)
    assert process.line() == f"['-c', 'a', 'b c'] mine {tmp_path} __main__ True"
    assert process.process.stdin is not None
    process.process.stdin.write("said\n")
    assert process.wait() == 0
    assert process.errors == "SAID\n\n"


@pytest.mark.parametrize(
    ("code", "exit_code", "says"),
    [
        ("pass", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("raise SystemExit('wrong')", 1, "wrong\n"),
        ("raise SystemExit", 0, ""),
        ("1 / 0", 1, "ZeroDivisionError"),
        ("raise KeyboardInterrupt", -signal.SIGINT, "KeyboardInterrupt"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
        ("import atexit; atexit.register(print, 'last', flush=True)", 0, ""),
    ],
)
def test_it_ends_as_python_ends(code: str, exit_code: int, says: str, tmp_path: Path) -> None:
    process = started(code, home=tmp_path)
    assert process.wait() == exit_code
    assert says in process.errors
    if "last" in code:
        assert process.line() == "last"


def test_signals_reach_it_and_no_other(tmp_path: Path) -> None:
    code = "import time; print('there', flush=True); time.sleep(100)"
    one, two, three = (started(code, home=tmp_path) for _ in range(3))
    for process in (one, two, three):
        assert process.line() == "there"
    one.signal(signal.SIGINT)
    two.signal(signal.SIGTERM)
    assert (one.wait(), two.wait()) == (-signal.SIGINT, -signal.SIGTERM)
    assert three.process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        three.process.wait(0.1)
    three.kill()
    assert three.process.returncode == -signal.SIGKILL


def test_no_stream_of_another_is_held_open(tmp_path: Path) -> None:
    code = "import os, sys; print(sorted(os.listdir('/proc/self/fd'), key=int)); sys.stdin.read()"
    processes = [started(code, home=tmp_path) for _ in range(3)]
    held = [process.line() for process in processes]
    assert held[1:] == held[:1] * 2
    assert [process.stop() for process in processes] == [0, 0, 0]


def test_chance_is_not_shared(tmp_path: Path) -> None:
    code = "import random, numpy; print(random.random(), numpy.random.random())"
    said = [started(code, home=tmp_path).line().split() for _ in range(2)]
    assert not set(said[0]) & set(said[1])


def test_values_read_at_import_reach_no_copy(tmp_path: Path) -> None:
    with tempfile.TemporaryFile() as out:
        command = [sys.executable, "-c", "import sys; print('torch' in sys.modules)"]
        process = warm_python.start(command, environment(tmp_path, OMP_NUM_THREADS="2"), stdout=out)
        assert process.wait(60) == 0
        out.seek(0)
        assert out.read() == b"False\n"


def test_the_settings_of_the_hub_are_its_own(tmp_path: Path) -> None:
    code = """if True:
        from huggingface_hub import constants
        print(constants.ENDPOINT, constants.HF_HUB_OFFLINE, constants.HF_HUB_CACHE)
    """
    hub = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0", "HF_HOME": str(tmp_path / "hub")}
    for settings, said in (
        (hub, f"http://127.0.0.1:9 False {tmp_path}/hub/hub"),
        ({}, f"https://huggingface.co True {tmp_path}/cache/huggingface/hub"),
    ):
        process = started(code, home=tmp_path, **settings)
        assert isinstance(process.process, warm_python.WarmProcess)
        assert process.line() == said


def test_a_command_has_its_output_and_no_other(tmp_path: Path) -> None:
    outcome = petalnode("--version", env=environment(tmp_path))
    assert (outcome.code, outcome.out, outcome.err) == (0, f"{petalnode_package.__version__}\n", "")


def test_worker_of_xdist_is_a_copy_with_pipes() -> None:
    code = "import sys; print('torch' in sys.modules, sys.stdin.read()); sys.exit(3)"
    command = [*shlex.split(warm_python.worker_command()), "-u", "-c", code]
    done = subprocess.run(command, input="said", capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (3, "True said\n", "")


def test_it_does_not_outlive_its_stand_in() -> None:
    code = "import os, sys; print(os.getpid(), flush=True); sys.stdin.read()"
    command = [*shlex.split(warm_python.worker_command()), "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as stand_in:
        assert stand_in.stdout is not None
        copy = int(stand_in.stdout.readline())
        assert copy != stand_in.pid
        stand_in.kill()
        assert stand_in.stdout.read() == ""  # it has gone, and with it the last that could write
