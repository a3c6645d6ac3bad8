"""The Python API: a classifier of sequences whose blocks run in the swarm."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import torch
from torch import nn

from ...blocks.classifier import sequence_classifier
from ...errors import BadInput
from ...models import Progress
from ...models.adapters.peft_adapter import Adapter
from ...models.progress import no_progress
from .connected import Opened, open_model
from .model import DistributedModel


class AutoDistributedModelForSequenceClassification:
    """Opens models of a swarm with a head that tells `num_labels` classes; see `from_pretrained`."""

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        num_labels: int | None = None,
        problem_type: str | None = None,
        initial_peers: Sequence[str] | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device | None = None,
        revision: str | None = None,
        swarm_key: str | os.PathLike[str] | None = None,
        identity: str | os.PathLike[str] | None = None,
        allowed_servers: Collection[str] | None = None,
        blocked_servers: Collection[str] | None = None,
        request_timeout: float | None = None,
        wait: bool = False,
        adapter: str | os.PathLike[str] | None = None,
        progress: Progress = no_progress,
    ) -> DistributedModelForSequenceClassification:
        """Loads the local part of `model`, puts a new head on it, and finds the servers that hold its blocks.

        Args:
            num_labels: classes; 1 is regression. None is what the adapter's head has, else 2.
            problem_type: as in transformers: "regression", "single_label_classification" (the usual),
                "multi_label_classification"; None goes by the labels.
            adapter: a folder with a LoRA adapter, with its head (modules_to_save) if it has one, or a prompt.

        The other arguments and what is raised are those of `AutoDistributedModelForCausalLM.from_pretrained`; and
        ModelError where transformers has no classifier of this architecture.
        """
        opened = open_model(
            model,
            initial_peers=initial_peers,
            dtype=dtype,
            device=device,
            revision=revision,
            swarm_key=swarm_key,
            identity=identity,
            allowed_servers=allowed_servers,
            blocked_servers=blocked_servers,
            adapter=adapter,
            head=True,
            progress=progress,
        )
        try:
            classifier = DistributedModelForSequenceClassification(
                opened, num_labels or _labels(opened.adapter), problem_type, wait=wait, request_timeout=request_timeout
            )
            if opened.adapter is not None:
                _put_head(classifier.transformers_model, opened.adapter)
            return classifier
        except BaseException:
            opened.runtime.close()
            raise


def _labels(adapter: Adapter | None) -> int:
    """Classes that the adapter's head tells, 2 if it has none."""
    heads = [] if adapter is None else [each.shape[0] for each in adapter.local.values()]
    return heads[0] if heads else 2


@torch.no_grad()
def _put_head(classifier: nn.Module, adapter: Adapter) -> None:
    """
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

    Its head is new, is trained by the client and has gradients from the start: `parameters()` with `requires_grad`
    are what an optimiser takes. The logits are those of each row's last token that is not padding, so batches need a
    `pad_token_id` in `config`.
    """

    def __init__(
        self,
        opened: Opened,
        num_labels: int,
        problem_type: str | None,
        *,
        wait: bool = False,
        request_timeout: float | None = None,
    ) -> None:
        classifier = sequence_classifier(opened.local, num_labels, problem_type)
        super().__init__(opened, classifier, wait=wait, request_timeout=request_timeout)
