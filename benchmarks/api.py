"""What the HTTP API costs: time to the first token and tokens/s through `petalnode api`, against the Python API.

    python benchmarks/api.py [--json] [--model smollm2] [--streams 1 4 16] [--tokens 48] [--prompt 64] [--rounds 3]

Two servers on loopback, and `petalnode api`, are processes of one compute thread each. This process asks: once over
HTTP, as a stream of server-sent events, and once by `generate` of the Python API in a thread for each stream, in turns,
so that both see the same noise. Tokens/s are those of all streams together, from the request to the last token; the
ratio is that of the medians. `schema` is the time for each token of an answer that is bound to a JSON schema, against
an answer that is not, both without drafts. Processor time is that of the process that answers: `petalnode api`, or this
one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import psutil
import torch
from local_swarm import local_swarm
from rich.console import Console
from rich.table import Table

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.models import resolve

SCHEMA = {
    "type": "object",
    "properties": {"story": {"type": "string", "minLength": 2000}},
    "required": ["story"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Measured:
    """Of one answer, in seconds since the request: when the first and the last token came, and how many there were."""

    first: float
    last: float
    tokens: int


@contextlib.contextmanager
def api(model: str, peer: str, *options: str) -> Iterator[tuple[httpx.Client, psutil.Process]]:
    """A client of `petalnode api` that keeps its connections, as the official ones do, and the process of that, which
    keeps no conversations."""
    command = [sys.executable, "-m", "petalnode", "api", model, "--peer", peer, "--http-port", "0", "--json"]
    command += ["--no-mdns", "--no-remember", "--keep-sessions", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"}) as process:
        try:
            assert process.stdout is not None
            url = json.loads(process.stdout.readline())["url"]
            with httpx.Client(base_url=url, timeout=None, trust_env=False) as client:
                yield client, psutil.Process(process.pid)
        finally:
            process.terminate()


def over_http(client: httpx.Client, prompt: list[int], tokens: int, **fields: Any) -> Measured:
    asked = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **fields}
    asked["stream_options"] = {"include_usage": True}
    begun = time.perf_counter()
    first = last = 0.0
    count = 0
    with client.stream("POST", "/v1/completions", json=asked) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line[6:])
            if not chunk["choices"]:
                count = chunk["usage"]["completion_tokens"]
            elif chunk["choices"][0]["text"]:
                last = time.perf_counter() - begun
                first = first or last
    return Measured(first, last, count)


class _Clock:
    """A streamer of transformers that notes when tokens come; the first call has the prompt."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def by_python(model: Any, prompt: list[int], tokens: int) -> Measured:
    clock = _Clock()
    begun = time.perf_counter()
    model.generate(
        torch.tensor([prompt]), max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, streamer=clock
    )
    return Measured(clock.times[1] - begun, clock.times[-1] - begun, len(clock.times) - 1)


def together(
    ask: Callable[[list[int]], Measured], prompts: Sequence[list[int]], process: psutil.Process
) -> tuple[float, float, float]:
    """(median seconds to the first token, tokens/s of all, processor seconds of `process` for each token) of answers to
    all prompts at once."""
    found: list[Measured] = []
    before = sum(process.cpu_times()[:2])
    threads = [threading.Thread(target=lambda prompt=prompt: found.append(ask(prompt))) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    seconds, tokens = max(measured.last for measured in found), sum(one.tokens for one in found)
    used = sum(process.cpu_times()[:2]) - before
    return statistics.median(measured.first for measured in found), tokens / seconds, used / tokens


def measure(options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    blocks = resolve(options.model, need="config").num_blocks
    result: dict[str, Any] = {"model": options.model, "tokens": options.tokens, "prompt": options.prompt, "streams": []}
    half = blocks // 2
    with (
        local_swarm(options.model, [(0, half), (half, blocks)], "--cache-tokens", "65536") as servers,
        api(options.model, str(servers[0].ready["addrs"][0])) as (client, process),  # type: ignore[index]
        AutoDistributedModelForCausalLM.from_pretrained(
            options.model,
            initial_peers=[servers[0].ready["addrs"][0]],  # type: ignore[index]
        ) as model,
    ):
        random = torch.Generator().manual_seed(0)

        def prompts(count: int) -> list[list[int]]:
            drawn: list[list[int]] = torch.randint(10, 1000, (count, options.prompt), generator=random).tolist()
            return drawn

        stop = model.transformers_model.generation_config.eos_token_id
        unending = {str(token): -100 for token in (stop if isinstance(stop, list) else [stop])}

        def http(prompt: list[int]) -> Measured:
            return over_http(client, prompt, options.tokens, logit_bias=unending)

        def python(prompt: list[int]) -> Measured:
            return by_python(model, prompt, options.tokens)

        for count in options.streams:
            rounds: dict[str, list[tuple[float, float, float]]] = {"api": [], "python": []}
            ways = (("api", http, process), ("python", python, psutil.Process()))
            for index in range(options.rounds + 1):  # the first one warms up
                asked = prompts(count)
                for name, ask, answering in ways[:: 1 if index % 2 else -1]:
                    measured = together(ask, asked, answering)
                    if index:
                        rounds[name].append(measured)
            row: dict[str, Any] = {"streams": count}
            for name, found in rounds.items():
                row[f"{name}_first_ms"] = round(1000 * statistics.median(first for first, _, _ in found), 1)
                row[f"{name}_tokens_per_s"] = round(statistics.median(rate for _, rate, _ in found), 2)
                row[f"{name}_cpu_ms_per_token"] = round(1000 * statistics.median(used for _, _, used in found), 2)
            row["ratio"] = round(row["api_tokens_per_s"] / row["python_tokens_per_s"], 3)
            result["streams"].append(row)
        result["schema"] = schema_cost(client, process, prompts, options, unending)
    return result


def schema_cost(
    client: httpx.Client,
    process: psutil.Process,
    prompts: Callable[[int], list[list[int]]],
    options: argparse.Namespace,
    unending: dict[str, int],
) -> dict[str, float]:
    """Milliseconds for each token after the first, free and bound, and processor time of the API for each token.

    Both have a bias, so only the mask differs; and none has drafts, which find more in one text than in another.
    """
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "story", "schema": SCHEMA}}}
    found: dict[str, list[tuple[float, float]]] = {"free": [], "bound": []}
    for index in range(2 * options.rounds + 1):
        (prompt,) = prompts(1)
        for name, fields in (("free", {}), ("bound", form))[:: 1 if index % 2 else -1]:
            before = sum(process.cpu_times()[:2])
            more = {"logit_bias": unending, "x_petalnode": {"draft": "none"}, "temperature": options.temperature}
            one = over_http(client, prompt, options.tokens, **more, **fields)
            used = sum(process.cpu_times()[:2]) - before
            if index:
                found[name].append((1000 * (one.last - one.first) / max(1, one.tokens - 1), 1000 * used / one.tokens))
    free, bound = (statistics.median(wall for wall, _ in found[name]) for name in ("free", "bound"))
    free_cpu, bound_cpu = (statistics.mean(used for _, used in found[name]) for name in ("free", "bound"))
    return {
        "free_ms": round(free, 3),
        "bound_ms": round(bound, 3),
        "cost": round(bound / free - 1, 4),
        "free_cpu_ms": round(free_cpu, 3),
        "bound_cpu_ms": round(bound_cpu, 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 16], help="none: the schema alone")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answers with and without a schema")
    result = measure(parser.parse_args())
    if "--json" in sys.argv:
        print(json.dumps(result))
        return
    names = ("first token", "tokens/s", "processor ms a token")
    table = Table("streams", *(f"{way}, {name}" for name in names for way in ("API", "Python")), "ratio")
    for row in result["streams"]:
        firsts = (f"{row['api_first_ms']} ms", f"{row['python_first_ms']} ms")
        rest = (str(row[f"{way}_{name}"]) for name in ("tokens_per_s", "cpu_ms_per_token") for way in ("api", "python"))
        table.add_row(str(row["streams"]), *firsts, *rest, str(row["ratio"]))
    console = Console()
    console.print(table)
    schema = result["schema"]
    console.print(
        f"a schema: {schema['bound_ms']} ms a token instead of {schema['free_ms']}: {schema['cost']:+.1%}; "
        f"processor ms a token of the API {schema['bound_cpu_ms']} instead of {schema['free_cpu_ms']}"
    )


if __name__ == "__main__":
    main()
