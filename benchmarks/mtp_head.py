"""Tokens a step with drafts by a model's MTP head, which was trained for a minute on what the model says.

    python benchmarks/mtp_head.py [--json] [--model-seconds 120] [--seconds 60] [--tokens 64] [--rtt 50]
    python benchmarks/mtp_head.py --known 6 [--json] [--tokens 64] [--rtt 50]

The made model has the shape of Qwen3.5 (four blocks of 128 values, gated delta rule and full attention, tokens are
bytes) and is trained on the pages of `docs/` for `--model-seconds`. Its head for the token after the next one begins as
the last block and is trained for `--seconds` on samples of the model. Two servers in this process go on with eight
beginnings, greedily and sampled; nothing is looked up in the text. `tokens a step` are those of an answer for each one
that no guess had said, 1 without drafts. The depths are fixed, so that no clock decides; at `auto` the estimates
of `DraftPlan` decide. `ms a token` is with `--rtt` milliseconds between any two nodes. Exit code 1 if a token differs.

With --known, models of three kinds are compared which are not trained: a Llama, Qwen3.5 and Nemotron-H, whose blocks
keep states. Drafts of that many tokens say what comes, but one of ten tokens wrong, so that neither a clock nor the
text decides what goes back. `gain` is by how much drafts shorten a token, `ratio` that of a model to Llama's.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, aclosing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import trio
from rich.console import Console
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from petalnode.node.blocks.client_part import ClientModel, load_client
from petalnode.node.client.generation.conversation import Conversation
from petalnode.node.client.generation.draft_model import LookupDrafter
from petalnode.node.client.generation.drafting import Draft, DraftPlan, PipelineSpeed
from petalnode.node.client.generation.mtp_head import MtpHead, mtp_head
from petalnode.node.client.generation.sampling import Sampling
from petalnode.node.testing.memory_network import Link
from petalnode.node.testing.memory_servers import MemorySwarm, memory_swarm

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.swarm.memory_pool import opened

HIDDEN, BATCH, LENGTH = 128, 16, 96
SHAPE: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": HIDDEN,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "max_position_embeddings": 1024,
    "eos_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"layer_types": None},
    "qwen3_5_text": {},
    "nemotron_h": {"layer_types": None, "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"]},
}
MAMBA: dict[str, Any] = {"mamba_num_heads": 4, "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 32}
PROMPTS = [
    *("A server that ", "The client sends ", "| `--draft` | ", "What a peer has "),
    *("When the swarm ", "A session is ", "petalnode serve ", "Each block of "),
]


def train(parameters: Any, loss_of: Any, seconds: float) -> tuple[int, float]:
    """Steps of AdamW until `seconds` have passed; how many, and the mean loss of the last twenty."""
    optimiser, losses, begun = torch.optim.AdamW(list(parameters), lr=2e-3), [], time.perf_counter()
    while time.perf_counter() - begun < seconds:
        optimiser.zero_grad()
        loss = loss_of()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    last = losses[-20:]
    return len(losses), sum(last) / len(last)


def made_model(folder: Path, seconds: float) -> tuple[Any, dict[str, Any]]:
    """The model, trained on the pages, and saved with the head that its last block makes."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3_5_text", **SHAPE))
    pages = sorted((Path(__file__).parent.parent / "docs").glob("*.md"))
    text = torch.tensor(list(b"\n".join(page.read_bytes() for page in pages)))

    def loss() -> torch.Tensor:
        starts = torch.randint(0, len(text) - LENGTH, (BATCH, 1))
        ids = text[starts + torch.arange(LENGTH)]
        found: torch.Tensor = model(ids, labels=ids).loss
        return found

    steps, last = train(model.parameters(), loss, seconds)
    model.eval().save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    block = "model.layers.3."
    head = {f"mtp.layers.0.{key.removeprefix(block)}": tensors[key] for key in tensors if key.startswith(block)}
    head |= {f"mtp.{name}.weight": torch.zeros(HIDDEN) for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden")}
    head |= {"mtp.fc.weight": torch.eye(HIDDEN).repeat(1, 2) / 2, "mtp.norm.weight": tensors["model.norm.weight"]}
    save_file(
        tensors | {key: value.clone() for key, value in head.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return model, {"steps": steps, "loss": round(last, 3), "bytes": len(text)}


def train_head(model: Any, part: ClientModel, head: MtpHead, seconds: float) -> dict[str, Any]:
    """On samples of the model, a new batch for every twenty steps; making them is part of the time."""
    layers = (head.enorm, head.hnorm, head.eh_proj, head.norm, *head.blocks.stack.blocks)
    parameters = [parameter.requires_grad_() for layer in layers for parameter in layer.parameters()]
    held: list[torch.Tensor] = []
    starts = [torch.tensor([list(text.encode())[:8] for text in PROMPTS * 4])]

    @torch.no_grad()
    def sample() -> None:
        ids = model.generate(starts[0], max_new_tokens=LENGTH, do_sample=True, pad_token_id=0)
        starts[0] = ids[:, torch.randint(1, LENGTH, (1,)).item() :][:, :8]
        held[:] = [ids, model.model(ids).last_hidden_state, model.get_input_embeddings()(ids)]

    count = [0]

    def loss() -> torch.Tensor:
        if count[0] % 20 == 0:
            sample()
        count[0] += 1
        ids, hidden, embedded = held
        joined = torch.cat([head.enorm(embedded[:, 1:-1]), head.hnorm(hidden[:, :-2])], dim=-1)
        places = torch.arange(joined.shape[1]).unsqueeze(0)
        output = head.norm(head.blocks.stack.run(head.eh_proj(joined), None, places))
        return cross_entropy(model.lm_head(output).flatten(0, 1), ids[:, 2:].flatten())

    steps, last = train(parameters, loss, seconds)
    for parameter in parameters:
        parameter.requires_grad_(False)
    return {"steps": steps, "loss": round(last, 3)}


async def answers(
    swarm: MemorySwarm, folder: Path, part: ClientModel, samplings: Sequence[Sampling], drafts: bool
) -> dict[str, Any]:
    made = accepted = drafted = 0
    texts, seconds = [], 0.0
    async with opened(swarm, folder) as (client, _):
        for sampling in samplings:
            for prompt in PROMPTS:
                talk = Conversation(client, part, max_length=512, stop_tokens=(), drafts=drafts)
                times: list[float] = []
                async with aclosing(talk):
                    said = await talk.answer(
                        list(prompt.encode()), sampling, lambda _, times=times: times.append(trio.current_time())
                    )
                counts = talk.drafting.counts
                texts.append(said)
                made, accepted, drafted = made + len(said), accepted + counts.accepted, drafted + counts.drafted
                seconds += times[-1] - times[0]
    found = {"tokens_a_step": round(made / (made - accepted), 3), "right": accepted, "drafted": drafted}
    return {**found, "ms_a_token": round(1000 * seconds / (made - len(texts)), 1), "texts": texts}


@contextmanager
def serving(folder: Path, rtt: float) -> Iterator[MemorySwarm]:
    def delayed(link: Link, nursery: trio.Nursery) -> None:
        begin(link, nursery)
        link.delay = rtt / 2000

    begin = Link.__init__
    with patch.object(Link, "__init__", delayed), memory_swarm() as swarm:
        servers = [swarm.start(folder, blocks) for blocks in ("0:2", "2:4")]
        assert all(server.ready for server in servers)
        yield swarm


def measure(folder: Path, part: ClientModel, options: Any, depths: tuple[int | str, ...]) -> dict[str, dict[str, Any]]:
    found = {}
    samplings = Sampling(options.tokens), Sampling(options.tokens, 0.8, seed=1)
    with serving(folder, options.rtt) as swarm:
        for depth in ("none", *depths):
            with ExitStack() as stack:
                stack.enter_context(patch.object(DraftPlan, "choose", lambda *_: Draft()))
                if isinstance(depth, int):
                    fixed = lambda plan, most, depth=depth: min(most, depth) if plan.speed else 0  # noqa: E731
                    stack.enter_context(patch.object(DraftPlan, "model_depth", fixed))
                    stack.enter_context(patch.object(PipelineSpeed, "model_step", lambda speed, depth=depth: depth))
                found[str(depth)] = swarm.call(answers, swarm, folder, part, samplings, depth != "none")
    plain = found["none"]["texts"]
    for row in found.values():
        row["same"] = row.pop("texts") == plain
    return found


def known(kind: str, folder: Path, options: Any) -> dict[str, Any]:
    """How quick answers are without drafts, and with those that say what comes."""
    torch.manual_seed(0)
    fields = {name: value for name, value in {**SHAPE, **MAMBA, **KINDS[kind]}.items() if value is not None}
    config = AutoConfig.for_model(kind, **fields)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    part, whole = load_client(folder), dict[bytes, list[int]]()

    def matches(_: LookupDrafter, tokens: Sequence[int]) -> Iterator[Draft]:
        text = next(text for start, text in whole.items() if bytes(tokens[: len(start)]) == start)
        coming = enumerate(text[len(tokens) : len(tokens) + options.known], len(tokens))
        yield Draft(tuple((token + (place % 10 == 9)) % 256 for place, token in coming), 8)

    def whole_draft(_: DraftPlan, drafts: Iterator[Draft], most: int) -> Draft:
        return Draft(next(drafts).tokens[:most], 8)

    with serving(folder, options.rtt) as swarm, ExitStack() as stack:
        stack.enter_context(patch.object(LookupDrafter, "matches", matches))
        stack.enter_context(patch.object(DraftPlan, "choose", whole_draft))
        stack.enter_context(patch.object(DraftPlan, "step_tokens", lambda _, tokens: tokens))
        times: dict[bool, list[float]] = {False: [], True: []}
        rows: dict[bool, dict[str, Any]] = {}
        for drafts in (False, True) * 3:
            row = swarm.call(answers, swarm, folder, part, [Sampling(options.tokens)], drafts)
            texts = [[*prompt.encode(), *said] for prompt, said in zip(PROMPTS, row["texts"], strict=True)]
            assert rows.get(False, row)["texts"] == row["texts"], "tokens differ"
            whole |= zip(map(str.encode, PROMPTS), texts, strict=True)
            times[drafts].append(row["ms_a_token"])
            rows[drafts] = row
    plain, drafted = (sorted(times[drafts])[1] for drafts in (False, True))
    counts = {name: rows[True][name] for name in ("tokens_a_step", "right", "drafted")}
    return {"plain_ms": plain, "drafted_ms": drafted, "gain": round(plain / drafted, 2), **counts}


def compare(options: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        rows = {kind: known(kind, Path(scratch) / kind, options) for kind in KINDS}
    for row in rows.values():
        row["ratio"] = round(row["gain"] / rows["llama"]["gain"], 2)
    if options.json:
        print(json.dumps(rows))
    else:
        for kind, row in rows.items():
            print(f"{kind:12} {row}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model-seconds", type=float, default=120)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rtt", type=float, default=50)
    parser.add_argument("--known", type=int, help="compares three kinds of models, with drafts of this many tokens")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.known:
        compare(options)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        model, found = made_model(folder, options.model_seconds)
        part = load_client(folder)
        head = mtp_head(part)
        assert head is not None
        before = measure(folder, part, options, (2,))
        trained = train_head(model, part, head, options.seconds)
        after = measure(folder, part, options, (1, 2, 4, "auto"))
    result = {"model": found, "head": trained, "untrained": before, "trained": after}
    rows = [(name, depth, row) for name in ("untrained", "trained") for depth, row in result[name].items()]
    if options.json:
        print(json.dumps(result))
    else:
        console = Console(width=160)
        console.print(f"model: {found}, head: {trained}")
        for name, depth, row in rows:
            console.print(f"{name:9} depth {depth:4} {row}")
    sys.exit(not all(row["same"] for _, _, row in rows))


if __name__ == "__main__":
    main()
