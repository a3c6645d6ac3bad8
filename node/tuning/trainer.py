"""The loop of a training: batches through the swarm, steps of the optimiser, evaluations, and its state in a file.

Fine-tuning as in Petals (NeurIPS 2023, section 3.4): all that is learned, and the optimiser, stay with the client. The
state is one safetensors file, which is replaced atomically.
"""

from __future__ import annotations

import json
import math
import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from ..errors import BadInput, NoChainError
from ..models.cache_dir import disk_errors
from .adapter_files import CHECKPOINT, WRITE_ADVICE, write_files
from .curve import LossCurve
from .recipe import (
    EarlyStop,
    Evaluated,
    Event,
    Recipe,
    StepDone,
    StoppedEarly,
    WaitingForServers,
    learning_rate,
    rows_of_step,
)
from .rows import TokenRow, TrainingBatch, batch_of
from .tuned import Tuned

T = TypeVar("T")

_RETRY_SECONDS: Final = 2.0

FORMAT: Final = 1
_FIELD: Final = "petalnode"


@dataclass(frozen=True)
class TrainingCheckpoint:
    """
    Attributes:
        recipe: what has to be the same for the training to be resumed.
        step: steps done.
        evaluated: the steps that were done at the last evaluation.
        early_stop: state of early stopping.
        loss: of the last step.
        weights: the trained weights.
        optimiser: its state, "weight/entry" -> tensor.
        best: the weights of the best evaluation; empty without one.
        curve: the losses so far.
    """

    recipe: Mapping[str, Any]
    step: int
    evaluated: int
    early_stop: EarlyStop
    loss: float
    weights: Mapping[str, torch.Tensor]
    optimiser: Mapping[str, torch.Tensor]
    best: Mapping[str, torch.Tensor]
    curve: LossCurve = field(default_factory=LossCurve)


def save_checkpoint(folder: Path, checkpoint: TrainingCheckpoint) -> Path:
    """Writes it into `folder`, over an earlier one.

    Raises:
        MachineError: the disk is full or cannot be written.
    """
    about = {
        "format": FORMAT,
        "recipe": checkpoint.recipe,
        "step": checkpoint.step,
        "evaluated": checkpoint.evaluated,
        "early_stop": asdict(checkpoint.early_stop),
        "loss": checkpoint.loss,
        "curve": asdict(checkpoint.curve),
    }
    tensors = {
        f"{kind}/{name}": tensor.contiguous()
        for kind, held in (
            ("weights", checkpoint.weights),
            ("optimiser", checkpoint.optimiser),
            ("best", checkpoint.best),
        )
        for name, tensor in held.items()
    }
    target = folder / CHECKPOINT
    with disk_errors(folder, "Saving a checkpoint", WRITE_ADVICE):
        write_files(folder, {CHECKPOINT: save(tensors, metadata={_FIELD: json.dumps(about)})})
    return target


def load_checkpoint(folder: Path) -> TrainingCheckpoint:
    """
    Raises:
        BadInput: there is none, or it is damaged.
    """
    file = folder / CHECKPOINT
    if not file.is_file():
        raise BadInput(f"there is no {file} to go on from: start without --resume")
    held: dict[str, dict[str, torch.Tensor]] = {"weights": {}, "optimiser": {}, "best": {}}
    try:
        with safe_open(file, framework="pt") as opened:
            about = json.loads((opened.metadata() or {})[_FIELD])
            if about["format"] != FORMAT:
                raise BadInput(f"{file} was written by another version of petalnode: go on with that one")
            for key in opened.keys():  # noqa: SIM118  (it is no dictionary)
                kind, _, name = key.partition("/")
                held[kind][name] = opened.get_tensor(key)
        return TrainingCheckpoint(
            recipe=dict(about["recipe"]),
            step=int(about["step"]),
            evaluated=int(about["evaluated"]),
            early_stop=EarlyStop(**about["early_stop"]),
            loss=float(about["loss"]),
            curve=LossCurve(**about.get("curve", {})),
            **held,
        )
    except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, BadInput):
            raise
        raise BadInput(f"{file} is damaged ({error}): remove it and start without --resume") from None


def differences(recipe: Mapping[str, Any], checkpoint: Mapping[str, Any]) -> list[str]:
    """The fields that differ, as "name: was X, is Y"."""
    return [
        f"{name}: was {json.dumps(checkpoint.get(name))}, is {json.dumps(recipe.get(name))}"
        for name in sorted({*recipe, *checkpoint})
        if recipe.get(name) != checkpoint.get(name)
    ]


class Training:
    """One training and its state. Whatever interrupts `run`, the state is that after a whole step.

    Args:
        about: names the model and the data; a checkpoint is resumed only with the same `about` and recipe.
        padding: a token id.
    """

    def __init__(
        self,
        tuned: Tuned,
        recipe: Recipe,
        train: Sequence[TokenRow],
        held_out: Sequence[TokenRow] = (),
        *,
        about: Mapping[str, Any],
        padding: int = 0,
    ) -> None:
        self.tuned = tuned
        self.recipe = recipe
        self.step = 0
        self.loss = math.nan
        self.early_stop = EarlyStop(recipe.patience)
        self.curve = LossCurve()
        self._fixed = {**about, **recipe.fixed()}
        self._train = train
        self._held_out = held_out
        self._padding = padding
        self._evaluated = -1
        self._best: dict[str, torch.Tensor] = {}
        self._weights = tuned.weights
        self._optimiser = torch.optim.AdamW(
            self._weights.values(), lr=recipe.peak, weight_decay=recipe.weight_decay, foreach=False
        )

    def run(self) -> Iterator[Event]:
        """Trains until all steps are done or the loss gets no better, and yields what happens.

        May be abandoned at any time, by Ctrl-C too, and resumed by calling it again.

        Raises:
            BadInput: the loss is not finite any more.
            SwarmError: the swarm fails, except that missing servers are waited for.
        """
        recipe = self.recipe
        while True:
            if (
                self._held_out
                and self._evaluated < self.step
                and (self.step % recipe.evaluate_every == 0 or self.step == recipe.steps)
            ):
                yield from self._evaluate()
            if self.early_stop.is_over:
                yield StoppedEarly(self.step, self.early_stop.worse)
                return
            if self.step >= recipe.steps:
                return
            yield from self._one_step()

    def _one_step(self) -> Iterator[Event]:
        recipe = self.recipe
        numbers = rows_of_step(self.step, len(self._train), recipe.batch_size, recipe.seed)
        batch = batch_of([self._train[number] for number in numbers], self._padding)
        begun = time.perf_counter()

        loss = yield from _patiently(partial(self._forward_and_back, batch))
        rate = learning_rate(self.step, recipe.steps, peak=recipe.peak, warmup=recipe.warmup, shape=recipe.shape)
        length = float(torch.nn.utils.clip_grad_norm_(self._weights.values(), recipe.clip))
        if not math.isfinite(loss) or not math.isfinite(length):
            raise BadInput(
                f"the loss or its gradient is not finite at step {self.step + 1}: lower --learning-rate and start again"
            )
        with uninterrupted():
            for group in self._optimiser.param_groups:
                group["lr"] = rate
            self._optimiser.step()
            self.step += 1
            self.loss = loss
            self.curve.note(self.step, loss)
        speed = batch.tokens / (time.perf_counter() - begun)
        yield StepDone(self.step, recipe.steps, loss, rate, speed)

    def _forward_and_back(self, batch: TrainingBatch) -> float:
        self._optimiser.zero_grad()
        mean, _ = self.tuned.loss(batch)
        mean.backward()  # type: ignore[no-untyped-call]
        return float(mean.detach())

    def _evaluate(self) -> Iterator[Event]:
        total, count, right = 0.0, 0, 0
        size = self.recipe.batch_size
        for start in range(0, len(self._held_out), size):
            batch = batch_of(self._held_out[start : start + size], self._padding)
            mean, logits = yield from _patiently(partial(self._loss, batch))
            counted = batch.counted(self.tuned.prefix)
            total += float(mean) * counted
            count += counted
            if batch.labels.dim() == 1:
                right += int((logits.argmax(-1).cpu() == batch.labels).sum())
        loss = total / count
        with uninterrupted():
            self.early_stop = self.early_stop.after(loss)
            self._evaluated = self.step
            self.curve.held_out.append((self.step, loss))
            if self.early_stop.improved:
                self._best = self.tuned.copy()
        accuracy = None if self.tuned.model.labels_are_tokens else right / count
        yield Evaluated(self.step, loss, accuracy, self.early_stop.improved)

    @torch.no_grad()
    def _loss(self, batch: TrainingBatch) -> tuple[torch.Tensor, torch.Tensor]:
        return self.tuned.loss(batch)

    def take_best(self) -> None:
        """Restores the weights of the best evaluation, if there was one."""
        if self._best:
            self.tuned.load(self._best)

    def checkpoint(self) -> TrainingCheckpoint:
        return TrainingCheckpoint(
            recipe=self._fixed,
            step=self.step,
            evaluated=self._evaluated,
            early_stop=self.early_stop,
            loss=self.loss,
            weights=self.tuned.copy(),
            optimiser={
                f"{name}/{entry}": value.detach().cpu()
                for name, weight in self._weights.items()
                for entry, value in self._optimiser.state[weight].items()
            },
            best=self._best,
            curve=self.curve,
        )

    def resume(self, checkpoint: TrainingCheckpoint) -> None:
        """Restores the state of `checkpoint`.

        Raises:
            BadInput: it is of another training.
        """
        changed = differences(self._fixed, checkpoint.recipe)
        if changed:
            raise BadInput(
                f"the checkpoint is of another training ({'; '.join(changed)}): give the options that it was started "
                "with, or another --out"
            )
        try:
            self.tuned.load(checkpoint.weights)
            for name, weight in self._weights.items():
                held = {
                    entry.removeprefix(f"{name}/"): value
                    for entry, value in checkpoint.optimiser.items()
                    if entry.rpartition("/")[0] == name
                }
                if held:
                    self._optimiser.state[weight] = {
                        entry: value if entry == "step" else value.to(weight.device) for entry, value in held.items()
                    }
        except (KeyError, RuntimeError) as error:
            raise BadInput(f"the checkpoint does not fit this model: {error}") from None
        self.step = checkpoint.step
        self.loss = checkpoint.loss
        self.early_stop = checkpoint.early_stop
        self._evaluated = checkpoint.evaluated
        self._best = dict(checkpoint.best)
        self.curve = checkpoint.curve


def _patiently(attempt: Callable[[], T]) -> Generator[Event, None, T]:
    """The result of `attempt`, which is retried while no chain covers the model."""
    while True:
        try:
            return attempt()
        except NoChainError as error:
            yield WaitingForServers(str(error))
            time.sleep(_RETRY_SECONDS)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Defers Ctrl-C to the end of the block."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in (signal.SIG_IGN, None):
        yield
        return
    came: list[Any] = []
    signal.signal(signal.SIGINT, lambda number, frame: came.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt
