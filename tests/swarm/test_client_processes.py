"""What a client's process does at its edges: fork, a forgotten close, Ctrl-C, death."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.swarm.conftest import SharedSwarm
from tests.swarm.processes import Nodes, Running

OPEN = """
import os, sys, torch
from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from petalnode.node.errors import PetalnodeError
torch.set_num_threads(1)
model = AutoDistributedModelForCausalLM.from_pretrained(sys.argv[1], initial_peers=[sys.argv[2]])
ids = torch.tensor([[5, 6, 7]])
model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
"""

FORK = """
session = model.inference_session(max_length=8)
session.step(torch.zeros(1, 1, 64))
child = os.fork()
if child == 0:
    code = 0
    for use in (
        lambda: model.generate(ids, max_new_tokens=2, pad_token_id=0),
        lambda: session.step(torch.zeros(1, 1, 64)),
    ):
        try:
            use()
            code = 1
        except PetalnodeError as error:
            code = code or (0 if "fork" in str(error) else 2)
    model.close()  # the parent's, and left alone
    os._exit(code)
_, status = os.waitpid(child, 0)
print("child", os.waitstatus_to_exitcode(status), flush=True)
session.step(torch.zeros(1, 1, 64))
print("parent", session.position, flush=True)
"""

INTERRUPT = """
from transformers.generation.streamers import BaseStreamer
class Show(BaseStreamer):
    def put(self, value): os.write(1, b"token\\n")  # at once: print could be interrupted before the end of the line
    def end(self): print("end", flush=True)
try:
    model.generate(ids, max_new_tokens=4000, do_sample=False, pad_token_id=0, streamer=Show())
except KeyboardInterrupt:
    print("interrupted", flush=True)
out = model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
print("again", out.shape[1], flush=True)
"""

UNREADY = """
print("trying", flush=True)
model.generate(ids, max_new_tokens=4000, do_sample=False, pad_token_id=0)
"""

WAITING = OPEN.replace("[sys.argv[2]]", "[sys.argv[2]], wait=True").replace(
    "model.generate(", "print('waiting', flush=True)\nmodel.generate("
)


@pytest.fixture(scope="module")
def scripts(node_starter: Nodes, shared_swarm: SharedSwarm, models: Path) -> dict[str, Running]:
    """All at once, because most of their time is imports."""
    served, other = (str(shared_swarm.folder), shared_swarm.peer), (str(models / "other-llama"), shared_swarm.peer)
    programs = {"fork": FORK, "interrupt": INTERRUPT, "unready": UNREADY}
    started = {name: node_starter.script(OPEN + code, *served) for name, code in programs.items()}
    return started | {"waiting": node_starter.script(WAITING, *other)}


def test_fork_is_refused_clearly_and_parent_goes_on(scripts: dict[str, Running]) -> None:
    process = scripts["fork"]
    assert process.line() == "child 0"
    assert process.line() == "parent 2"
    # Neither the session nor the model was closed.
    assert process.wait() == 0, process.errors
    assert "Traceback" not in process.errors and "Exception" not in process.errors


def test_ctrl_c_stops_generate_and_not_the_model(scripts: dict[str, Running]) -> None:
    process = scripts["interrupt"]
    for _ in range(4):
        assert process.line() == "token"
    process.signal(signal.SIGINT)
    while (line := process.line()) == "token":
        pass
    assert line == "interrupted"
    assert process.line() == "again 5"
    assert process.wait() == 0, process.errors


def test_a_script_that_is_interrupted_ends_at_once(scripts: dict[str, Running]) -> None:
    process = scripts["unready"]
    assert process.line() == "trying"
    process.signal(signal.SIGINT)
    assert process.wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in process.errors


def test_waiting_for_a_server_can_be_interrupted(scripts: dict[str, Running]) -> None:
    process = scripts["waiting"]
    assert process.line() == "waiting"
    process.signal(signal.SIGINT)
    assert process.wait() == -signal.SIGINT
    assert "KeyboardInterrupt" in process.errors
