"""`make sweep`: tries every causal model that transformers knows over two servers, and holds docs/models.md to it.

Of each a tiny model is made. Exact is one whose greedy tokens are those of transformers for a short prompt, one that is
cut into pieces, batches of both with left padding, after a rollback, and when a server is killed in the middle of a
session.
With --write the page is written; else a line that changes is an error. Processes try them side by side. Where types are
named, only these are tried: what the page says of the others stays.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Timer
from typing import Any, Final

PAGE: Final = Path(__file__).parents[2] / "docs" / "models.md"
MARKS: Final = "<!-- by make sweep -->\n", "<!-- until here -->\n"
SECONDS: Final = 180.0
"""For one model; then it is called one that does not end."""
SHORT, LONG, NEW = 12, 300, 10
PADDED: Final = "padded in pieces"
"""Two rows of `LONG` tokens, of which a whole piece of the second is padding."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="*")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--worker", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    if options.worker:
        work(options.kinds)
        return 0
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kinds = options.kinds or sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    with ThreadPoolExecutor(options.jobs) as pool:
        parts = pool.map(tried, [kinds[job :: options.jobs] for job in range(options.jobs)])
    found = {kind: said for part in parts for kind, said in part.items()}
    before, after = (PAGE.read_text().partition(mark) for mark in MARKS)
    others = said_before(before[2].partition(MARKS[1])[0]) if options.kinds else {}
    text = table(others | found, transformers.__version__)
    print(text)
    page = before[0] + MARKS[0] + text + MARKS[1] + after[2]
    if options.write:
        PAGE.write_text(page)
    elif page != PAGE.read_text():
        sys.stdout.writelines(difflib.unified_diff(PAGE.read_text().splitlines(True), page.splitlines(True)))
        return 1
    return int(any(said.startswith("wrong") for said in found.values()))


def tried(kinds: list[str]) -> dict[str, str]:
    """What is to be said of each, by a process that is begun anew where it does not end."""
    found: dict[str, str] = {}
    while left := [kind for kind in kinds if kind not in found]:
        left = left[:24]  # of each model some memory stays with the process
        command = [sys.executable, "-W", "ignore", "-m", "tests.sweep", "--worker", *left]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            assert process.stdout is not None
            for kind in left:
                timer = Timer(SECONDS, process.kill)
                timer.start()
                line = process.stdout.readline()
                timer.cancel()
                if not line:
                    found[kind] = "wrong: its server or client does not end"
                    break
                found.update(json.loads(line))
                print(line.strip(), file=sys.stderr, flush=True)
            process.kill()
    return found


def said_before(page: str) -> dict[str, str]:
    """What the table says of each type, as `table` writes it."""
    rows = re.findall(r"^\| (\w.*) \| (\w.*) \|$", page, re.MULTILINE)
    return {kind: said for said, kinds in rows for kind in kinds.split(", ")}


def table(found: dict[str, str], version: str) -> str:
    """Three lists: names by what is said of them."""
    named: dict[str, list[str]] = defaultdict(list)
    for kind, said in sorted(found.items()):
        named[said].append(kind)
    exact = named.pop("exact", [])
    lines = [
        f"Tried with transformers {version}, {len(found)} types: {len(exact)} exact, "
        f"{sum(len(kinds) for said, kinds in named.items() if said.startswith('refused'))} refused, "
        f"{sum(len(kinds) for said, kinds in named.items() if said.startswith('wrong'))} wrong, "
        f"{sum(len(kinds) for said, kinds in named.items() if said.startswith('not built'))} not built.",
        "",
        "| | types |",
        "|---|---|",
        f"| exact | {', '.join(exact)} |",
    ]
    lines += [f"| {said} | {', '.join(kinds)} |" for said, kinds in sorted(named.items())]
    return "\n".join(lines) + "\n"


# --- a process that tries models


def work(kinds: list[str]) -> None:
    import torch

    from petalnode.node.testing.memory_servers import memory_swarm

    torch.set_num_threads(1)
    said = sys.stdout
    sys.stdout = sys.stderr
    for kind in kinds:
        with tempfile.TemporaryDirectory() as folder, memory_swarm() as swarm:
            print(json.dumps({kind: judged(kind, Path(folder), swarm)}), file=said, flush=True)


def judged(kind: str, folder: Path, swarm: Any) -> str:
    from transformers import AutoModelForCausalLM

    from petalnode.node.blocks.architecture import open_skeleton
    from petalnode.node.blocks.caches.chosen_tokens import settle_choices
    from petalnode.node.errors import ModelError
    from tests.sweep.configs import BLOCKS, fill, tiny_config

    try:
        whole: Any = AutoModelForCausalLM.from_config(tiny_config(kind)).eval()
        fill(whole)
        whole.generation_config.eos_token_id = None
        whole.save_pretrained(folder)
        whole = AutoModelForCausalLM.from_pretrained(folder).eval()
        settle_choices(whole)
    except Exception as error:
        return f"not built: {_first_line(error)}"
    try:
        expected = wanted(whole)
    except Exception as error:
        return f"not built: transformers' own generate fails ({_first_line(error)})"
    try:
        blocks = open_skeleton(folder).num_blocks
        if blocks != BLOCKS:
            return f"not built: {blocks} blocks"
        return compared(folder, swarm, expected)
    except Exception as raised:
        error = raised
        while isinstance(error, ExceptionGroup):  # of a server's nursery
            error = error.exceptions[0]
        if isinstance(error, ModelError):
            text = _first_line(error).replace(f"a {kind!r} model", "this model").replace(repr(kind), "it")
            return f"refused: {text.removeprefix('MODEL ')}"
        return f"wrong: {type(error).__name__} ({_first_line(error)})"


def _prompts() -> dict[str, tuple[Any, Any]]:
    import torch

    from tests.sweep.configs import VOCABULARY

    generator = torch.Generator().manual_seed(1)

    def ids(rows: int, count: int) -> Any:
        # The last ids stand for pictures and sounds, where a model takes such.
        return torch.randint(3, VOCABULARY - 50, (rows, count), generator=generator)

    prompts = {"short": ids(1, SHORT), "in pieces": ids(1, LONG), "padded": ids(2, SHORT), PADDED: ids(2, LONG)}
    masks = {name: torch.ones_like(one) for name, one in prompts.items()}
    masks["padded"][1, :5] = masks[PADDED][1, : LONG // 2] = 0
    return {name: (one, masks[name]) for name, one in prompts.items()}


def _say(model: Any, ids: Any, mask: Any, **options: Any) -> Any:
    return model.generate(
        ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, eos_token_id=None, pad_token_id=0, **options
    )


def wanted(whole: Any) -> dict[str, Any]:
    """What transformers says to each prompt."""
    import torch

    said = {name: _say(whole, *prompt) for name, prompt in _prompts().items()}
    again = torch.cat([said["short"][:, : SHORT + 4], said["padded"][:1, :3]], dim=1)
    return {**said, "rolled back": _say(whole, again, torch.ones_like(again))}


def compared(folder: Path, swarm: Any, expected: dict[str, Any]) -> str:
    """exact, or what differs. Raises what servers or the client raise."""
    import torch

    from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM

    servers = [swarm.start(folder, blocks) for blocks in ("0:2", "2:4", "0:2")]
    for server in servers:
        _ = server.ready
    differs = []
    with swarm.open_model(AutoDistributedModelForCausalLM, folder) as model:
        for name, prompt in _prompts().items():
            if not torch.equal(_say(model, *prompt), expected[name]):
                differs.append(name)
        with model.inference_session(max_length=64) as session:
            ids, mask = _prompts()["short"]
            _say(model, ids, mask, session=session)
            again = expected["rolled back"][:, :-NEW]
            ones = torch.ones_like(again)
            if not torch.equal(_say(model, again, ones, session=session), expected["rolled back"]):
                differs.append("rolled back")
            next(server for server in servers if server.peer_id == session.route[0][0]).kill()
            if not torch.equal(_say(model, again, ones, session=session), expected["rolled back"]):
                differs.append("a server killed")
    return f"wrong: {', '.join(differs)}" if differs else "exact"


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return re.sub(r"/tmp/\S+", "MODEL", text).replace("|", "/")[:240]


if __name__ == "__main__":
    sys.exit(main())
