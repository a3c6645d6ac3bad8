"""The trained weights: soft prompts, deep prompts or LoRA on a model of the swarm, and the head of a classifier."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..client.api.model import DistributedModel
from ..client.api.tuning import LoraTuning, PromptTuning
from .recipe import MethodOptions
from .rows import TrainingBatch


class Tuned:
    """The trained weights, by names, and the loss of a batch.

    Attributes:
        module: a PromptTuning or LoraTuning of `model`.
        prefix: virtual tokens before every row.
    """

    def __init__(self, model: DistributedModel, module: PromptTuning | LoraTuning) -> None:
        self.model = model
        self.module = module
        self.prefix = module.num_virtual_tokens if isinstance(module, PromptTuning) else 0

    @classmethod
    def of(cls, model: DistributedModel, options: MethodOptions, seed: int) -> Tuned:
        """The initial weights, determined by the seed.

        Raises:
            BadInput: the options do not fit the model.
        """
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for weight in head_of(model).values():
                # As transformers makes a new head, but by this seed.
                nn.init.normal_(weight, std=0.02) if weight.dim() > 1 else nn.init.zeros_(weight)
            if options.method == "lora":
                return cls(
                    model,
                    LoraTuning(
                        model, options.rank, lora_alpha=options.alpha, target_modules=options.target_modules or None
                    ),
                )
            return cls(model, PromptTuning(model, options.virtual_tokens, deep=options.method == "deep-prompt"))

    @property
    def weights(self) -> dict[str, nn.Parameter]:
        """All trained weights; those of the head are called head.*."""
        named = {name: weight for name, weight in self.module.named_parameters() if weight.requires_grad}
        return named | {f"head.{name}": weight for name, weight in head_of(self.model).items()}

    def loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean loss, logits)

        Raises:
            BadInput: weights or activations are NaN or infinite.
            SwarmError: no chain covers the model, or the chain failed.
        """
        device = self.model.transformers_model.device
        output: Any = self.module(
            batch.ids.to(device), attention_mask=batch.mask.to(device), labels=batch.labels.to(device)
        )
        return output.loss, output.logits

    @torch.no_grad()
    def sample(self, given: Sequence[int], most: int, *, changed: bool) -> tuple[int, ...]:
        """At most `most` tokens that the model goes on with, always the likeliest; as it is served unless `changed`.

        Raises:
            SwarmError: as `loss`.
        """
        ids = torch.tensor([list(given)], device=self.model.transformers_model.device)
        generate = self.module.generate if changed else self.model.generate
        found = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=most, do_sample=False)
        return tuple(found[0, len(given) :].tolist())

    def copy(self) -> dict[str, torch.Tensor]:
        return {name: weight.detach().to("cpu", copy=True) for name, weight in self.weights.items()}

    @torch.no_grad()
    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Sets the weights to those of a copy.

        Raises:
            KeyError, RuntimeError: names or shapes differ.
        """
        for name, weight in self.weights.items():
            if weights[name].shape != weight.shape:
                raise RuntimeError(f"{name} has shape {list(weights[name].shape)}, not {list(weight.shape)}")
            weight.copy_(weights[name])


def head_of(model: DistributedModel) -> dict[str, nn.Parameter]:
    """The weights of a classifier's own head, by their names in the transformers model; none of a language model."""
    if model.labels_are_tokens:
        return {}
    base = f"{model.transformers_model.base_model_prefix}."
    return {name: weight for name, weight in model.transformers_model.named_parameters() if not name.startswith(base)}
