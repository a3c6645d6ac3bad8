"""What a client trains beside a model, as modules of plain PyTorch: soft prompts, deep prompts and LoRA."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ....protocols.training import LORA_PARTS, LoraName
from ...errors import BadInput
from ...models.adapter import Adapter
from .model import DistributedModel

IGNORED_LABEL = -100
"""Of positions without a loss, in transformers."""


_USUAL_TARGETS = (("q_proj", "v_proj"), ("query_key_value",), ("qkv_proj",), ("c_attn",), ("Wqkv",))


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


def soft_prompt(model: DistributedModel, adapter: Adapter | None) -> PromptTuning | None:
    """The soft prompt of the adapter that `model` was opened with, without gradients; None if it has none."""
    if adapter is None or adapter.soft_prompt is None:
        return None
    return PromptTuning(model, len(adapter.soft_prompt), init=adapter.soft_prompt).requires_grad_(False)


class LoraTuning(nn.Module):
    """Learns low-rank changes to linear layers of the servers' blocks (LoRA, Hu et al. 2021).

        tuned = LoraTuning(model, r=8, target_modules=["q_proj", "v_proj"])
        optimiser = torch.optim.AdamW(tuned.parameters(), lr=1e-3)
        tuned(input_ids, attention_mask=mask, labels=labels).loss.backward()

    Servers get the present weights with each batch, treat them as inputs and keep nothing of them; so any number of
    people train on the same servers. Arguments and `peft_state_dict` have peft's names (LoraConfig), and the start is
    peft's: A random, B zero. There is no dropout, since the server's part is computed twice.

    Args:
        model: any model of the Python API. It is no submodule of this one.
        r: rank.
        lora_alpha: the change is scaled by lora_alpha / r.
        target_modules: names, or ends of names, of linear layers of a block; None is what is usual for the attention
            of the architecture.
        layers_to_transform: numbers of the blocks that are changed; None is all.

    Raises:
        BadInput: no such layers or blocks.
    """

    def __init__(
        self,
        model: DistributedModel,
        r: int = 8,
        *,
        lora_alpha: float = 16.0,
        target_modules: Collection[str] | None = None,
        layers_to_transform: Collection[int] | None = None,
    ) -> None:
        super().__init__()
        if r < 1:
            raise BadInput(f"a rank of {r} changes nothing: give r of 1 or more")
        self.r = r
        self.lora_alpha = lora_alpha
        numbers = list(range(model.num_blocks)) if layers_to_transform is None else sorted(set(layers_to_transform))
        if not numbers or not 0 <= min(numbers) <= max(numbers) < model.num_blocks:
            raise BadInput(f"layers_to_transform takes numbers of 0 .. {model.num_blocks - 1}, not {numbers}")
        self.block_numbers = numbers
        self.target_modules = tuple(target_modules or usual_targets(model.linears[numbers[0]]))
        self.weights = nn.ParameterDict()
        device = model.transformers_model.device
        for number in numbers:
            for path, (width, out) in model.linears[number].items():
                if is_target(path, self.target_modules):
                    a, b = (str(LoraName(number, path, part)).replace(".", "/") for part in LORA_PARTS)
                    self.weights[a] = nn.Parameter(torch.empty(r, width, device=device))
                    nn.init.kaiming_uniform_(self.weights[a], a=math.sqrt(5))
                    self.weights[b] = nn.Parameter(torch.zeros(out, r, device=device))
        if not self.weights:
            raise BadInput(
                f"no linear layer of a block is called {', '.join(self.target_modules)}; there are "
                f"{', '.join(model.linears[numbers[0]])}"
            )
        self._model = [model]  # in a list, so that it is no submodule

    @property
    def scaling(self) -> float:
        return self.lora_alpha / self.r

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own forward with its blocks changed; a `PromptTuning` of the model may be called within it."""
        with self.applied():
            return self._model[0](*args, **kwargs)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own generate with its blocks changed, in a session that the present weights are brought to."""
        with self.applied():
            return self._model[0].generate(*args, **kwargs)

    def applied(self) -> AbstractContextManager[None]:
        """A context in which all calls of the model, in this thread, have its blocks changed."""
        return self._model[0].changed(self._named())

    def _named(self) -> dict[LoraName, torch.Tensor]:
        named: dict[LoraName, torch.Tensor] = {}
        for key, weight in self.weights.items():
            name = _name(key)
            named[name] = weight * self.scaling if name.part == LORA_PARTS[1] else weight
        return named

    def peft_state_dict(self) -> Mapping[str, torch.Tensor]:
        """The weights under the names that peft saves them with in adapter_model.safetensors."""
        return {self._peft_name(key): weight.detach() for key, weight in self.weights.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[LoraName, torch.Tensor]) -> None:
        """Takes over these weights, the scaling apart.

        Raises:
            BadInput: there are others than these, or of other shapes.
        """
        own = {_name(key): weight for key, weight in self.weights.items()}
        if strange := own.keys() ^ tensors.keys():
            raise BadInput(f"the weights of {min(map(str, strange))} are missing, or are not wanted here")
        for name, weight in own.items():
            if tensors[name].shape != weight.shape:
                raise BadInput(f"{name} has shape {list(tensors[name].shape)}, not {list(weight.shape)}")
            weight.copy_(tensors[name])

    def _peft_name(self, key: str) -> str:
        name = _name(key)
        return f"base_model.model.{self._model[0].blocks_path}.{name.block}.{name.path}.{name.part}.weight"


def _name(key: str) -> LoraName:
    parsed = LoraName.parse(key.replace("/", "."))
    assert parsed is not None
    return parsed


def is_target(path: str, targets: Collection[str]) -> bool:
    """Whether the layer at `path` of a block is one of those that are called so, or end so."""
    return any(path == target or path.endswith(f".{target}") for target in targets)


def usual_targets(linears: Mapping[str, Any]) -> tuple[str, ...]:
    """The layers that are usually changed, of those that a block has, by their paths there.

    Raises:
        BadInput: the architecture is not known.
    """
    for names in _USUAL_TARGETS:
        if all(any(is_target(path, (name,)) for path in linears) for name in names):
            return names
    raise BadInput(f"which layers? Give target_modules out of {', '.join(linears)}")
