"""`petalnode tune`: fine-tunes a model over the swarm that serves it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...client.core import SwarmClient, open_client
from ...client.swarm_model import identify_model
from ...errors import BadInput, ExitCode, PetalnodeError
from ...models.adapter_note import METHODS, NOTE, AdapterNote, Method
from ...models.cache_dir import check_writable, require_space
from ...tuning.adapter_files import CHECKPOINT, WRITE_ADVICE, ResultFolder, other_folders
from ...tuning.dataset import Dataset, Example, read_dataset, rows_of, split
from ...tuning.progress import EarlyStop, Evaluated, Event, StepDone, StoppedEarly, Waiting
from ...tuning.recipe import SHAPES, MethodOptions, Recipe, Shape, steps_of_epoch
from ..join import JoinOptions, joined, joins_swarm
from ..model_choice import SwarmModelArgument, check_device, check_model, model_folder, served_model
from ..output import Output, ProgressBars
from ..process import OutputClosed, start
from ..strangers import TrustedOptions

if TYPE_CHECKING:
    from ...client.api.model import DistributedModel
    from ...tuning.trainer import Training

LEARNING_RATES: dict[Method, float] = {"prompt": 1e-2, "deep-prompt": 1e-2, "lora": 1e-3}
DEFAULT_EPOCHS = 3
WARMUP_SHARE = 0.05
_KEPT_COPIES: Final = 5
"""Of the weights on the disk: those of the adapter, and a checkpoint with two moments and the best evaluation's."""
_WEIGHT_BYTES: Final = 4
_LARGE: Final = 1 << 20
"""Characters of data from which on it is said that tokens are made of them."""
_REPORTED_STEPS: Final = 20
"""How many steps are printed where there is no terminal to draw a progress bar on."""


def _one_of(choices: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise typer.BadParameter(f"{text}: use {', '.join(choices)}")
        return text

    return parse


@dataclass(frozen=True)
class TuneOptions(TrustedOptions):
    """The options of `petalnode tune`."""

    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Training data, JSONL: each line {"text"}, {"prompt","completion"}, or {"text","label"} to classify.',
        ),
    ] = None
    method: Annotated[
        Method,
        typer.Option(
            parser=_one_of(METHODS),
            metavar="|".join(METHODS),
            help="Train a soft prompt, prompts at every block, or LoRA.",
        ),
    ] = "prompt"
    epochs: Annotated[
        int | None, typer.Option(min=1, help=f"Passes over the training data. Default: {DEFAULT_EPOCHS}.")
    ] = None
    steps: Annotated[int | None, typer.Option(min=1, help="Optimiser steps, instead of --epochs.")] = None
    batch_size: Annotated[int, typer.Option(min=1, help="Examples per step.")] = 8
    max_length: Annotated[int, typer.Option(min=2, help="Maximum tokens per example.")] = 256
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="Peak learning rate. Default: 0.01 for prompts, 0.001 for LoRA.")
    ] = None
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Steps of linear warm-up to the peak. Default: 5% of all steps.")
    ] = None
    schedule: Annotated[
        Shape,
        typer.Option(parser=_one_of(SHAPES), metavar="|".join(SHAPES), help="Learning rate decay after warm-up."),
    ] = "cosine"
    virtual_tokens: Annotated[int, typer.Option(min=1, help="Length of the prompt (methods prompt, deep-prompt).")] = 16
    rank: Annotated[int, typer.Option(min=1, help="Rank of LoRA.")] = 8
    alpha: Annotated[float, typer.Option(min=0, help="Scale of LoRA: its output is multiplied by alpha / rank.")] = 16.0
    target_modules: Annotated[
        str | None,
        typer.Option(
            metavar="A,B", help="Linear layers that LoRA changes. Default: the usual attention layers of the model."
        ),
    ] = None
    eval_split: Annotated[
        float, typer.Option(min=0, max=0.9, help="Fraction of the data to hold out for evaluation.")
    ] = 0.0
    eval_data: Annotated[Path | None, typer.Option(metavar="FILE", help="Evaluate on this JSONL file.")] = None
    eval_every: Annotated[int | None, typer.Option(min=1, help="Steps between evaluations. Default: one epoch.")] = None
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop early after this many evaluations without improvement.")
    ] = None
    seed: Annotated[int, typer.Option(help="Random seed of the initial weights, the data order and the split.")] = 0
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Folder for the result. Default: named after --data and --method."),
    ] = None
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the checkpoint in --out.")] = False
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the contents of --out.")] = False
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--no-chat-template",
            help="Format prompts and completions as turns of a chat. Default: if the model has a chat template.",
        ),
    ] = None
    device: Annotated[
        str, typer.Option(help="Device of embeddings and head, which run here: auto, cpu, cuda, cuda:N or mps.")
    ] = "auto"
    tag: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Tag in the model card; repeatable.")] = None

    def check_target(self, out: Path) -> None:
        """
        Raises:
            BadInput: `out` holds something else than what is to be saved or resumed there.
            MachineError: it cannot be written.
        """
        if out.is_file():
            raise BadInput(f"--out {out} is a file: give a folder")
        if self.resume and not (out / CHECKPOINT).exists():
            raise BadInput(f"there is no {out / CHECKPOINT} to go on from: leave --resume out, or name its --out")
        if not self.resume and not self.overwrite:
            if (out / CHECKPOINT).exists():
                raise BadInput(
                    f"{out} holds a training that is not finished: --resume goes on with it, --overwrite replaces it"
                )
            if (out / NOTE).exists():
                raise BadInput(f"{out} holds an adapter already: give another --out, or --overwrite")
        check_writable(out, f"Saving in --out {out}", WRITE_ADVICE)

    def read_examples(self) -> tuple[Dataset, tuple[Example, ...], tuple[Example, ...]]:
        """The training data as it was read, and its examples to train on and to evaluate on.

        Raises:
            BadInput: options that contradict each other, or a file that cannot be used.
        """
        if self.data is None:
            raise BadInput("what to learn from? Give --data FILE, a JSONL file of examples")
        if self.epochs is not None and self.steps is not None:
            raise BadInput("--epochs and --steps both say how long: give one of them")
        if self.eval_data is not None and self.eval_split:
            raise BadInput("--eval-split and --eval-data both say what to evaluate on: give one of them")
        if self.patience is not None and self.eval_data is None and not self.eval_split:
            raise BadInput("--patience needs evaluations: give --eval-split (such as 0.1) or --eval-data too")
        dataset = read_dataset(self.data)
        if len(dataset.labels) == 1:
            raise BadInput(f"all examples have the label {dataset.labels[0]!r}: there is nothing to tell apart")
        train, held_out = split(dataset.examples, self.eval_split, self.seed)
        if not train:
            raise BadInput(f"{self.data} has too few examples to hold some out: give more, or leave --eval-split out")
        if self.eval_data is None:
            return dataset, train, held_out
        evaluated = read_dataset(self.eval_data)
        if bool(evaluated.labels) != bool(dataset.labels):
            raise BadInput(f"{self.data} and {self.eval_data} are of different kinds: only one of them has labels")
        if strange := set(evaluated.labels) - set(dataset.labels):
            raise BadInput(f"{self.eval_data} has labels that {self.data} has not: {', '.join(sorted(strange))}")
        return dataset, train, evaluated.examples


@joins_swarm
def tune(model: SwarmModelArgument = None, *, options: TuneOptions, join: JoinOptions) -> None:
    """Fine-tune a model over the swarm that serves it."""
    join.check()
    options.trusted_servers()  # before anybody is asked
    check_device(options.device)
    check_model(model)
    dataset, train, held_out = options.read_examples()
    out = options.out or Path(f"{Path(dataset.name).stem}-{options.method}")
    options.check_target(out)
    output = Output(join.json)
    folder = ResultFolder(out, other_folders(out), output.warn)
    _Run(options, folder, dataset, train, held_out, output).run(model, join)


class _Report:
    """Prints the events of a training: a progress bar on a terminal, else lines, or JSON. A context manager."""

    def __init__(self, output: Output, steps: int) -> None:
        self._output = output
        self._every = max(1, steps // _REPORTED_STEPS)
        self._bar = Progress(
            TextColumn("{task.description}"),
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
        if not isinstance(event, Waiting):
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
            case Waiting():
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


@dataclass
class _Run:
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
            model, tokenizer = self._open(name, join, stack)
            training = self._training(model, tokenizer)
            try:
                with _Report(self.output, training.recipe.steps) as report:
                    self._loop(training, report)
            except (KeyboardInterrupt, PetalnodeError, OutputClosed, MemoryError) as error:
                self._keep(training, interrupted=isinstance(error, KeyboardInterrupt))
                raise
            self._save(training)

    def _open(self, name: str | None, join: JoinOptions, stack: ExitStack) -> tuple[DistributedModel, Any]:
        """The model on the swarm, with the head of a classifier if the data has labels, and its tokenizer."""
        bars = ProgressBars(self.output.errors)

        @asynccontextmanager
        async def resource() -> AsyncIterator[SwarmClient]:
            start.stage("joining the swarm")
            async with joined(join, self.output, role="tune", listens=False) as (swarm, _):
                start.stage("looking for the model")
                folder = await model_folder(name or await served_model(swarm), self.output, need="client")
                identified = await identify_model(swarm, folder, bars)
                bars.stop()
                start.stage(f"loading embeddings and head of {folder.name}")
                async with open_client(swarm, identified, trusted=self.options.trusted_servers()) as client:
                    yield client

        from ...blocks.client_part import load_client
        from ...client.api.causal_lm import DistributedModelForCausalLM
        from ...client.api.classification import DistributedModelForSequenceClassification
        from ...client.api.model import OpenedModel
        from ...client.api.runtime import TrioThread
        from ...client.chat import load_tokenizer

        runtime = TrioThread(resource)
        stack.callback(runtime.close)
        folder = runtime.value.model.folder
        opened = OpenedModel(load_client(folder.path, device=self.options.device), runtime, folder.path)
        tokenizer = load_tokenizer(folder)
        labels = self.dataset.labels
        model: DistributedModel
        if labels:
            model = DistributedModelForSequenceClassification(opened, len(labels), None)
            if model.config.pad_token_id is None:
                model.config.pad_token_id = _padding(tokenizer)
        else:
            model = DistributedModelForCausalLM(opened)
        self.model_name = folder.name
        return model, tokenizer

    def _training(self, model: DistributedModel, tokenizer: Any) -> Training:
        from ...tuning.trainer import Training, load_checkpoint
        from ...tuning.tuned import Tuned

        options = self.options
        chat = bool(tokenizer.chat_template) if options.chat_template is None else options.chat_template
        if chat and not tokenizer.chat_template:
            raise BadInput(f"{self.model_name} has no chat template: leave --chat-template out")
        labels = self.dataset.labels
        bars = ProgressBars(self.output.errors)
        total = sum(len(example.prompt or "") + len(example.text) for example in (*self.train, *self.held_out))
        done = 0

        def progress(characters: int) -> None:
            nonlocal done
            done += characters
            if total > _LARGE:
                bars(f"making tokens of {self.dataset.name}", done, total)

        limits: dict[str, Any] = {"max_length": options.max_length, "chat": chat, "labels": labels}
        train = rows_of(self.train, tokenizer, **limits, progress=progress)
        held_out = rows_of(self.held_out, tokenizer, **limits, progress=progress)
        bars.stop()
        if not train:
            raise BadInput(f"nothing to learn is left within {options.max_length} tokens: raise --max-length")
        if self.held_out and not held_out:
            raise BadInput(f"nothing to evaluate on is left within {options.max_length} tokens: raise --max-length")
        epoch = steps_of_epoch(len(train), options.batch_size)
        steps = options.steps or (options.epochs or DEFAULT_EPOCHS) * epoch
        targets = tuple(name.strip() for name in (options.target_modules or "").split(",") if name.strip())
        recipe = Recipe(
            steps=steps,
            batch_size=options.batch_size,
            peak=LEARNING_RATES[options.method] if options.learning_rate is None else options.learning_rate,
            warmup=round(WARMUP_SHARE * steps) if options.warmup is None else options.warmup,
            shape=options.schedule,
            evaluate_every=options.eval_every or epoch,
            checkpoint_every=options.checkpoint_every,
            patience=options.patience,
            seed=options.seed,
            method=MethodOptions(options.method, options.virtual_tokens, options.rank, options.alpha, targets),
        )
        tuned = Tuned.of(model, recipe.method, options.seed)
        about = {
            "data": self.dataset.hash,
            "model_version": model.version.hex(),
            "rows": len(train),
            "held_out": len(held_out),
            "max_length": options.max_length,
            "chat_template": chat,
        }
        training = Training(tuned, recipe, train, held_out, about=about, padding=_padding(tokenizer))
        if options.resume:
            training.resume(load_checkpoint(self.folder.wanted))
        weights = sum(weight.numel() for weight in tuned.weights.values())
        purpose = f"A training of {weights:,} weights"
        there = check_writable(self.folder.wanted, purpose, WRITE_ADVICE)
        require_space(there, _KEPT_COPIES * _WEIGHT_BYTES * weights, purpose, WRITE_ADVICE)
        told = f"{options.method}: {weights:,} weights to train on {len(train):,} rows of {self.dataset.name}"
        told += f", {len(held_out):,} held out" if held_out else ""
        start.done()
        self.output.say(told + (f"; going on at step {training.step + 1}" if training.step else ""))
        return training

    def _loop(self, training: Training, report: _Report) -> None:
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

    def _save(self, training: Training) -> None:
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
        self.output.say(f"saved in {out}")
        self.output.emit(event="saved", path=str(out))
        if out != self.folder.wanted:
            raise typer.Exit(ExitCode.MACHINE_CANNOT)


def _padding(tokenizer: Any) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
