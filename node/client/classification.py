"""The Python API: a classifier of sequences whose blocks run in the swarm."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence

import torch

from ..blocks.classifier import sequence_classifier
from ..models import Progress
from ..models.progress import no_progress
from .connected import Opened, open_model
from .model import DistributedModel


class AutoDistributedModelForSequenceClassification:
    """Opens models of a swarm with a head that tells `num_labels` classes; see `from_pretrained`."""

    @classmethod
    def from_pretrained(
        cls,
        model: str | os.PathLike[str],
        *,
        num_labels: int = 2,
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
        progress: Progress = no_progress,
    ) -> DistributedModelForSequenceClassification:
        """Loads the local part of `model`, puts a new head on it, and finds the servers that hold its blocks.

        Args:
            num_labels: classes; 1 is regression.
            problem_type: as in transformers: "regression", "single_label_classification" (the usual),
                "multi_label_classification"; None goes by the labels.

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
            progress=progress,
        )
        try:
            return DistributedModelForSequenceClassification(
                opened, num_labels, problem_type, wait=wait, request_timeout=request_timeout
            )
        except BaseException:
            opened.runtime.close()
            raise


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
