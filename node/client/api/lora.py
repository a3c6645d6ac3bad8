"""LoRA inside the blocks that servers hold: the client has the weights, the servers use them and return gradients."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from ....protocols.training import LORA_PARTS, LoraName
from ...errors import BadInput
from .model import DistributedModel

_USUAL_TARGETS = (("q_proj", "v_proj"), ("query_key_value",), ("qkv_proj",), ("c_attn",), ("Wqkv",))


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

    def applied(self) -> Any:
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
