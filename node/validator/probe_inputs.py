"""What a probe sends: questions and passages as people type them, and the tensors that a training lets servers keep."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

import torch

from ...protocols.training import LORA_PARTS, PROMPTS, LoraName
from ..blocks.client_part import ClientModel
from ..client.api.tuning import is_target, usual_targets
from ..client.chat import Dialogue, Text
from ..client.swarm_model import SwarmModel
from ..errors import BadInput
from .probe_plan import Kind

_PREFIXES: Final = (4, 8, 16)
_RANKS: Final = (4, 8, 16)
_LEARNT: Final = (0.0, 0.3, 1.0)
"""How far a training has come: it begins with deep prompts, or LoRA's B, of zero."""
_PROMPT_SIZE: Final = 0.05
_LORA_SIZE: Final = 0.02
_QUESTIONS: Final = (
    "What is the difference between {a} and {b}?",
    "Explain {a} to a child of ten.",
    "why does {a} matter",
    "Give me three facts about {a}.",
    "Write a short poem about {a}.",
    "How would you compare {a} with {b}? Be brief.",
    "I have to give a talk on {a} tomorrow. What should I begin with?",
    "Summarise in one sentence: {p}",
    "Is this text right? {p}",
    "Translate into French: {p}",
    "What would a critic of {a} say?",
    "list some books on {a}",
    "My neighbour says that {a} has nothing to do with {b}. Is that so?",
    "Continue this text:\n\n{p}",
    "What are the main points here?\n\n{p} {q}",
    "Correct the mistakes: {p} {q}",
    "hi, can you help me with {a}?",
    "Write an email to my landlord about {a}.",
    "What did people know of {a} two hundred years ago?",
    "Name a common mistake about {a}, and say why people make it.",
)
_THINGS: Final = (
    *("the tides", "sourdough bread", "compound interest", "photosynthesis", "the French Revolution", "black holes"),
    *("house plants", "bicycle gears", "the printing press", "jazz", "glaciers", "recursion", "chess openings"),
    *("vaccines", "the Roman roads", "rain on the window", "public libraries", "electric cars", "bees", "tax returns"),
    *("a broken heating", "noise at night", "earthquakes", "the moon", "supply and demand", "knitting", "volcanoes"),
    *("Shakespeare's sonnets", "neural networks", "olive oil", "the deposit", "migratory birds", "time zones", "tea"),
)
_SENTENCES: Final = (
    "The train was late again, so we walked along the river and counted the boats.",
    "Water expands when it freezes, which is why pipes burst in winter and ice floats on lakes.",
    "In the second quarter sales rose by four per cent, mostly because of the new shops in the north.",
    "She had kept every letter, tied in bundles by year, in a box under the stairs.",
    "A good index makes a query fast, but each one has to be kept up to date when rows are written.",
    "The committee could not agree on a date, and so the matter was put off until the autumn.",
    "Heat the oil, add the onions, and stir until they are soft but not brown.",
    "Light from the nearest star takes more than four years to reach us.",
    "He said that he would call at noon, but the telephone did not ring all day.",
    "Most of the old town was built of the same grey stone, cut from the hills behind it.",
    "If the test fails on one machine only, look first at what is different about its clock.",
    "The cat watched the snow from the window sill, and would not be moved.",
    "Nobody knows who first thought of putting wheels on a suitcase.",
    "Wages have not kept up with rents, and many who work in the city can no longer live there.",
    "Between the wars the factory made bicycles; after them, sewing machines.",
    "The patient should rest, drink plenty, and come back if the fever has not gone by Friday.",
    "An odd number of voters avoids a tie, unless somebody stays at home.",
    "Along the coast the wind had bent every tree in the same direction.",
)


@dataclass(frozen=True)
class ProbeModel:
    """A validator's parts of the model: `local` holds embeddings and head, `text` the tokenizer, if it has one."""

    swarm_model: SwarmModel
    local: ClientModel
    text: Text | None

    def prompt(self, random: Random) -> list[int]:
        """Tokens of a question, with the model's chat template."""
        if self.text is None:
            return self._any_tokens(random, random.randint(5, 60))
        return self.text.tokenize(Dialogue().plus("user", question(random)).turns)

    def rows(self, random: Random, rows: int, tokens: int) -> torch.Tensor:
        """int64 [rows, tokens] of running text, cut at the same length."""
        return torch.tensor([self._row(random, tokens) for _ in range(rows)])

    def _row(self, random: Random, tokens: int) -> list[int]:
        row: list[int] = []
        while len(row) < tokens:
            if self.text is None:
                row += self._any_tokens(random, tokens)
            else:
                row += self.text.tokenize(Dialogue().plus("user", passage(random, 4)).turns)
        return row[:tokens]

    def _any_tokens(self, random: Random, count: int) -> list[int]:
        vocabulary = int(self.local.model.config.get_text_config().vocab_size)
        return [random.randrange(vocabulary) for _ in range(count)]


def question(random: Random) -> str:
    """What a user might ask; mostly short, sometimes with a pasted text."""
    things = random.sample(_THINGS, 2)
    passages = [passage(random, random.choice((1, 2, 2, 3, 6))) for _ in range(2)]
    return random.choice(_QUESTIONS).format(a=things[0], b=things[1], p=passages[0], q=passages[1])


def passage(random: Random, sentences: int) -> str:
    """Running text."""
    return " ".join(random.choice(_SENTENCES) for _ in range(sentences))


def draw_kept_tensors(
    kind: Kind, linears: Sequence[Mapping[str, tuple[int, int]]], hidden_size: int, random: Random, tokens: int
) -> dict[str, torch.Tensor]:
    """float32 tensors for all blocks of the model, under the names that kept tensors have on the wire.

    None for a training in which servers keep nothing, and of a model with unknown usual targets.

    Args:
        linears: per block, (values in, values out) of its linear layers, by their paths in it.
        hidden_size: values per token between blocks.
        tokens: of a row; a prefix may be as long.
    """
    generator = torch.Generator().manual_seed(random.getrandbits(31))
    learnt = random.choice(_LEARNT)
    if kind == "deep-prompt":
        shape = (len(linears), 1, min(random.choice(_PREFIXES), tokens), hidden_size)
        return {PROMPTS: learnt * _PROMPT_SIZE * torch.randn(shape, generator=generator)}
    if kind != "lora":
        return {}
    try:
        targets = usual_targets(linears[0])
    except BadInput:
        return {}
    rank = random.choice(_RANKS)
    kept: dict[str, torch.Tensor] = {}
    for block, layers in enumerate(linears):
        for path, (width, out) in layers.items():
            if is_target(path, targets):
                a, b = (str(LoraName(block, path, part)) for part in LORA_PARTS)
                # As peft begins: kaiming_uniform_ with a = sqrt(5) is uniform within 1/sqrt(width).
                kept[a] = (2 * torch.rand((rank, width), generator=generator) - 1) / math.sqrt(width)
                kept[b] = learnt * _LORA_SIZE * torch.randn((out, rank), generator=generator)
    return kept
