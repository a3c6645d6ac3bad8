"""What drafts are worth with blocks that keep states, beside what they are worth with keys and values alone.

    python benchmarks/hybrid_drafts.py [--json] [--tokens 96] [--rtt 100] [--rounds 3] [--hidden 512]

Made models of one size: a Llama, Qwen3.5's gated delta rule and Nemotron-H's Mamba, each in six blocks over three
servers in this process, with `--rtt` milliseconds between any two nodes. Each answer is computed without drafts, and
then with drafts of six tokens which say what comes, but one of ten tokens wrong: what goes back is computed once more,
and no clock or text decides what is drafted. `gain` is by how much drafts shorten a token, `ratio` that of a model to
Llama's. Rounds take the models in turns. Exit code 1 if a token differs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, aclosing
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
import trio
from transformers import AutoConfig, AutoModelForCausalLM

from petalnode.node.client.generation.conversation import Conversation
from petalnode.node.client.generation.draft_model import LookupDrafter
from petalnode.node.client.generation.drafting import Draft, DraftPlan
from petalnode.node.client.generation.sampling import Sampling
from petalnode.node.testing.memory_network import Link
from petalnode.node.testing.memory_servers import MemorySwarm, memory_swarm

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.swarm.memory_pool import opened

DEPTH: Final = 6
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "llama": ("llama", {}),
    "qwen3_5": ("qwen3_5_text", {"layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2}),
    "nemotron_h": ("nemotron_h", {"layers_block_type": ["linear_attention", "mlp", "full_attention"] * 2}),
}
PROMPT: Final = list(range(3, 43))


def made(kind: str, folder: Path, hidden: int) -> Path:
    model_type, fields = KINDS[kind]
    size: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 6}
    size |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": hidden // 8, "vocab_size": 512}
    size |= {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": hidden // 8}
    size |= {"linear_value_head_dim": hidden // 8, "mamba_num_heads": 8, "mamba_head_dim": hidden // 8, "n_groups": 1}
    torch.manual_seed(0)
    config = AutoConfig.for_model(model_type, **size, ssm_state_size=64, eos_token_id=None, **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / kind)
    return folder / kind


async def answer(swarm: MemorySwarm, folder: Path, tokens: int, said: Sequence[int]) -> tuple[list[int], float]:
    """The answer and milliseconds a token behind the first; with `said`, by drafts of it."""
    text = [*PROMPT, *said]

    def matches(drafter: LookupDrafter, tokens: Sequence[int]) -> Iterator[Draft]:
        coming = text[len(tokens) : len(tokens) + DEPTH]
        yield Draft(tuple((token + (place % 10 == 9)) % 512 for place, token in enumerate(coming, len(tokens))), 8)

    with ExitStack() as stack:
        stack.enter_context(patch.object(LookupDrafter, "matches", matches))
        stack.enter_context(patch.object(DraftPlan, "choose", lambda plan, drafts, most: _cut(next(drafts), most)))
        stack.enter_context(patch.object(DraftPlan, "step_tokens", lambda plan, tokens: tokens))
        async with opened(swarm, folder) as (client, part):
            times: list[float] = []
            talk = Conversation(client, part, max_length=512, stop_tokens=(), drafts=bool(said))
            async with aclosing(talk):
                found = await talk.answer(PROMPT, Sampling(tokens), lambda _: times.append(trio.current_time()))
    return found, 1000 * (times[-1] - times[0]) / (len(found) - 1)


def _cut(draft: Draft, most: int) -> Draft:
    return Draft(draft.tokens[:most], draft.match)


def measure(folders: dict[str, Path], options: Any) -> tuple[dict[str, dict[str, list[float]]], bool]:
    def delayed(link: Link, nursery: trio.Nursery) -> None:
        begin(link, nursery)
        link.delay = options.rtt / 2000

    begin, same = Link.__init__, True
    found: dict[str, dict[str, list[float]]] = {kind: {"plain": [], "drafted": []} for kind in folders}
    with patch.object(Link, "__init__", delayed), ExitStack() as stack:
        swarms = {kind: stack.enter_context(memory_swarm()) for kind in folders}
        for kind, swarm in swarms.items():
            servers = [swarm.start(folders[kind], blocks) for blocks in ("0:2", "2:4", "4:6")]
            assert all(server.ready for server in servers)
        for kind in [*folders] * options.rounds:
            said, plain = swarms[kind].call(answer, swarms[kind], folders[kind], options.tokens, ())
            again, drafted = swarms[kind].call(answer, swarms[kind], folders[kind], options.tokens, said)
            same = same and said == again
            found[kind]["plain"].append(plain)
            found[kind]["drafted"].append(drafted)
    return found, same


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--rtt", type=float, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hidden", type=int, default=512)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        found, same = measure({kind: made(kind, Path(scratch), options.hidden) for kind in KINDS}, options)
    rows = {}
    for kind, times in found.items():
        plain, drafted = (statistics.median(times[name]) for name in ("plain", "drafted"))
        rows[kind] = {"plain_ms": round(plain, 1), "drafted_ms": round(drafted, 1), "gain": round(plain / drafted, 2)}
    for row in rows.values():
        row["ratio"] = round(row["gain"] / rows["llama"]["gain"], 2)
    if options.json:
        print(json.dumps({"same": same, **rows}))
    else:
        for kind, row in rows.items():
            print(f"{kind:11} {row}")
        print("tokens equal" if same else "tokens differ")
    sys.exit(not same)


if __name__ == "__main__":
    main()
