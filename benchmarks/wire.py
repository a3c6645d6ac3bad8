"""What codecs cost and save: their speed, bytes per token, and the time to the first token over slow lines.

    python benchmarks/wire.py --lines none [--json]                   # the codecs alone, on one thread
    python benchmarks/wire.py --pictures [--json]                     # what a picture takes
    sudo python benchmarks/wire.py [--json] [--lines 10 100 1000] [--rtt 20] [--servers 3] [--model h512]
        [--prompt 256] [--tokens 8] [--rounds 3]

The first table encodes and decodes float32 hidden states: GB/s of the float32 values, medians, and seconds per value of
both together. For the second, servers and the client are processes on hosts of their own, whose lines carry a number of
Mbit/s each way (`delay_bridge.py`, which needs root). `first token` is from the opening of a session to the answer to
its prompt, `ms/token` the decode steps after it, without the client's embeddings and head; the codecs take turns, and
the middle round counts. `chosen` is what `auto` took, after a session in which it measured. Bytes are whole frames: of
the prompt / of a token, from all hosts.

Pictures are those of Qwen3-VL-8B, whose first three blocks add features: processor seconds of its encoder (random
weights, float32, one thread), and MB to the first server and to those behind it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from chain import h512
from delay_bridge import delay_network
from plain import quiet_torch
from rich.console import Console
from rich.table import Table
from transformers import AutoConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionConfig, Qwen3VLVisionModel
from wan import ClientProcess, servers_of

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.client.core import CODEC_CHOICES, CODEC_OF
from petalnode.node.models import resolve
from petalnode.protocols.tensors import decode, encode

SHAPES = ((1, 1, 576), (1, 256, 576), (1, 1, 4096), (1, 256, 4096))
WAYS = ("none", "float16", "bfloat16", "int8", "auto")


def speeds() -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    found = []
    for shape, name in itertools.product(SHAPES, CODEC_OF):
        tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        times: dict[str, list[float]] = {"encode": [], "decode": []}
        for _ in range(max(5, min(500, 20_000_000 // tensor.numel()))):
            begun = time.perf_counter()
            header, payload = encode(tensor, CODEC_OF[name])
            between = time.perf_counter()
            decode(header, payload)
            times["encode"].append(between - begun)
            times["decode"].append(time.perf_counter() - between)
        seconds = {what: statistics.median(taken) for what, taken in times.items()}
        found.append(
            {
                "codec": name,
                "shape": list(shape),
                "bytes_per_value": len(payload) / tensor.numel(),
                **{f"{what}_gb_per_second": 4e-9 * tensor.numel() / taken for what, taken in seconds.items()},
                "ns_per_value": 1e9 * sum(seconds.values()) / tensor.numel(),
            }
        )
    return found


@torch.inference_mode()
def pictures(sides: tuple[int, ...] = (256, 512), hidden: int = 4096) -> list[dict[str, Any]]:
    """Of pictures with `sides` pixels to each side."""
    torch.set_num_threads(1)
    config = Qwen3VLVisionConfig(out_hidden_size=hidden)
    encoder, found = Qwen3VLVisionModel(config).eval(), []
    for side in sides:
        grid = side // config.patch_size
        pixels = torch.randn(grid * grid, 3 * config.temporal_patch_size * config.patch_size**2)
        begun = time.process_time()
        encoder(pixels, grid_thw=torch.tensor([[1, grid, grid]]))
        row: dict[str, Any] = {"pixels": side, "encoder_seconds": time.process_time() - begun}
        row["tokens"] = tokens = grid * grid // config.spatial_merge_size**2
        widths = {"first": hidden * (1 + len(config.deepstack_visual_indexes)), "later": hidden}
        for (name, width), codec in itertools.product(widths.items(), ("float16", "int8")):
            row[f"{name}_{codec}_mb"] = len(encode(torch.randn(1, tokens, width), CODEC_OF[codec])[1]) / 1e6
        found.append(row)
    return found


def client(folder: str, addr: str) -> None:
    """The process on the client's host: opens a model with the codec of each line it reads, and runs a session."""
    quiet_torch()
    for line in sys.stdin:
        wanted = json.loads(line)
        with AutoDistributedModelForCausalLM.from_pretrained(
            folder, initial_peers=[addr], codec=wanted["codec"]
        ) as model:
            generator = torch.Generator().manual_seed(wanted["seed"])
            tokens, count = wanted["prompt"], wanted["tokens"]
            hidden = model._local.embed(torch.randint(5, 2000, (1, tokens), generator=generator))
            if wanted["codec"] == "auto":
                with model.inference_session(tokens + count) as session:
                    session.step(hidden)
            print(json.dumps({"opened": True}), flush=True)
            sys.stdin.readline()  # the bytes of the prompt are counted from here on
            begun = time.perf_counter()
            with model.inference_session(tokens + count) as session:
                token = session.step(hidden)[:, -1:]
                first = time.perf_counter() - begun
                print(json.dumps({"first": first, "chosen": session._session.spec.codec}), flush=True)
                sys.stdin.readline()  # and those of the tokens
                times = []
                for _ in range(count):
                    begun = time.perf_counter()
                    token = session.step(token)
                    times.append(time.perf_counter() - begun)
            print(json.dumps({"token": statistics.median(times)}), flush=True)


def lines(mbit: float, model: Path, num_blocks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """All codecs over lines of a number of Mbit/s."""
    results: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    with (
        delay_network(options.servers + 1, options.rtt / 2000, mbit) as network,
        servers_of(network, model, options.servers, num_blocks) as servers,
    ):
        process = ClientProcess(network, model, servers[0].ready["addrs"][0], options.tokens, script=__file__)
        try:
            for number, way in itertools.product(range(options.rounds), WAYS):
                wanted = {"codec": way, "prompt": options.prompt, "tokens": options.tokens, "seed": number}
                process.ask(json.dumps(wanted))
                sent = [sum(network.bytes_sent().values())]
                result = process.ask("go")
                sent.append(sum(network.bytes_sent().values()))
                result |= process.ask("go")
                sent.append(sum(network.bytes_sent().values()))
                result["prompt_bytes"] = sent[1] - sent[0]
                result["token_bytes"] = (sent[2] - sent[1]) / options.tokens
                results[way].append(result)
        finally:
            process.stop()
    found = []
    for way, rounds in results.items():
        middle = {name: statistics.median(one[name] for one in rounds) for name in rounds[0] if name != "chosen"}
        found.append(
            {
                "mbit": mbit,
                "rtt_ms": options.rtt,
                "codec": way,
                "chosen": rounds[-1]["chosen"],
                "first_token_s": middle["first"],
                "ms_per_token": 1000 * middle["token"],
                "prompt_bytes": round(middle["prompt_bytes"]),
                "token_bytes": round(middle["token_bytes"]),
            }
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")
    parser.add_argument("--lines", nargs="+", default=["10", "100", "1000"], help="Mbit/s; none: the codecs alone")
    parser.add_argument("--rtt", type=float, default=20, help="milliseconds between any two hosts")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--model", default="h512", help="h512 (random weights) or any model")
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pictures", action="store_true", help="what a picture takes, and nothing else")
    parser.add_argument("--client", nargs=2, metavar=("MODEL", "PEER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        client(*options.client)
        return
    if options.pictures:
        rows = pictures()
        print(json.dumps({"pictures": rows}) if options.json else "\n".join(map(str, rows)))
        return
    assert set(WAYS) == set(CODEC_CHOICES)
    codecs, results = speeds(), []
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        if options.lines != ["none"]:
            made_here = options.model == "h512"
            model = h512(Path(scratch) / "h512") if made_here else resolve(options.model, need="all").path
            num_blocks = AutoConfig.from_pretrained(model).num_hidden_layers
            for mbit in map(float, options.lines):
                print(f"{mbit:g} Mbit/s ...", file=sys.stderr)
                results += lines(mbit, model, num_blocks, options)
    if options.json:
        print(json.dumps({"model": options.model, "prompt": options.prompt, "codecs": codecs, "lines": results}))
        return
    show(codecs, results, options)


def show(codecs: list[dict[str, Any]], results: list[dict[str, Any]], options: argparse.Namespace) -> None:
    table = Table(title="codecs, one thread")
    for column in ("shape", "codec", "bytes/value", "encode GB/s", "decode GB/s", "ns/value, both"):
        table.add_column(column, justify="right")
    for codec in codecs:
        table.add_row(
            " x ".join(map(str, codec["shape"])),
            codec["codec"],
            f"{codec['bytes_per_value']:.2f}",
            f"{codec['encode_gb_per_second']:.2f}",
            f"{codec['decode_gb_per_second']:.2f}",
            f"{codec['ns_per_value']:.2f}",
        )
    Console(width=110).print(table)
    if not results:
        return
    table = Table(title=f"{options.model}, {options.servers} servers, a prompt of {options.prompt} tokens")
    for column in ("Mbit/s", "RTT ms", "codec", "chosen", "first token s", "ms/token", "bytes of prompt", "of a token"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            f"{result['mbit']:g}",
            f"{result['rtt_ms']:g}",
            result["codec"],
            result["chosen"],
            f"{result['first_token_s']:.2f}",
            f"{result['ms_per_token']:.1f}",
            f"{result['prompt_bytes']:,}",
            f"{result['token_bytes']:,}",
        )
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
