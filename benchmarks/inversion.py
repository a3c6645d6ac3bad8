"""How much of a text a server can read off the hidden states that pass through it: inversion attacks on a real model.

    python benchmarks/inversion.py [--json] [--model smollm2] [--after 0 1 2 5 10 29] [--train 16384] [--test 2048]
        [--search 32]
    python benchmarks/inversion.py --pictures 64 512 [--json] --after 0 2 --train 6144 --test 16

For the hidden states after each block of `--after`, on held-out English Wikipedia (`perplexity.py` says where it is
from), the share of tokens that come out right by

- **nearest embedding**: the token whose embedding has the largest cosine with the hidden state, the mean of each taken
  out. Needs nothing but the model's embeddings.
- **trained decoder**: a linear map (ridge regression) and a hidden layer of 768 beside it, trained on the hidden states
  of `--train` other tokens to give the embedding. About 1.2 million weights, and some minutes of one core.
- **search**: who has the weights of the blocks before runs the likeliest tokens (by decoder and model) through them, 64
  at a time, and takes the one that gives this hidden state: on the first tokens of two texts, up to 512 a token. The
  first one is known, as that of every chat is.

`answer` is the other end: how often norm and head, applied to the hidden state at once, give the token that the whole
model finds the likeliest to come next.

With --pictures: how much of pictures comes out, as the share of the variance of their pixels. A tiny LLaVA with random
weights makes tokens of so many values of each square of 14 x 14 pixels, which are 588 values; pictures are noise of the
spectrum of photographs. `trained decoder` is a ridge regression from the hidden states of `--train` pictures of the
attacker's own; `gradients` goes on from there, and changes the picture until it gives the hidden states that were seen.
`one colour` is what the mean of each token's square has of it. Block -1 is what is sent to the first server.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import torch
from perplexity import wikipedia, windows
from plain import quiet_torch
from rich.console import Console
from rich.table import Table
from torch.nn import functional

from petalnode.node.blocks.client_part import ClientModel, load_client
from petalnode.node.blocks.span import BlockSpan, load_span
from petalnode.node.models import resolve
from petalnode.protocols.ids import Span

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.tiny_pictures import FAMILIES, SIDE, save_seeing

WINDOW: Final = 128
ROWS: Final = 64
"""Tokens that are tried at a time."""
MOST_TRIED: Final = 512
SAME: Final = 1e-3
"""Relative distance of two hidden states below which they are of the same text."""
NEGATIVES: Final = 2048
PICTURE_STEPS: Final = 300
BATCH: Final = 512


@torch.inference_mode()
def hidden_states(
    client: ClientModel, blocks: BlockSpan, texts: list[torch.Tensor], after: list[int]
) -> dict[int, torch.Tensor]:
    """Per block of `after` and for the last block: float32 [texts, tokens, hidden size]."""
    last = blocks.span.end - 1
    ends = sorted({*after, last})
    parts = [Span(start, end + 1) for start, end in zip([0, *(end + 1 for end in ends)], ends, strict=False)]
    found: dict[int, list[torch.Tensor]] = {end: [] for end in ends}
    for text in texts:
        hidden = client.embed(text)
        for part in parts:
            cache = blocks.make_cache(1, text.shape[1], part=part)
            hidden = blocks.forward(hidden, cache)
            cache.free()
            found[part.end - 1].append(hidden[0])
    return {end: torch.stack(states) for end, states in found.items()}


class Decoder(torch.nn.Module):
    """From a hidden state to the direction of its token's embedding."""

    def __init__(self, hidden: torch.Tensor, wanted: torch.Tensor) -> None:
        """`hidden`, `wanted`: float [tokens, size]; the linear map is their ridge regression."""
        super().__init__()
        size = hidden.shape[1]
        self.mean = torch.nn.Buffer(hidden.mean(0))
        self.scale = torch.nn.Buffer(hidden.std(0) + 1e-6)
        inputs = self._standardised(hidden).double()
        gram = inputs.T @ inputs + 10.0 * torch.eye(size, dtype=torch.float64)
        self.linear = torch.nn.Linear(size, size)
        with torch.no_grad():
            centre = wanted.double().mean(0)
            self.linear.weight.copy_(torch.linalg.solve(gram, inputs.T @ (wanted.double() - centre)).T)
            self.linear.bias.copy_(centre)
        self.into, self.out = torch.nn.Linear(size, 768), torch.nn.Linear(768, size)
        torch.nn.init.zeros_(self.out.weight)
        torch.nn.init.zeros_(self.out.bias)
        self.sharpness = torch.nn.Parameter(torch.tensor(3.0))

    def _standardised(self, hidden: torch.Tensor) -> torch.Tensor:
        return ((hidden - self.mean) / self.scale).clamp(-10, 10)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        inputs = self._standardised(hidden)
        outputs = self.linear(inputs) + self.out(functional.gelu(self.into(inputs)))
        return self.sharpness.exp() * functional.normalize(outputs, dim=-1)


def train(hidden: torch.Tensor, tokens: torch.Tensor, directions: torch.Tensor, epochs: int) -> Decoder:
    """`hidden` float [tokens, size], `tokens` int64 [tokens]; `directions` of all embeddings, of length 1.

    The loss is the cross-entropy of the right token among those of the batch and some random ones.
    """
    generator = torch.Generator().manual_seed(0)
    decoder = Decoder(hidden, directions[tokens])
    optimizer = torch.optim.Adam(decoder.parameters(), lr=1e-3)
    for _ in range(epochs):
        for chosen in torch.randperm(len(tokens), generator=generator).split(BATCH):
            others = torch.randint(len(directions), (NEGATIVES,), generator=generator)
            classes, labels = torch.cat([tokens[chosen], others]).unique(return_inverse=True)
            scores = decoder(hidden[chosen]) @ directions[classes].T
            loss = functional.cross_entropy(scores, labels[: len(chosen)])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return decoder


@torch.inference_mode()
def search(
    client: ClientModel,
    blocks: BlockSpan,
    hidden: torch.Tensor,
    text: torch.Tensor,
    likely: torch.Tensor,
    after: int,
    count: int,
) -> tuple[int, int, int]:
    """How many of the next `count` tokens of `text` are found, how many of them surely, and how many were tried.

    `hidden` float [tokens, size] after block `after`, `likely` float [tokens, vocabulary]. The attacker goes on behind
    what he has found, right or wrong.
    """
    cache = blocks.make_cache(ROWS, count + 1, part=Span(0, after + 1))
    blocks.forward(client.embed(text[:1].repeat(ROWS, 1)), cache)
    right = sure = tried = 0
    for position in range(1, count + 1):
        order = likely[position].topk(MOST_TRIED).indices
        nearest, row = (float("inf"), 0), None
        for candidates in order.split(ROWS):
            cache.rollback(position)
            out = blocks.forward(client.embed(candidates.unsqueeze(1), position), cache)[:, 0]
            distances = (out - hidden[position]).norm(dim=-1) / hidden[position].norm()
            tried += len(candidates)
            nearest = min(nearest, (float(distances.min()), int(candidates[distances.argmin()])))
            if nearest[0] < SAME:
                row = int(distances.argmin())
                break
        if row is not None:
            cache.reorder([row] * ROWS)
        else:
            cache.rollback(position)
            blocks.forward(client.embed(torch.full((ROWS, 1), nearest[1]), position), cache)
        right += nearest[1] == int(text[position])
        sure += nearest[0] < SAME
    cache.free()
    return right, sure, tried


@torch.inference_mode()
def likeliest(scores: torch.Tensor, directions: torch.Tensor) -> torch.Tensor:
    """The token with the highest score for each of [tokens, size]: int64 [tokens]."""
    return torch.cat([(part @ directions.T).argmax(-1) for part in scores.split(256)])


def attack(
    after: int,
    client: ClientModel,
    blocks: BlockSpan,
    trained: tuple[dict[int, torch.Tensor], torch.Tensor],
    held_out: tuple[dict[int, torch.Tensor], torch.Tensor],
    epochs: int,
    count: int,
) -> dict[str, float]:
    """The shares of one block; `trained` and `held_out` are hidden states and int64 [texts, tokens].
    `count` tokens of each of two texts are searched."""
    begun = time.process_time()
    with torch.inference_mode():
        vocabulary = int(client.head(held_out[0][after][:1, :1]).shape[-1])
        directions = functional.normalize(client.embed(torch.arange(vocabulary).unsqueeze(1))[:, 0].float(), dim=-1)
        centred = functional.normalize(directions - directions.mean(0), dim=-1)
    directions = directions.clone()
    states, tokens = held_out[0][after].flatten(0, 1).float(), held_out[1].flatten()
    nearest = (likeliest(states - states.mean(0), centred) == tokens).float().mean()
    decoder = train(
        trained[0][after].flatten(0, 1).float().clone(), trained[1].flatten(), directions, epochs
    ).requires_grad_(requires_grad=False)
    decoded = (likeliest(decoder(states), directions) == tokens).float().mean()
    told = (
        likeliest_next(client, held_out[0][after]) == likeliest_next(client, held_out[0][blocks.span.end - 1])
    ).float()
    right = sure = tried = 0
    for text in (0, 1):
        hidden = held_out[0][after][text].float()
        likely = (decoder(hidden[: count + 1]) @ directions.T).log_softmax(-1)
        final = held_out[0][blocks.span.end - 1][text : text + 1, :count]
        likely[1:] += client.head(final)[0].float().log_softmax(-1)
        found = search(client, blocks, hidden, held_out[1][text], likely, after, count)
        right, sure, tried = right + found[0], sure + found[1], tried + found[2]
    searched = 2 * count
    return {
        "after_block": after,
        "nearest_embedding": float(nearest),
        "trained_decoder": float(decoded),
        "search": right / searched,
        "search_sure": sure / searched,
        "search_tried_per_token": tried / searched,
        "answer": float(told.mean()),
        "processor_seconds": time.process_time() - begun,
    }


@torch.inference_mode()
def likeliest_next(client: ClientModel, hidden: torch.Tensor) -> torch.Tensor:
    """What norm and head make of [texts, tokens, size]: int64 [texts, tokens]."""
    return torch.stack([client.head(text.unsqueeze(0))[0].argmax(-1) for text in hidden])


# --- pictures


def seeing(values: int, folder: Path) -> Any:
    """The tests' smallest model that takes pictures, with this many values for each token."""
    sizes = {"hidden_size": values, "intermediate_size": 2 * values}
    with patch.dict(FAMILIES, {"llava": replace(FAMILIES["llava"], vision=sizes, text=sizes)}):
        model = save_seeing("llava", folder)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_((64 / values) ** 0.5 if weight.dim() > 1 else 1.0)
    return model.requires_grad_(requires_grad=False).model


def noise(count: int) -> torch.Tensor:
    """Pictures, float [count, 3, SIDE, SIDE]: amplitudes fall with the frequency, and colours go together."""
    frequencies = torch.fft.fftfreq(SIDE)
    falling = 1 / torch.hypot(frequencies[:, None], frequencies).clamp(min=1 / SIDE)
    white = torch.randn(count, 3, SIDE, SIDE) + 2 * torch.randn(count, 1, SIDE, SIDE)
    pictures = torch.fft.ifft2(torch.fft.fft2(white) * falling).real
    return pictures / pictures.std()


def picture_states(model: Any, pictures: torch.Tensor, after: int) -> torch.Tensor:
    """What a server sees of them behind a block, -1 for what is sent to the first: [pictures, all their values]."""
    sent = torch.stack(list(model.get_image_features(pixel_values=pictures).pooler_output))
    if after >= 0:
        sent = model.language_model(inputs_embeds=sent, output_hidden_states=True).hidden_states[after + 1]
    return sent.flatten(1)


def attack_pictures(model: Any, after: int, own: torch.Tensor, held_out: torch.Tensor) -> dict[str, float]:
    """The share of the variance of `held_out` that is found, by who has made pictures of his `own`."""
    begun = time.process_time()
    seen = torch.cat([picture_states(model, part, after) for part in own.split(BATCH)])
    wanted, mean, scale = picture_states(model, held_out, after), seen.mean(0), seen.std(0) + 1e-6
    inputs = (seen - mean) / scale
    gram = inputs.T @ inputs + 1e-3 * len(own) * torch.eye(inputs.shape[1])
    linear = torch.linalg.solve(gram, inputs.T @ (own - own.mean(0)).flatten(1))
    decoded = ((wanted - mean) / scale @ linear).view_as(held_out) + own.mean(0)
    sought = decoded.clone().requires_grad_()
    optimizer = torch.optim.Adam([sought], lr=0.02)
    for _ in range(PICTURE_STEPS):
        optimizer.zero_grad()
        (((picture_states(model, sought, after) - wanted) / scale) ** 2).mean().backward()
        optimizer.step()
    side = SIDE // 2  # of a token
    plain = functional.avg_pool2d(held_out, side).repeat_interleave(side, 2).repeat_interleave(side, 3)
    found = {"one_colour": plain, "trained_decoder": decoded, "gradients": sought.detach()}
    shares = {name: float(1 - (held_out - given).var() / held_out.var()) for name, given in found.items()}
    return {**shares, "processor_seconds": time.process_time() - begun}


def pictures_main(options: argparse.Namespace) -> None:
    results, own, held_out = [], noise(options.train), noise(options.test)
    for values in options.pictures:
        with tempfile.TemporaryDirectory() as folder:
            model = seeing(values, Path(folder))
        for after in (-1, *(block for block in options.after if block < 3)):
            shares = attack_pictures(model, after, own, held_out)
            results.append({"values_per_token": values, "after_block": after, **shares})
            print(results[-1], file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps({"picture_inversion": {"train": len(own), "test": len(held_out), "results": results}}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object instead of a table")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--after", type=int, nargs="+", default=[0, 1, 2, 5, 10, 29], help="numbers of blocks")
    parser.add_argument("--train", type=int, default=16384, help="tokens, or pictures, that the decoder is trained on")
    parser.add_argument("--test", type=int, default=2048, help="held-out tokens or pictures")
    parser.add_argument("--search", type=int, default=32, help="tokens of each of two texts that are searched")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--text", type=Path, help="a text file")
    parser.add_argument("--pictures", type=int, nargs="+", metavar="VALUES", help="of each of their tokens")
    options = parser.parse_args()
    quiet_torch()
    torch.manual_seed(0)
    if options.pictures:
        pictures_main(options)
        return
    model = resolve(options.model, need="all")
    text = options.text.read_text(encoding="utf-8") if options.text else wikipedia()
    client = load_client(model.path, dtype="float32")
    blocks = load_span(model.path, Span(0, model.num_blocks), dtype="float32")
    begun = time.process_time()
    sets = []
    for name, part, tokens in (("training", text, options.train), ("held-out", text[len(text) // 2 :], options.test)):
        print(f"{model.name}: hidden states of {tokens} {name} tokens ...", file=sys.stderr)
        texts = windows(model.path, part, tokens, WINDOW)
        sets.append((hidden_states(client, blocks, texts, options.after), torch.cat(texts)))
    computing = time.process_time() - begun
    results = []
    for after in options.after:
        print(f"after block {after} ...", file=sys.stderr)
        results.append(attack(after, client, blocks, sets[0], sets[1], options.epochs, options.search))
    summary = {"model": model.name, "train": options.train, "test": options.test, "hidden_states_seconds": computing}
    if options.json:
        print(json.dumps({"inversion": {**summary, "results": results}}))
    else:
        show(summary, results)


def show(summary: dict[str, Any], results: list[dict[str, float]]) -> None:
    table = Table(title=f"{summary['model']}, {summary['test']} held-out tokens of English Wikipedia")
    columns = ("after block", "nearest embedding", "trained decoder", "search", "sure", "tried", "answer", "core s")
    for column in columns:
        table.add_column(column, justify="right")
    for result in results:
        shares = ("nearest_embedding", "trained_decoder", "search", "search_sure")
        table.add_row(
            str(int(result["after_block"])),
            *(f"{100 * result[share]:.1f} %" for share in shares),
            f"{result['search_tried_per_token']:.0f}",
            f"{100 * result['answer']:.1f} %",
            f"{result['processor_seconds']:.0f}",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
