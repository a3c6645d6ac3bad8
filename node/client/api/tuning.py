"""What a client trains beside a model: soft prompts and deep prompts, as modules of plain PyTorch."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...errors import BadInput
from .model import DistributedModel

IGNORED_LABEL = -100
"""Of positions without a loss, in transformers."""


class PromptTuning(nn.Module):
    """Learns virtual tokens that stand before every row (Lester et al. 2021), and with `deep` something to add to their
    positions in every block as well (P-tuning v2, Liu et al. 2021; "prefix tuning" in Petals, NeurIPS 2023, app. G).

        tuned = PromptTuning(model, num_virtual_tokens=16)
        optimiser = torch.optim.Adam(tuned.parameters(), lr=1e-2)
        tuned(input_ids, attention_mask=mask, labels=labels).loss.backward()

    The names are peft's: `num_virtual_tokens`, and `prompt_embeddings`, which has the name and shape of the tensor that
    peft saves for PROMPT_TUNING. peft's own PREFIX_TUNING learns keys and values instead of `deep_prompts`, which is
    another method.

    Args:
        model: any model of the Python API. It is no submodule of this one: its own weights that shall be trained (the
            head of a classifier) go to the optimiser beside `tuned.parameters()`.
        init: [num_virtual_tokens, embedding size] to start from, such as the embeddings of a text; by default those of
            random tokens, which is where peft's RANDOM starts from in spirit and trains faster than noise.

    Attributes:
        prompt_embeddings: [num_virtual_tokens, embedding size], float32.
        deep_prompts: [blocks, num_virtual_tokens, hidden], float32, zero at first; None without `deep`.
    """

    deep_prompts: nn.Parameter | None

    def __init__(
        self, model: DistributedModel, num_virtual_tokens: int, *, deep: bool = False, init: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        if num_virtual_tokens < 1:
            raise BadInput(f"{num_virtual_tokens} virtual tokens teach nothing: ask for 1 or more")
        embeddings = model.transformers_model.get_input_embeddings()
        weight = embeddings.weight
        if init is None:
            with torch.no_grad():
                init = embeddings(torch.randint(0, weight.shape[0], (num_virtual_tokens,), device=weight.device))
        if tuple(init.shape) != (num_virtual_tokens, weight.shape[1]):
            raise BadInput(f"init has shape [{num_virtual_tokens}, {weight.shape[1]}], not {list(init.shape)}")
        self.num_virtual_tokens = num_virtual_tokens
        self.prompt_embeddings = nn.Parameter(init.detach().to(weight.device, torch.float32, copy=True))
        self.deep_prompts = None
        if deep:
            shape = (model.num_blocks, num_virtual_tokens, model.hidden_size)
            self.deep_prompts = nn.Parameter(torch.zeros(shape, device=weight.device))
        self._model = [model]  # in a list, so that it is no submodule

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """The model's own forward on the virtual tokens and `input_ids` [batch, tokens] behind them.

        What comes back has `num_virtual_tokens` more positions than went in, where it has positions. `labels` are
        those of `input_ids`: token ids of the same shape, or classes.
        """
        model = self._model[0]
        ids, mask = self._prefixed(input_ids, attention_mask)
        if labels is not None and labels.shape == input_ids.shape and model.labels_are_tokens:
            ignored = labels.new_full((labels.shape[0], self.num_virtual_tokens), IGNORED_LABEL)
            labels = torch.cat([ignored, labels], dim=1)
        with model.prompted(self.prompt_embeddings, self.deep_prompts):
            return model(ids, attention_mask=mask, labels=labels, **kwargs)

    @torch.no_grad()
    def generate(
        self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> torch.Tensor:
        """The model's own generate behind the virtual tokens; returns the sequences without them."""
        model = self._model[0]
        if kwargs.get("use_cache") is False:
            ids, mask = self._prefixed(input_ids, attention_mask)
            with model.prompted(self.prompt_embeddings, self.deep_prompts):
                sequences: torch.Tensor = model.generate(ids, attention_mask=mask, **kwargs)
            return sequences[:, self.num_virtual_tokens :]
        # A session knows padding at the left only, so the virtual tokens stand behind it.
        count = self.num_virtual_tokens
        seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        starts = seen.argmax(dim=1).cpu()
        ids, mask = self._prefixed(input_ids, seen)
        mask = torch.cat([seen.new_zeros((len(seen), count)), seen], dim=1)
        mask = mask.scatter(1, (starts.unsqueeze(1) + torch.arange(count)).to(mask.device), 1)
        with model.prompted(self.prompt_embeddings, self.deep_prompts, starts=starts):
            sequences = model.generate(ids, attention_mask=mask, **kwargs)
        given = input_ids.repeat_interleave(len(sequences) // len(input_ids), dim=0)
        return torch.cat([given, sequences[:, ids.shape[1] :]], dim=1)

    def _prefixed(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if input_ids.dim() != 2:
            raise BadInput(f"input_ids have shape [batch, tokens], not {list(input_ids.shape)}")
        rows = input_ids.shape[0]
        some = input_ids.new_full((rows, self.num_virtual_tokens), self._model[0].any_token)
        ids = torch.cat([some, input_ids], dim=1)
        if attention_mask is None:
            return ids, None
        seen = attention_mask.new_ones((rows, self.num_virtual_tokens))
        return ids, torch.cat([seen, attention_mask], dim=1)
