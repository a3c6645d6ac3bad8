"""A classifier of sequences whose blocks run in the swarm."""

from __future__ import annotations

import os
from copy import deepcopy
from typing import Unpack

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForSequenceClassification

from ...blocks.client_part import ClientModel
from ...blocks.skeleton import BUILDING
from ...errors import BadInput, ModelError, reason_of
from ...models.adapter import Adapter
from .model import DistributedModel
from .opening import ModelOptions, OpenedModel, open_model, takes_model_options
from .tuning import soft_prompt


class AutoDistributedModelForSequenceClassification:
    """Opens models of a swarm with a head that tells `num_labels` classes; see `from_pretrained`."""

    @classmethod
    @takes_model_options
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        num_labels: int | None = None,
        problem_type: str | None = None,
        **options: Unpack[ModelOptions],
    ) -> DistributedModelForSequenceClassification:
        """Loads the local part of `model`, adds a new head, and finds the servers that hold its blocks.

        Args:
            model: a folder in Hugging Face layout, a .gguf file, a hub id or an alias such as "smollm2".
            num_labels: classes; 1 is regression. None is the number of classes of the adapter's head, else 2.
            problem_type: as in transformers: "regression", "single_label_classification" (the usual),
                "multi_label_classification"; None derives it from the labels.

        Raises:
            ModelError: the model cannot be found or used, or transformers has no classifier of this architecture.
            BadInput: an argument that makes no sense, such as a peer address with a typo.
            MachineError: another process uses the identity.
            SwarmError: no peer answers.
        """
        opened = open_model(model, options, head=True)
        try:
            classifier = DistributedModelForSequenceClassification(
                opened, num_labels or _labels(opened.adapter), problem_type
            )
            if opened.adapter is not None:
                _put_head(classifier.transformers_model, opened.adapter)
            return classifier
        except BaseException:
            opened.runtime.close()
            raise


def _labels(adapter: Adapter | None) -> int:
    """The number of classes of the adapter's head; 2 if it has none."""
    heads = [] if adapter is None else [weight.shape[0] for weight in adapter.local.values()]
    return heads[0] if heads else 2


@torch.no_grad()
def _put_head(classifier: nn.Module, adapter: Adapter) -> None:
    """Copies the head of the adapter, if it has one, into the classifier.

    Raises:
        BadInput: the adapter's head is that of another classifier.
    """
    parameters = dict(classifier.named_parameters())
    for name, tensor in adapter.local.items():
        if name not in parameters or parameters[name].shape != tensor.shape:
            has = list(parameters[name].shape) if name in parameters else "nothing"
            raise BadInput(
                f"the adapter {adapter.name} has {list(tensor.shape)} for {name}, where this model has {has}"
            )
        parameters[name].copy_(tensor)


class DistributedModelForSequenceClassification(DistributedModel):
    """transformers' ...ForSequenceClassification with its blocks in the swarm; see `DistributedModel`.

    Its head is new, belongs to the client and has `requires_grad` from the start: give an optimiser the `parameters()`
    that have it. The logits [batch, num_labels] are those of each row's last token that is not padding. So batches need
    a `pad_token_id` in `config`.
    """

    def __init__(self, opened: OpenedModel, num_labels: int, problem_type: str | None) -> None:
        super().__init__(opened, sequence_classifier(opened.local, num_labels, problem_type))
        self.soft_prompt = soft_prompt(self, opened.adapter)


def sequence_classifier(client: ClientModel, num_labels: int, problem_type: str | None = None) -> PreTrainedModel:
    """transformers' own ...ForSequenceClassification with `client`'s embeddings, norm and remote blocks inside.

    What is new, the head, is initialised by transformers' rules and is all that has gradients.

    Raises:
        BadInput, ModelError: fewer than one label; transformers has no such model of this architecture.
    """
    if num_labels < 1:
        raise BadInput(f"{num_labels} labels are none: give num_labels of 1 (regression) or more")
    config = deepcopy(client.model.config)
    config.num_labels = num_labels
    config.problem_type = problem_type
    try:
        with BUILDING, torch.device("meta"):
            model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=client.dtype)
    except Exception as error:
        raise ModelError(
            f"transformers cannot build a classifier of type {config.model_type!r}: {reason_of(error)}. "
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
