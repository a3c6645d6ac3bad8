"""`petalnode tune`: fine-tunes a model over the swarm that serves it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...client.core import ClientOptions, SwarmClient, open_client
from ...client.swarm_model import identify_model
from ...errors import BadInput, ExitCode, PetalnodeError
from ...models import ModelFolder
from ...models.adapter_note import AdapterNote, Method
from ...models.cache_dir import check_writable, require_space
from ...tuning.adapter_files import CHECKPOINT, WRITE_ADVICE, ResultFolder, other_folders, write_files
from ...tuning.dataset import Dataset, Example
from ...tuning.recipe import (
    EarlyStop,
    Evaluated,
    Event,
    MethodOptions,
    Recipe,
    StepDone,
    StoppedEarly,
    WaitingForServers,
    steps_of_epoch,
)
from ...tuning.rows import TokenRow, beginning_of, rows_of
from ..join import JoinOptions, joined, joins_swarm
from ..model_choice import (
    SwarmModelArgument,
    check_device,
    check_model,
    check_seed,
    local_folder,
    model_folder,
    served_model,
)
from ..output import Output, ProgressBars
from ..process import OutputClosed, start
from ..tune_options import DEFAULT_EPOCHS, TuneOptions

if TYPE_CHECKING:
    from ...blocks.client_part import ClientModel
    from ...client.api.model import DistributedModel
    from ...tuning.trainer import Training

LEARNING_RATES: dict[Method, float] = {"prompt": 1e-2, "deep-prompt": 1e-2, "lora": 1e-3}


@dataclass(frozen=True)
class TuneDefaults:
    """How training is shown and kept."""

    warmup_share: float = 0.05
    kept_copies: int = 5
    """Of the weights on the disk: those of the adapter, and a checkpoint with two moments and the best evaluation's."""
    weight_bytes: int = 4
    large: int = 1 << 20
    """Characters of data from which on it is said that tokens are made of them."""
    shown: int = 300
    """Characters of what a sample goes on from."""
    reported_steps: int = 20
    """How many steps are printed where there is no terminal to draw a progress bar on."""


TUNE: Final = TuneDefaults()
LOSSES: Final = "loss.svg"
"""The picture of the losses, beside the adapter."""


@joins_swarm
def tune(model: SwarmModelArgument = None, *, options: TuneOptions, join: JoinOptions) -> None:
    """Fine-tune a model over the swarm that serves it."""
    join.check()
    options.trusted_servers()  # before anybody is asked
    check_seed(options.seed)
    check_device(options.device)
    check_model(model)
    _ = options.targets
    dataset, train, held_out = options.read_examples()
    out = options.out or Path(f"{Path(dataset.name).stem}-{options.method}")
    options.check_target(out)
    output = Output(join.json)
    folder = ResultFolder(out, other_folders(out), output.warn)
    _TuneRun(options, folder, dataset, train, held_out, output).run(model, join)


class _TuneReport:
    """Prints the events of a training: a progress bar on a terminal, else lines, or JSON. A context manager."""

    def __init__(self, output: Output, steps: int) -> None:
        self._output = output
        self._every = max(1, steps // TUNE.reported_steps)
        self._bar = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=output.console,
            disable=not output.console.is_terminal,
        )
        self._task = self._bar.add_task("steps", total=steps, figures="")
        self._waiting = False

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def on_event(self, event: Event) -> None:
        if not isinstance(event, WaitingForServers):
            self._waiting = False
        match event:
            case StepDone():
                self._step(event)
            case Evaluated():
                figures = {} if event.accuracy is None else {"accuracy": round(event.accuracy, 6)}
                self._output.emit(event="evaluation", step=event.step, loss=event.loss, best=event.improved, **figures)
                accuracy = "" if event.accuracy is None else f", {event.accuracy:.1%} right"
                best = " (the best)" if event.improved else ""
                self._output.say(f"step {event.step}: loss {event.loss:.4f} on held-out data{accuracy}{best}")
            case StoppedEarly():
                self._output.emit(event="stopped-early", step=event.step)
                self._output.say(f"stopping early: {event.evaluations} evaluations were no better than the best")
            case WaitingForServers():
                if not self._waiting:  # once for each time that servers are missing
                    self._output.emit(event="waiting", reason=event.reason)
                    self._output.say(f"waiting for servers: {event.reason}")
                self._waiting = True

    def _step(self, event: StepDone) -> None:
        self._output.emit(
            event="step",
            step=event.step,
            steps=event.steps,
            loss=event.loss,
            learning_rate=event.learning_rate,
            tokens_per_second=round(event.tokens_per_second, 1),
        )
        figures = f"loss {event.loss:.4f}, {event.tokens_per_second:.0f} tokens/s"
        self._bar.update(self._task, completed=event.step, figures=figures)
        if self._bar.disable and (event.step % self._every == 0 or event.step in (1, event.steps)):
            self._output.say(f"step {event.step} of {event.steps}: {figures}")


@dataclass(frozen=True)
class _Material:
    """What a training needs of this machine: the client's part of the model in `folder`, and the data as tokens."""

    folder: Path
    client: ClientModel
    tokenizer: Any
    chat: bool
    train: list[TokenRow]
    held_out: list[TokenRow]


@dataclass
class _TuneRun:
    """One training from the command line."""

    options: TuneOptions
    folder: ResultFolder
    dataset: Dataset
    train: tuple[Example, ...]
    held_out: tuple[Example, ...]
    output: Output
    model_name: str = ""

    def run(self, name: str | None, join: JoinOptions) -> None:
        with ExitStack() as stack:
            folder = local_folder(name)
            # What is wrong with options or data is told before anybody is asked.
            material = None if folder is None else self._load(folder)
            model, material = self._open(name, join, stack, material)
            training = self._training(model, material)
            if not training.step:
                self._sample(training, material, changed=False)
            try:
                with _TuneReport(self.output, training.recipe.steps) as report:
                    self._loop(training, report)
            except (KeyboardInterrupt, PetalnodeError, OutputClosed, MemoryError) as error:
                self._keep(training, interrupted=isinstance(error, KeyboardInterrupt))
                raise
            self._save(training, material)

    def _sample(self, training: Training, material: _Material, *, changed: bool) -> None:
        """Shows what the model says to the first question that is held out, or learned. Where the swarm fails, nothing:
        the training says what it waits for."""
        if self.dataset.labels or not self.options.sample_tokens:
            return
        given = beginning_of(material.held_out or material.train)
        try:
            found = training.tuned.sample(given, self.options.sample_tokens, changed=changed)
        except PetalnodeError as error:
            self.output.warn(f"no sample: {error}")
            return
        when = "after" if changed else "before"
        prompt, text = (
            material.tokenizer.decode(tokens, skip_special_tokens=True).strip() for tokens in (given, found)
        )
        self.output.emit(event="sample", when=when, prompt=prompt, text=text)
        if not changed:
            lines = " / ".join(line for line in prompt.splitlines() if line.strip())
            self.output.say(f"a sample goes on from: {lines[-TUNE.shown :]}")
        self.output.say(f"{when}: {' '.join(text.split())}")

    def _load(self, folder: ModelFolder) -> _Material:
        """
        Raises:
            ModelError, BadInput: the model cannot be used, or options or data do not fit it.
        """
        start.stage(f"loading embeddings and head of {folder.name}")
        from ...blocks.client_part import load_client
        from ...client.api.tuning import chosen_targets
        from ...client.chat import load_tokenizer

        options = self.options
        client = load_client(folder.path, device=options.device)
        if options.method == "lora":
            chosen_targets(client.linears, options.targets)
        tokenizer = load_tokenizer(folder)
        chat = bool(tokenizer.chat_template) if options.chat_template is None else options.chat_template
        if chat and not tokenizer.chat_template:
            raise BadInput(f"{folder.name} has no chat template: leave --chat-template out")
        if not chat and any(example.messages for example in self.train):
            raise BadInput(
                f'{folder.name} has no chat template, by which "messages" are learned: use "prompt", "completion"'
            )
        total = sum(example.characters for example in (*self.train, *self.held_out))
        done = 0

        def progress(characters: int) -> None:
            nonlocal done
            done += characters
            if total > TUNE.large:
                bars(f"making tokens of {self.dataset.name}", done, total)

        limits: dict[str, Any] = {"max_length": options.max_length, "chat": chat, "labels": self.dataset.labels}
        with ProgressBars(self.output.errors) as bars:
            train = rows_of(self.train, tokenizer, **limits, progress=progress)
            held_out = rows_of(self.held_out, tokenizer, **limits, progress=progress)
        if not train:
            raise BadInput(f"nothing to learn is left within {options.max_length} tokens: raise --max-length")
        if self.held_out and not held_out:
            raise BadInput(f"nothing to evaluate on is left within {options.max_length} tokens: raise --max-length")
        return _Material(folder.path, client, tokenizer, chat, train, held_out)

    @asynccontextmanager
    async def _client(self, name: str | None, join: JoinOptions) -> AsyncIterator[SwarmClient]:
        start.stage("joining the swarm")
        async with joined(join, self.output, role="tune", listens=False) as (swarm, _):
            start.stage("looking for the model")
            folder = await model_folder(
                name or await served_model(swarm, self.output), self.output, need="client", swarm=swarm
            )
            with ProgressBars(self.output.errors) as bars:
                identified = await identify_model(swarm, folder, bars)
            async with open_client(swarm, identified, ClientOptions(trusted=self.options.trusted_servers())) as client:
                yield client

    def _open(
        self, name: str | None, join: JoinOptions, stack: ExitStack, material: _Material | None
    ) -> tuple[DistributedModel, _Material]:
        """The model on the swarm, with the head of a classifier if the data has labels; and its `material`."""
        from ...client.api.causal_lm import DistributedModelForCausalLM
        from ...client.api.classification import DistributedModelForSequenceClassification
        from ...client.api.opening import OpenedModel
        from ...client.api.runtime import TrioThread

        runtime = TrioThread(self._client(name, join))
        stack.callback(runtime.close)
        folder = runtime.value.model.folder
        if material is None or material.folder != folder.path:  # the hub may have a newer revision than this machine
            material = self._load(folder)
        opened = OpenedModel(material.client, runtime, folder.path, batch_codec=self.options.codec)
        labels = self.dataset.labels
        model: DistributedModel
        if labels:
            model = DistributedModelForSequenceClassification(opened, len(labels), None)
            if model.config.pad_token_id is None:
                model.config.pad_token_id = _padding(material.tokenizer)
        else:
            model = DistributedModelForCausalLM(opened)
        self.model_name = folder.name
        return model, material

    def _training(self, model: DistributedModel, material: _Material) -> Training:
        from ...tuning.trainer import Training, load_checkpoint
        from ...tuning.tuned import Tuned

        options = self.options
        train, held_out = material.train, material.held_out
        epoch = steps_of_epoch(len(train), options.batch_size)
        steps = options.steps or (options.epochs or DEFAULT_EPOCHS) * epoch
        recipe = Recipe(
            steps=steps,
            batch_size=options.batch_size,
            peak=LEARNING_RATES[options.method] if options.learning_rate is None else options.learning_rate,
            warmup=round(TUNE.warmup_share * steps) if options.warmup is None else options.warmup,
            shape=options.schedule,
            evaluate_every=options.eval_every or epoch,
            checkpoint_every=options.checkpoint_every,
            patience=options.patience,
            seed=options.seed,
            method=MethodOptions(options.method, options.virtual_tokens, options.rank, options.alpha, options.targets),
        )
        tuned = Tuned.of(model, recipe.method, options.seed)
        about = {
            "data": self.dataset.hash,
            "model_version": model.version.hex(),
            "rows": len(train),
            "held_out": len(held_out),
            "max_length": options.max_length,
            "chat_template": material.chat,
        }
        training = Training(tuned, recipe, train, held_out, about=about, padding=_padding(material.tokenizer))
        if options.resume:
            training.resume(load_checkpoint(self.folder.wanted))
        weights = sum(weight.numel() for weight in tuned.weights.values())
        purpose = f"A training of {weights:,} weights"
        there = check_writable(self.folder.wanted, purpose, WRITE_ADVICE)
        require_space(there, TUNE.kept_copies * TUNE.weight_bytes * weights, purpose, WRITE_ADVICE)
        told = f"{options.method}: {weights:,} weights to train on {len(train):,} rows of {self.dataset.name}"
        told += f", {len(held_out):,} held out" if held_out else ""
        start.done()
        self.output.say(told + (f"; going on at step {training.step + 1}" if training.step else ""))
        return training

    def _loop(self, training: Training, report: _TuneReport) -> None:
        for event in training.run():
            report.on_event(event)
            if isinstance(event, StepDone) and event.step % training.recipe.checkpoint_every == 0:
                self._save_checkpoint(training)

    def _save_checkpoint(self, training: Training) -> Path:
        from ...tuning.trainer import save_checkpoint

        checkpoint = training.checkpoint()
        return self.folder.save(lambda folder: save_checkpoint(folder, checkpoint))

    def _keep(self, training: Training, *, interrupted: bool) -> None:
        """Saves a checkpoint and says how to go on."""
        if not training.step:
            return
        path = self._save_checkpoint(training)
        given = [argument for argument in sys.argv[1:] if argument not in ("--resume", "--overwrite")]
        if self.folder.path != self.folder.wanted:
            given += ["--out", str(self.folder.path)]  # the last one counts
        self.output.say(f"{'Interrupted' if interrupted else 'Stopped'} after step {training.step}. Go on with")
        self.output.say(f"  petalnode {shlex.join([*given, '--resume'])}")
        if interrupted:
            self.output.emit(event="interrupted", step=training.step, checkpoint=str(path))

    def _save(self, training: Training, material: _Material) -> None:
        from ...tuning.adapter_folder import card_of, save_adapter
        from ...tuning.trainer import uninterrupted

        options = self.options
        training.take_best()
        labels = self.dataset.labels
        results: dict[str, Any] = {
            "data": self.dataset.name,
            "SHA-256 of the data": self.dataset.hash,
            "steps": training.step,
            "rows of a step": options.batch_size,
            "loss of the last step": round(training.loss, 4),
        }
        if training.early_stop != EarlyStop(options.patience):
            results["loss on held-out data"] = round(training.early_stop.best, 4)
        note = AdapterNote(
            method=options.method,
            model=self.model_name,
            model_version=training.tuned.model.version.hex(),
            task="classification" if labels else "language",
            labels=labels,
            tags=tuple(options.tag or ()),
            results=results,
        )
        with uninterrupted():
            self.folder.save(lambda folder: save_adapter(folder, training.tuned, note, card_of(note)))
        out = self.folder.path
        (out / CHECKPOINT).unlink(missing_ok=True)
        self._sample(training, material, changed=True)
        self.output.say(f"saved in {out}")
        if training.curve.held_out:
            with suppress(OSError):  # the adapter is what counts
                write_files(out, {LOSSES: training.curve.to_svg().encode()})
                self.output.say(f"{_gain(training.curve.held_out)}, drawn in {out / LOSSES}")
        self.output.emit(event="saved", path=str(out))
        if out != self.folder.wanted:
            raise typer.Exit(ExitCode.MACHINE_CANNOT)


def _gain(held_out: Sequence[tuple[int, float]]) -> str:
    best = min(loss for _, loss in held_out)
    return f"loss on held-out data {held_out[0][1]:.3f} -> {best:.3f}"


def _padding(tokenizer: Any) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
