"""Whether the swarm's greedy tokens are those of plain transformers, and the memory of a server of the whole model.

    python benchmarks/same_tokens.py [--json] [--model smollm2] [--prompts 20] [--tokens 128] [--servers 1 2]

Prompts are questions in the model's chat template, and the plain model computes in float32 with the weights that the
checkpoint has (of a GGUF file: the dequantised ones). Servers compute by the compiled kernels where they are built, or
with `--kernels torch`; what they said of it stands in the result. `memory` is resident, in MiB, of a server of all
blocks when it is ready and after its answers, and of one of a model of six tiny blocks, which is what torch,
transformers and libp2p take. Exit code 1 if a token differs. Two to three minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from chain import spans_of
from local_swarm import ServerProcess, local_swarm
from plain import plain_model, quiet_torch
from rich.console import Console
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from petalnode import AutoDistributedModelForCausalLM
from petalnode.node.models import resolve

QUESTIONS = (
    "What is the capital of France?",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "Name three prime numbers above ten.",
    "Write a short poem about rain.",
    "What is the difference between a virus and a bacterium?",
    "Explain photosynthesis to a child.",
    "Who wrote Don Quixote?",
    "Give me a recipe for bread.",
    "What does a compiler do?",
    "How far away is the Moon?",
    "Write a Python function that reverses a list.",
    "What is inflation?",
    "Tell me a joke about a cat.",
    "How do vaccines work?",
    "Translate 'good morning' into Spanish.",
    "What are the seasons of the year?",
    "Why do leaves change their colour?",
    "Summarise the story of Romeo and Juliet.",
    "What should I pack for a week in the mountains?",
)


def resident(server: ServerProcess) -> float:
    """MiB."""
    return round(server.memory()["rss"] / 2**20, 1)


def greedy(model: Any, prompt: torch.Tensor, tokens: int) -> list[int]:
    made = model.generate(prompt, max_new_tokens=tokens, eos_token_id=None, do_sample=False, pad_token_id=0)
    return made[0, prompt.shape[1] :].tolist()  # type: ignore[no-any-return]


def tiny_server(folder: Path) -> float:
    """MiB of a ready server of hardly any weights."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6}
    LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2)).save_pretrained(folder)
    with local_swarm(str(folder), [(0, 6)]) as (server,):
        return resident(server)


def run(options: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    folder = resolve(options.model).path
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plain = plain_model(folder, "float32")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, return_tensors="pt", return_dict=False
        )
        for question in QUESTIONS[: options.prompts]
    ]
    expected = []
    for number, prompt in enumerate(prompts, 1):
        print(f"transformers, prompt {number} ...", file=sys.stderr, flush=True)
        expected.append(greedy(plain, prompt, options.tokens))
    chains = []
    for servers in options.servers:
        print(f"{servers} servers ...", file=sys.stderr, flush=True)
        spans = spans_of(plain.config.num_hidden_layers, servers)
        with local_swarm(options.model, spans, "--kernels", options.kernels) as processes:
            ready = [resident(server) for server in processes]
            peer = processes[0].ready["addrs"][0]  # type: ignore[index]
            with AutoDistributedModelForCausalLM.from_pretrained(options.model, initial_peers=[peer]) as model:
                given = [greedy(model, prompt, options.tokens) for prompt in prompts]
            chain = {
                "servers": servers,
                "kernels": [server.ready.get("kernels") for server in processes],
                "tokens": sum(map(len, expected)),
                "equal": sum(a == b for e, g in zip(expected, given, strict=True) for a, b in zip(e, g, strict=True)),
                "memory_ready": ready,
                "memory_after": [resident(server) for server in processes],
            }
        chains.append(chain)
    return {"model": options.model, "chains": chains, "memory_of_a_tiny_model": tiny_server(scratch / "tiny")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of lines")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=int, default=20, choices=range(1, len(QUESTIONS) + 1), metavar="N")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer")
    parser.add_argument("--servers", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--kernels", choices=("auto", "native", "torch"), default="auto")
    options = parser.parse_args()
    quiet_torch(None)
    with tempfile.TemporaryDirectory(prefix="petalnode-bench-") as scratch:
        found = run(options, Path(scratch))
    if options.json:
        print(json.dumps(found))
    else:
        console = Console(soft_wrap=True)
        for chain in found["chains"]:
            console.print(
                f"{chain['servers']} servers ({', '.join(map(str, chain['kernels']))}): {chain['equal']} of "
                f"{chain['tokens']} tokens equal; MiB when ready {chain['memory_ready']}, after {chain['memory_after']}"
            )
        console.print(f"MiB of a server of a tiny model: {found['memory_of_a_tiny_model']}")
    sys.exit(any(chain["equal"] != chain["tokens"] for chain in found["chains"]))


if __name__ == "__main__":
    main()
