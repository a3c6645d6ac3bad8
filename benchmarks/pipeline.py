"""Recurrent pipelining: what 2 and 3 nodes of equal strength gain over one, as in Macario's thesis (2024, chapter 4).

    sudo python benchmarks/pipeline.py [--json] [--models nanogpt nanollama tinyllama] [--nodes 1 2 3]
        [--samples 1 2 3 6] [--share 0.3] [--tokens 16] [--plot FILE] [--requests]

Every server is a process in a control group that gives it `--share` of one core (needs root, and version 1 or 2 of
Linux's control groups with the `cpu` controller), so that three of them and the client fit two cores. Models have
random weights and the shapes of the thesis (its blocks, too: `--blocks` changes that), TinyLlama's in bfloat16 as there
(multiplied in float32), cut evenly. Samples are rows of one batch.

`speed-up` is tokens/s over those of one node with one sample, which is what the thesis divides by; `of ideal` divides
it by the smaller of nodes and samples. A node that batches samples gets more: `over one node` is against as many
samples on one node. `idle` is what each server left of the processor time that it was allotted. `--plot` draws
a picture (needs matplotlib). Some seven minutes with two quiet cores, and 9 GiB of memory.

`--requests` measures SmolLM2 instead, with sessions that are under way at once: three of one process, a request with
n = 3, and a batch of 12 requests at `petalnode api`. Two minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from api import api
from chain import spans_of
from local_swarm import ServerProcess
from plain import quiet_torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, PreTrainedConfig

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.models import resolve

PERIOD_US = 10_000
THESIS = {"nanogpt": (10.7, 15.8, 17.9), "nanollama": (17.87, 25.97, 30.46), "tinyllama": (9.23, 13.33, 18.0)}
"""Tokens/s with 1, 2 and 3 nodes and at least as many samples: sections 4.1 and 4.3."""
PROMPT = 8
CGROUPS = Path("/sys/fs/cgroup")
BLOCKS = {"nanogpt": 12, "nanollama": 12, "tinyllama": 22}
TOKENS = {"nanogpt": 64, "nanollama": 24, "tinyllama": 8}


def config_of(name: str, blocks: int) -> PreTrainedConfig:
    """The thesis's sections 3.3 and 3.5, with some blocks and a small vocabulary."""
    if name == "nanogpt":
        return GPT2Config(vocab_size=65, n_positions=1024, n_embd=384, n_layer=blocks, n_head=6)
    hidden, inner, heads = {"nanollama": (1024, 2816, 16), "tinyllama": (2048, 5632, 32)}[name]
    return LlamaConfig(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=4 if name == "tinyllama" else heads,
        max_position_embeddings=2048,
        dtype=torch.bfloat16 if name == "tinyllama" else torch.float32,
    )


class Share:
    """A control group whose processes get `share` of a core."""

    def __init__(self, name: str, share: float) -> None:
        quota = max(1000, round(PERIOD_US * share))
        first = (CGROUPS / "cpu").is_dir()
        self.folder = (CGROUPS / "cpu" if first else CGROUPS) / name
        try:
            if not first:
                (CGROUPS / "cgroup.subtree_control").write_text("+cpu")
            self.folder.mkdir()
            if first:
                (self.folder / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (self.folder / "cpu.cfs_quota_us").write_text(str(quota))
            else:
                (self.folder / "cpu.max").write_text(f"{quota} {PERIOD_US}")
        except OSError as error:
            raise SystemExit(
                f"{self.folder}: {error}; run it as root, where control groups have the cpu controller"
            ) from None

    def add(self, pid: int, core: int) -> None:
        """This process with its threads, and those that they start, on one core: what is left of a period's quota is
        lent to a core, so a thread on another one, to which a step is handed over, would wait for the next period."""
        for task in Path(f"/proc/{pid}/task").iterdir():
            os.sched_setaffinity(int(task.name), {core})
        (self.folder / "cgroup.procs").write_text(str(pid))

    def remove(self) -> None:
        self.folder.rmdir()


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def nodes_of(folder: Path | str, blocks: int, count: int, share: float) -> Iterator[list[ServerProcess]]:
    """Servers that have loaded at full speed, and have their share from then on."""
    servers: list[ServerProcess] = []
    shares: list[Share] = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        try:
            peer: Sequence[str] = ("--new-swarm",)
            for index, (start, end) in enumerate(spans_of(blocks, count)):
                (Path(scratch) / str(index)).mkdir()
                arguments = [str(folder), "--blocks", f"{start}:{end}", "--dtype", "float32", *peer]
                servers.append(ServerProcess(arguments, Path(scratch) / str(index)))
                peer = ("--peer", servers[-1].wait_ready()["addrs"][0])
                shares.append(Share(f"petalnode-bench-{os.getpid()}-{index}", share))
                cores = sorted(os.sched_getaffinity(0))
                shares[-1].add(servers[-1].process.pid, cores[index % len(cores)])
            yield servers
        finally:
            for server in servers:
                server.stop()
            for one in shares:
                one.remove()


def generate(model: Any, rows: int, tokens: int) -> float:
    """Seconds for the tokens of each row behind the first one."""
    prompt = torch.randint(5, 60, (rows, PROMPT), generator=torch.Generator().manual_seed(0))
    options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    seconds = []
    for count in (1, 1 + tokens):
        begun = time.perf_counter()
        model.generate(prompt, max_new_tokens=count, min_new_tokens=count, **options)
        seconds.append(time.perf_counter() - begun)
    return seconds[1] - seconds[0]


def measure(model: Any, servers: Sequence[ServerProcess], share: float, samples: int, tokens: int) -> dict[str, Any]:
    before, begun = [processor_seconds(server.process.pid) for server in servers], time.perf_counter()
    seconds = generate(model, samples, tokens)
    wall = time.perf_counter() - begun
    used = [processor_seconds(server.process.pid) - was for server, was in zip(servers, before, strict=True)]
    return {
        "tokens_per_s": samples * tokens / seconds,
        "idle": [max(0.0, 1 - one / (share * wall)) for one in used],
    }


def run(name: str, blocks: int, options: argparse.Namespace, scratch: Path) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    folder = scratch / name
    config = config_of(name, blocks)
    AutoModelForCausalLM.from_config(config, dtype=config.dtype).save_pretrained(folder)
    alone: dict[int, float] = {}
    for nodes in options.nodes:
        with nodes_of(folder, blocks, nodes, options.share) as servers:
            addrs: Any = servers[0].ready["addrs"]
            with AutoDistributedModelForCausalLM.from_pretrained(
                folder, initial_peers=[addrs[0]], dtype="float32"
            ) as model:
                generate(model, 1, 2)
                for samples in options.samples:
                    print(f"{name}, {nodes} nodes, {samples} samples ...", file=sys.stderr, flush=True)
                    found = measure(model, servers, options.share, samples, options.tokens or TOKENS[name])
                    best = found["tokens_per_s"]
                    alone.setdefault(
                        samples, best
                    )  # the first number of nodes is the one that others are compared with
                    base = alone[options.samples[0]]
                    yield {
                        "model": name,
                        "blocks": blocks,
                        "nodes": nodes,
                        "samples": samples,
                        **found,
                        "speed_up": best / base,
                        "of_ideal": best / base / min(nodes, samples),
                        "over_one_node": best / alone[samples],
                        "memory_mib": [round(server.memory()["rss"] / 2**20) for server in servers],
                    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--models", nargs="+", default=list(BLOCKS), choices=list(BLOCKS))
    parser.add_argument(
        "--nodes", nargs="+", type=int, default=[1, 2, 3], help="the first is what others are compared with"
    )
    parser.add_argument("--samples", nargs="+", type=int, default=[1, 2, 3, 6])
    parser.add_argument("--share", type=float, default=0.3, help="of a core, for each server")
    parser.add_argument("--tokens", type=int, help="of each sample, instead of the model's own number")
    parser.add_argument("--requests", action="store_true", help="measure sessions of SmolLM2 instead")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="save a picture there (needs matplotlib)")
    parser.add_argument("--blocks", type=int, help="of every model, instead of its own number")
    options = parser.parse_args()
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error("--plot needs matplotlib: pip install matplotlib")
    quiet_torch()
    if options.requests:
        show_requests(requests(options), options.json)
        return
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        for name in options.models:
            results += run(name, options.blocks or BLOCKS[name], options, Path(scratch))
    if options.plot:
        plot(results, options.plot)
    if options.json:
        print(json.dumps({"pipeline": results, "share": options.share}))
    else:
        show(results)


def requests(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Tokens/s of one session, and of several that share no batch at the client."""
    tokens = options.tokens or 32
    blocks = resolve("smollm2", need="config").num_blocks
    results = []
    for nodes in options.nodes:
        with (
            nodes_of("smollm2", blocks, nodes, options.share) as servers,
            tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch,
        ):
            peer: Any = servers[0].ready["addrs"]
            with AutoDistributedModelForCausalLM.from_pretrained("smollm2", initial_peers=[peer[0]]) as model:
                generate(model, 1, 2)
                alone, _ = generate(model, 1, tokens)
                begun = time.perf_counter()
                with ThreadPoolExecutor(3) as pool:
                    list(pool.map(lambda _: generate(model, 1, tokens), range(3)))
                # each has made a token before, and then one more than that
                three = 3 * (tokens + 2) / (time.perf_counter() - begun)
            with api("smollm2", peer[0], "--batch-file", f"{scratch}/batches") as (client, _):
                found = {count: choices_per_second(client, count, tokens) for count in (1, 3)}
                jobs = batch_per_second(client, 12, tokens)
        results.append(
            {
                "nodes": nodes,
                "one_session": tokens / alone,
                "three_sessions": three,
                "n_1": found[1],
                "n_3": found[3],
                "batch_12": jobs,
            }
        )
    return results


def choices_per_second(client: httpx.Client, count: int, tokens: int) -> float:
    """Tokens/s of one request with several choices."""
    asked = {"prompt": "Once upon a time", "max_tokens": tokens, "n": count, "seed": 1, "ignore_eos": True}
    begun = time.perf_counter()
    answer = client.post("/v1/completions", json=asked).raise_for_status().json()
    return float(answer["usage"]["completion_tokens"] / (time.perf_counter() - begun))


def batch_per_second(client: httpx.Client, count: int, tokens: int) -> float:
    """Tokens/s of a batch of requests, from its creation to its end."""
    lines = [
        json.dumps(
            {
                "custom_id": str(number),
                "method": "POST",
                "url": "/v1/completions",
                "body": {"model": "smollm2", "prompt": f"{number} is", "max_tokens": tokens, "ignore_eos": True},
            }
        )
        for number in range(count)
    ]
    file = {"file": ("batch.jsonl", "\n".join(lines).encode())}
    sent = client.post("/v1/files", files=file, data={"purpose": "batch"}).raise_for_status().json()
    asked = {"input_file_id": sent["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    begun = time.perf_counter()
    batch = client.post("/v1/batches", json=asked).raise_for_status().json()
    while batch["status"] not in ("completed", "failed", "expired", "cancelled"):
        time.sleep(0.1)
        batch = client.get(f"/v1/batches/{batch['id']}").raise_for_status().json()
    seconds = time.perf_counter() - begun
    lines = client.get(f"/v1/files/{batch['output_file_id']}/content").raise_for_status().text.splitlines()
    made = sum(json.loads(line)["response"]["body"]["usage"]["completion_tokens"] for line in lines)
    return float(made / seconds)


def plot(results: Sequence[dict[str, Any]], file: Path) -> None:
    """Speed-up over nodes, by samples, and the thesis's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_model = {name: list(rows) for name, rows in itertools.groupby(results, lambda row: row["model"])}
    figure, panels = pyplot.subplots(
        1, len(by_model), figsize=(3.7 * len(by_model), 4.2), layout="constrained", squeeze=False
    )
    for axes, (name, rows) in zip(panels[0], by_model.items(), strict=True):
        nodes = sorted({row["nodes"] for row in rows})
        for samples in sorted({row["samples"] for row in rows}):
            ups = [row["speed_up"] for row in rows if row["samples"] == samples]
            axes.plot(nodes, ups, marker="o", label=f"{samples} sample{'s' * (samples > 1)}")
        axes.plot(nodes, nodes, color="grey", linestyle=":", label="as many samples as nodes, ideal")
        thesis = [THESIS[name][count - 1] / THESIS[name][0] for count in (1, 2, 3)]
        axes.plot((1, 2, 3), thesis, color="black", linestyle="--", marker="x", label="Macario 2024")
        axes.set_title(f"{name}, {rows[0]['blocks']} blocks")
        axes.set_xlabel("nodes")
        axes.set_xticks(nodes)
        axes.grid(alpha=0.3)
    panels[0][0].set_ylabel("tokens/s over one node with one sample")
    lines, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(lines, labels, loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(file, dpi=110)


def show_requests(results: Sequence[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"requests": results}))
        return
    table = Table(title="tokens/s of SmolLM2")
    for column in ("nodes", "one session", "three", "n = 1", "n = 3", "batch of 12"):
        table.add_column(column, justify="right")
    for row in results:
        nodes, *speeds = row.values()
        table.add_row(str(nodes), *(f"{speed:.1f}" for speed in speeds))
    Console().print(table)


def show(results: Sequence[dict[str, Any]]) -> None:
    table = Table(title="samples of one client through 1, 2 and 3 nodes")
    columns = (
        "model",
        "nodes",
        "samples",
        "tokens/s",
        "speed-up",
        "of ideal",
        "over one node",
    )
    for column in (*columns, "idle", "MiB"):
        table.add_column(column, justify="right")
    for row in results:
        table.add_row(
            row["model"],
            str(row["nodes"]),
            str(row["samples"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['speed_up']:.2f}",
            f"{row['of_ideal']:.0%}",
            f"{row['over_one_node']:.2f}",
            " ".join(f"{idle:.0%}" for idle in row["idle"]),
            " ".join(str(size) for size in row["memory_mib"]),
        )
    console = Console(width=150)
    console.print(table)
    for name, rows in itertools.groupby(results, lambda row: row["model"]):
        full = [f"{row['of_ideal']:.0%} ({row['nodes']} nodes)" for row in rows if row["samples"] == row["nodes"] > 1]
        if full:
            console.print(f"{name}: of the ideal with as many samples as nodes {', '.join(full)}")


if __name__ == "__main__":
    main()
