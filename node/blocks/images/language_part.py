"""The causal language model of a configuration.

Of most, transformers has such a class, which is taken. Of some that also take pictures it has the decoder alone:
Qwen2-VL, Qwen3-VL and GLM-4V count positions along three axes. Text has the same number on each, and so needs nothing
else. Of Mamba the class has a name for the cache that no other one has, and only its decoder is taken.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.utils import GenerationMixin
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_MAPPING, AutoModelForCausalLM

from ..caches.own_states import MAMBAS, take_usual_arguments


class LanguagePart(PreTrainedModel, GenerationMixin):  # type: ignore[misc]  # transformers is untyped here
    """The decoder that transformers has for a configuration, with a head behind it."""

    base_model_prefix = "model"
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _supports_sdpa = True
    _supports_attention_backend = True

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        setattr(self, self.base_model_prefix, MODEL_MAPPING[type(config)](config))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """As that of any causal language model of transformers."""
        output = self.base_model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(output.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values)


class StatesPart(LanguagePart):
    """That of Mamba. transformers takes a class for one that names its cache otherwise, if it is called so."""

    base_model_prefix = "backbone"
    _supports_sdpa = False
    _tied_weights_keys: ClassVar = {"lm_head.weight": "backbone.embeddings.weight"}

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        take_usual_arguments(self.base_model)


class Uninitialised(TorchFunctionMode):
    """In this thread, `torch.nn.init` leaves tensors as they are: those without memory take no values."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        if getattr(func, "__module__", None) == torch.nn.init.__name__:
            return args[0] if args else given["tensor"]
        return func(*args, **given)


def causal_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """The causal language model of `config`; raises whatever transformers raises where it has none."""
    if config.model_type in MAMBAS:
        recurrent: PreTrainedModel = StatesPart._from_config(config, dtype=dtype)
        return recurrent
    of_pictures = type(config) in MODEL_MAPPING and getattr(config, "base_config_key", "") == "text_config"
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and of_pictures:
        model: PreTrainedModel = LanguagePart._from_config(config, dtype=dtype)
        return model
    causal: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    return causal
