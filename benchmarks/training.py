"""Tokens per second of forward and backward passes in fine-tuning, against plain transformers in the same minutes.

    python benchmarks/training.py [--json] [--models h512 smollm2] [--batches 8 32] [--prompts 4 16] [--rounds 5]
    python benchmarks/training.py --codecs none float16 bfloat16 int8 [--methods deep lora] [--steps 30] [--json]

The grid of table 6 of Petals (NeurIPS 2023, appendix G): a classifier of two classes on rows of 128 tokens, with soft
prompts ("prompt tuning") or soft and deep prompts ("deep") of 4 and 16 virtual tokens, 8 and 32 rows. Two servers on
this machine, each a real process with one compute thread, hold half of the blocks each. Plain transformers does the
same work in this process, in turns with the swarm: with one thread, which is what the ratios are of, and once more with
as many threads as there are servers (`plain2`), which is the machine's whole processor to both. It keeps all
activations between the passes; servers compute the forward pass again. Tokens are rows x 128, as in the paper; the best
of the rounds counts, since whatever else the machine does is no property of either.

With --codecs it is the loss that counts: SmolLM2 learns running text of Wikipedia (`perplexity.py` says from where)
with deep prompts of 8 virtual tokens or LoRA of rank 8, 4 rows of 64 tokens a step, once under each codec from the same
beginning and with the same rows. `apart` is how far the loss of a step is from that of the first codec at most,
relative to it, and `held out` the loss of 8 other rows before and after.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from itertools import product
from pathlib import Path
from typing import Any

import torch
from chain import h512, spans_of
from local_swarm import local_swarm
from perplexity import wikipedia
from plain import quiet_torch
from rich.console import Console
from rich.table import Table
from torch import nn
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from petalnode import (
    AutoDistributedModelForCausalLM,
    AutoDistributedModelForSequenceClassification,
    LoraTuning,
    PromptTuning,
)
from petalnode.node.models import resolve

TOKENS = 128
LEARNT_TOKENS = 64


class PlainTuning(nn.Module):
    """What `PromptTuning` does, on a whole model of transformers."""

    def __init__(self, model: Any, like: PromptTuning) -> None:
        super().__init__()
        self.prompts = nn.Parameter(like.prompt_embeddings.detach().clone())
        self.deep = None if like.deep_prompts is None else nn.Parameter(like.deep_prompts.detach().clone())
        self._model = [model]
        self._count = like.num_virtual_tokens

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        model = self._model[0]
        count = self._count
        with ExitStack() as hooks:

            def put_prompts(module: nn.Module, args: Any, embedded: torch.Tensor) -> torch.Tensor:
                return torch.cat([self.prompts.expand(len(embedded), -1, -1), embedded[:, count:]], dim=1)

            hooks.callback(model.get_input_embeddings().register_forward_hook(put_prompts).remove)
            if self.deep is not None:
                for block, prompt in zip(model.model.layers, self.deep, strict=True):

                    def add(module: nn.Module, args: Any, kwargs: Any, prompt: torch.Tensor = prompt) -> Any:
                        hidden = torch.cat([args[0][:, :count] + prompt, args[0][:, count:]], dim=1)
                        return (hidden, *args[1:]), kwargs

                    hooks.callback(block.register_forward_pre_hook(add, with_kwargs=True).remove)
            ids = torch.cat([input_ids.new_ones((len(input_ids), count)), input_ids], dim=1)
            return model(ids, labels=labels, use_cache=False)


def timed(tuned: Callable[..., Any], ids: torch.Tensor, labels: torch.Tensor) -> tuple[float, float, float]:
    """Seconds of one forward pass and of the backward pass behind it, and the loss."""
    begun = time.perf_counter()
    loss = tuned(ids, labels=labels).loss
    forward = time.perf_counter() - begun
    begun = time.perf_counter()
    loss.backward()
    return forward, time.perf_counter() - begun, loss.item()


def measure(
    model: Any, plain: Any, *, deep: bool, batch: int, prompt: int, rounds: int, servers: int
) -> dict[str, Any]:
    ids = torch.randint(5, min(plain.config.vocab_size, 2000), (batch, TOKENS))
    labels = torch.randint(0, 2, (batch,))
    swarm = PromptTuning(model, prompt, deep=deep)
    alone = PlainTuning(plain, swarm)
    times: dict[str, list[tuple[float, float]]] = {"swarm": [], "plain": [], "plain2": []}
    for _ in range(rounds):
        losses = []
        for name, tuned, threads in (("swarm", swarm, 1), ("plain", alone, 1), ("plain2", alone, servers)):
            torch.set_num_threads(threads)
            forward, backward, loss = timed(tuned, ids, labels)
            times[name].append((forward, backward))
            losses.append(loss)
        assert max(losses) - min(losses) < 1e-3, f"the losses differ: {losses}"
    torch.set_num_threads(1)
    assert swarm.prompt_embeddings.grad is not None and alone.prompts.grad is not None
    # Plain has gone back twice as often, and gradients add up.
    difference = (2 * swarm.prompt_embeddings.grad - alone.prompts.grad).norm() / alone.prompts.grad.norm()
    assert difference < 1e-3, f"the gradients differ by {difference:.1g}"
    result: dict[str, Any] = {"method": "deep" if deep else "prompt", "batch": batch, "prompt": prompt}
    for index, part in enumerate(("forward", "backward")):
        best = {name: min(seconds[index] for seconds in taken) for name, taken in times.items()}
        result[part] = {name: batch * TOKENS / seconds for name, seconds in best.items()}
        result[part]["ratio"] = best["plain"] / best["swarm"]
        result[part]["ratio2"] = best["plain2"] / best["swarm"]
    return result


def run_model(name: str, folder: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    plain = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=2).eval()
    plain.requires_grad_(False)
    if plain.config.pad_token_id is None:
        plain.config.pad_token_id = 0
    results = []
    with (
        local_swarm(str(folder), spans_of(plain.config.num_hidden_layers, options.servers)) as processes,
        AutoDistributedModelForSequenceClassification.from_pretrained(
            folder, initial_peers=processes[-1].ready["addrs"], num_labels=2, dtype="float32"
        ) as model,
    ):
        model.config.pad_token_id = plain.config.pad_token_id
        model.score.requires_grad_(False).weight.copy_(plain.score.weight)
        for deep, batch, prompt in product((False, True), options.batches, options.prompts):
            print(f"{name}: {'deep' if deep else 'prompt'} {batch} x {prompt} ...", file=sys.stderr)
            sizes = {"batch": batch, "prompt": prompt, "rounds": options.rounds, "servers": options.servers}
            results.append({"model": name, "servers": options.servers, **measure(model, plain, deep=deep, **sizes)})
    return results


def losses(codec: str, method: str, addrs: Any, steps: int) -> dict[str, Any]:
    """The loss of each step, and of rows held out, before and after."""
    folder = resolve("smollm2", need="all").path
    ids = AutoTokenizer.from_pretrained(folder)(wikipedia()[: 2000 * (steps + 2)], return_tensors="pt").input_ids
    rows = ids[0, : ids.shape[1] // LEARNT_TOKENS * LEARNT_TOKENS].view(-1, LEARNT_TOKENS)
    held_out, rows = rows[:8], rows[8:]
    with AutoDistributedModelForCausalLM.from_pretrained(
        folder, initial_peers=addrs, dtype="float32", batch_codec=codec
    ) as model:
        torch.manual_seed(0)
        tuned = PromptTuning(model, 8, deep=True) if method == "deep" else LoraTuning(model, r=8)
        optimiser = torch.optim.AdamW(tuned.parameters(), lr=1e-2 if method == "deep" else 1e-3)

        def held_out_loss() -> float:
            with torch.no_grad():
                return float(tuned(held_out, labels=held_out).loss)

        found: dict[str, Any] = {"codec": codec, "method": method, "before": held_out_loss(), "losses": []}
        for step in range(steps):
            batch = rows[4 * step : 4 * step + 4]
            optimiser.zero_grad()
            loss = tuned(batch, labels=batch).loss
            loss.backward()
            optimiser.step()
            found["losses"].append(loss.item())
        return found | {"after": held_out_loss()}


def compare_losses(options: argparse.Namespace) -> list[dict[str, Any]]:
    folder = resolve("smollm2", need="all").path
    results: list[dict[str, Any]] = []
    with local_swarm(str(folder), spans_of(30, options.servers)) as processes:
        for method, codec in product(options.methods, options.codecs):
            print(f"{method} with {codec} ...", file=sys.stderr)
            found = losses(codec, method, processes[-1].ready["addrs"], options.steps)
            first = next((one for one in results if one["method"] == method), found)
            pairs = zip(found["losses"], first["losses"], strict=True)
            results.append(found | {"apart": max(abs(here - there) / there for here, there in pairs)})
            print({name: results[-1][name] for name in ("before", "after", "apart")}, file=sys.stderr)
    return results


def show_losses(results: list[dict[str, Any]]) -> None:
    table = Table(title="loss of SmolLM2")
    for column in ("method", "codec", "first step", "last step", "apart at most", "held out: before", "after"):
        table.add_column(column, justify="right")
    for result in results:
        curve, apart = result["losses"], f"{result['apart']:.3%}"
        figures = (f"{loss:.4f}" for loss in (result["before"], result["after"]))
        table.add_row(result["method"], result["codec"], f"{curve[0]:.4f}", f"{curve[-1]:.4f}", apart, *figures)
    Console(width=110).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--models", nargs="+", default=["h512", "smollm2"])
    parser.add_argument("--servers", type=int, default=2)
    parser.add_argument("--batches", nargs="+", type=int, default=[8, 32])
    parser.add_argument("--prompts", nargs="+", type=int, default=[16, 4])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--codecs", nargs="+", help="compare losses under these, instead")
    parser.add_argument("--methods", nargs="+", default=["deep", "lora"], choices=("deep", "lora"))
    parser.add_argument("--steps", type=int, default=30)
    options = parser.parse_args()
    quiet_torch(None)
    torch.manual_seed(0)
    if options.codecs:
        results = compare_losses(options)
        if options.json:
            print(json.dumps({"losses": results}))
        else:
            show_losses(results)
        return
    results = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        for name in options.models:
            folder = h512(Path(scratch) / name) if name == "h512" else resolve(name, need="all").path
            results += run_model(name, folder, options)
    if options.json:
        print(json.dumps({"training": results}))
    else:
        show(results)


def show(results: list[dict[str, Any]]) -> None:
    table = Table(title="tokens per second, and as a ratio to plain transformers with one thread (all threads)")
    for column in ("model", "method", "batch", "prompt", "forward", "of plain", "backward", "of plain "):
        table.add_column(column, justify="right")
    for result in results:
        cells = [result["model"], result["method"], str(result["batch"]), str(result["prompt"])]
        for part in (result["forward"], result["backward"]):
            cells += [f"{part['swarm']:.0f}", f"{part['ratio']:.2f} ({part['ratio2']:.2f})"]
        table.add_row(*cells)
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
