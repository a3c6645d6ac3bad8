"""A model of transformers that classifies sequences, around a client's part of a language model."""

from __future__ import annotations

from copy import deepcopy

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification

from ..errors import BadInput, ModelError
from .client_part import ClientModel


def sequence_classifier(client: ClientModel, num_labels: int, problem_type: str | None = None) -> PreTrainedModel:
    """transformers' own ...ForSequenceClassification with `client`'s embeddings, norm and remote blocks inside.

    What is new, the head, is initialised by transformers' rules and is all that has gradients.

    Raises:
        BadInput: fewer than one label.
        ModelError: transformers has no such model of this architecture.
    """
    if num_labels < 1:
        raise BadInput(f"{num_labels} labels are none: give num_labels of 1 (regression) or more")
    config = deepcopy(client.model.config)
    config.num_labels = num_labels
    config.problem_type = problem_type
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=client.dtype)
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:300]
        raise ModelError(
            f"transformers cannot build a classifier of type {config.model_type!r}: {reason}. "
            "Put a head of your own behind model.remote_blocks"
        ) from error
    setattr(model, model.base_model_prefix, getattr(client.model, client.model.base_model_prefix))
    for module in model.modules():
        if any(weight.is_meta for weight in module.parameters(recurse=False)):
            module.to_empty(device=client.device, recurse=False)
            _initialise(model, module)
    return model.eval()


@torch.no_grad()
def _initialise(model: PreTrainedModel, module: nn.Module) -> None:
    for weight in module.parameters(recurse=False):
        weight.zero_()
    model._init_weights(module)
