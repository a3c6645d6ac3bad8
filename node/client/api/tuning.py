"""What a client trains beside a model, as modules of plain PyTorch: soft prompts, deep prompts and LoRA."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ....protocols.training import LORA_PARTS, LoraName
from ...errors import BadInput
from ...models.adapter import Adapter
from .model import DistributedModel

IGNORED_LABEL = -100
"""The label of positions without a loss, in transformers."""


_USUAL_TARGETS = (("q_proj", "v_proj"), ("query_key_value",), ("qkv_proj",), ("c_attn",), ("Wqkv",))


class PromptTuning(nn.Module):
    """Learns virtual tokens before every row (soft prompts, Lester et al. 2021). With `deep` also tensors that are
    added to the input of every block at their positions (deep prompts: P-tuning v2, Liu et al. 2021; "prefix tuning" in
    Petals, NeurIPS 2023, app. G).

        tuned = PromptTuning(model, num_virtual_tokens=16)
        optimiser = torch.optim.Adam(tuned.parameters(), lr=1e-2)
        tuned(input_ids, attention_mask=mask, labels=labels).loss.backward()

    `num_virtual_tokens`, `prompt_embeddings` have the names and shapes of peft's PROMPT_TUNING; peft's PREFIX_TUNING,
    which learns keys and values, is another method than `deep`.

    Args:
        model: any model of the Python API. It is not a submodule: to train its own weights too (the head of a
            classifier), give them to the optimiser beside `tuned.parameters()`.
        init: float [num_virtual_tokens, embedding size], the initial prompt; by default embeddings of random tokens.

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
            raise BadInput(f"{num_virtual_tokens} virtual tokens: give 1 or more")
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
        """The model's forward on the virtual tokens followed by `input_ids` [batch, tokens].

        Outputs per position have `num_virtual_tokens` more of them. `labels` are for `input_ids`: token ids of the
        same shape, or classes.
        """
        model = self._model[0]
        ids, mask = self._prefixed(input_ids, attention_mask)
        if labels is not None and labels.shape == input_ids.shape and model.labels_are_tokens:
            ignored = labels.new_full((labels.shape[0], self.num_virtual_tokens), IGNORED_LABEL)
            labels = torch.cat([ignored, labels], dim=1)
        with model.prompted(self.prompt_embeddings, self.deep_prompts):
            return model(ids, attention_mask=mask, labels=labels, **kwargs)

    @torch.no_grad()
    def generate(self, input_ids: torch.Tensor, *, attention_mask: torch.Tensor | None = None, **kwargs: Any) -> Any:
        """The model's generate after the virtual tokens, which are not counted; returns the sequences without them."""
        model, count = self._model[0], self.num_virtual_tokens
        configs = kwargs.get("generation_config"), model.transformers_model.generation_config
        for name in ("max_length", "min_length"):
            said = (kwargs.get(name), *(getattr(config, name, None) for config in configs))
            if length := next((length for length in said if length is not None), None):
                kwargs[name] = length + count
        ids, mask = self._prefixed(input_ids, attention_mask)
        starts = None
        if kwargs.get("use_cache") is not False:
            # A session supports padding at the left only, so the virtual tokens come after the padding.
            seen = torch.ones_like(input_ids) if attention_mask is None else attention_mask
            starts = seen.argmax(dim=1).cpu()
            mask = torch.cat([seen.new_zeros((len(seen), count)), seen], dim=1)
            mask = mask.scatter(1, (starts.unsqueeze(1) + torch.arange(count)).to(mask.device), 1)
        if mask is not None:
            ids[:, :count] = ids[:, count : count + 1]  # logits processors see these: one that they see anyway
        with model.prompted(self.prompt_embeddings, self.deep_prompts, starts=starts):
            found: Any = model.generate(ids, attention_mask=mask, **kwargs)
        sequences: torch.Tensor = found if isinstance(found, torch.Tensor) else found.sequences
        given = input_ids.repeat_interleave(len(sequences) // len(input_ids), dim=0)
        sequences = torch.cat([given, sequences[:, ids.shape[1] :]], dim=1)
        if isinstance(found, torch.Tensor):
            return sequences
        found.sequences = sequences
        return found

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

    Servers get the current weights with each batch, as inputs, and do not keep them. So any number of clients can train
    on the same servers. Arguments, `peft_state_dict` and the initialisation (A random, B zero) are those of peft's
    LoraConfig. There is no dropout, because servers compute their forward pass twice.

    Args:
        model: any model of the Python API. It is not a submodule.
        r: rank.
        lora_alpha: the change is scaled by lora_alpha / r.
        target_modules: names, or ends of names, of linear layers of a block; None is the usual attention layers of
            the architecture.
        layers_to_transform: numbers of the blocks to change; None is all.

    Raises:
        BadInput: there are no such layers or blocks.
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
            raise BadInput(f"a rank of {r} is too low: give r of 1 or more")
        self.r = r
        self.lora_alpha = lora_alpha
        numbers = list(range(model.num_blocks)) if layers_to_transform is None else sorted(set(layers_to_transform))
        if not numbers or not 0 <= min(numbers) <= max(numbers) < model.num_blocks:
            raise BadInput(f"layers_to_transform takes numbers of 0 .. {model.num_blocks - 1}, not {numbers}")
        self.block_numbers = numbers
        self.target_modules = chosen_targets([model.linears[number] for number in numbers], target_modules)
        self.weights = nn.ParameterDict()
        device = model.transformers_model.device
        for number in numbers:
            for path, (width, out) in model.linears[number].items():
                if is_target(path, self.target_modules):
                    a, b = (str(LoraName(number, path, part)).replace(".", "/") for part in LORA_PARTS)
                    self.weights[a] = nn.Parameter(torch.empty(r, width, device=device))
                    nn.init.kaiming_uniform_(self.weights[a], a=math.sqrt(5))
                    self.weights[b] = nn.Parameter(torch.zeros(out, r, device=device))
        self._model = [model]  # in a list, so that it is no submodule

    @property
    def scaling(self) -> float:
        return self.lora_alpha / self.r

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward with these LoRA weights."""
        with self.applied():
            return self._model[0](*args, **kwargs)

    @torch.no_grad()
    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """The model's generate with these LoRA weights, which are uploaded to the servers of a new session."""
        with self.applied():
            return self._model[0].generate(*args, **kwargs)

    def applied(self) -> AbstractContextManager[None]:
        """A context in which these LoRA weights apply to calls of the model and its `PromptTuning` in this thread."""
        return self._model[0].changed(self._named())

    def _named(self) -> dict[LoraName, torch.Tensor]:
        named: dict[LoraName, torch.Tensor] = {}
        for key, weight in self.weights.items():
            name = _name(key)
            named[name] = weight * self.scaling if name.part == LORA_PARTS[1] else weight
        return named

    def peft_state_dict(self) -> Mapping[str, torch.Tensor]:
        """The weights by the names that peft gives them in adapter_model.safetensors."""
        return {self._peft_name(key): weight.detach() for key, weight in self.weights.items()}

    @torch.no_grad()
    def load(self, tensors: Mapping[LoraName, torch.Tensor]) -> None:
        """Copies these weights, without the scaling, into this module.

        Raises:
            BadInput: the names or shapes are not those of this module.
        """
        own = {_name(key): weight for key, weight in self.weights.items()}
        if strange := own.keys() ^ tensors.keys():
            raise BadInput(f"the weights {min(map(str, strange))} are missing or unexpected")
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
    """Whether `path`, or its end, is one of these names of layers."""
    return any(path == target or path.endswith(f".{target}") for target in targets)


def chosen_targets(linears: Sequence[Mapping[str, Any]], targets: Collection[str] | None) -> tuple[str, ...]:
    """The names of the layers that LoRA changes: `targets`, or the usual ones. `linears`: of some blocks, by path.

    Raises:
        BadInput: one of them is the name of no layer, or none is given and the architecture is not known.
    """
    if not targets:
        return usual_targets(linears[0])
    paths = dict.fromkeys(path for block in linears for path in block)
    unknown = [target for target in targets if not any(is_target(path, (target,)) for path in paths)]
    if unknown:
        raise BadInput(f"no linear layer of a block is called {', '.join(unknown)}; there are {', '.join(paths)}")
    return tuple(targets)


def usual_targets(linears: Mapping[str, Any]) -> tuple[str, ...]:
    """The names of the layers that LoRA usually changes, given the linear layers of a block by path.

    Raises:
        BadInput: the architecture is not known.
    """
    for names in _USUAL_TARGETS:
        if all(any(is_target(path, (name,)) for path in linears) for name in names):
            return names
    raise BadInput(
        f"the usual layers of this architecture are not known: give target_modules out of {', '.join(linears)}"
    )
