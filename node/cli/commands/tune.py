"""`petalnode tune`: fine-tunes a model over the swarm that serves it."""

from __future__ import annotations

import shlex
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import trio
import typer

from ...client.core import SwarmClient, open_client
from ...client.swarm_model import identify_model
from ...errors import BadInput, ExitCode, PetalnodeError
from ...models import resolve
from ...models.adapters.note import METHODS, NOTE, AdapterNote, Method
from ...tuning.early_stop import EarlyStop
from ...tuning.example import Dataset, Example, read_dataset, split
from ...tuning.schedule import SHAPES, Shape, steps_of_epoch
from ..join import JoinOptions, joined, joins_swarm
from ..output import Output, ProgressBars
from ..served import served_model
from .tune_report import Report

if TYPE_CHECKING:
    from ...client.api.model import DistributedModel
    from ...tuning.trainer import Training

LEARNING_RATES: dict[Method, float] = {"prompt": 1e-2, "deep-prompt": 1e-2, "lora": 1e-3}
DEFAULT_EPOCHS = 3
WARMUP_SHARE = 0.05


@dataclass(frozen=True)
class TuneOptions:
    """What the options of the command say."""

    method: Method
    epochs: int | None
    steps: int | None
    batch_size: int
    max_length: int
    learning_rate: float
    warmup: int | None
    schedule: Shape
    virtual_tokens: int
    rank: int
    alpha: float
    target_modules: tuple[str, ...]
    eval_every: int | None
    patience: int | None
    seed: int
    out: Path
    resume: bool
    checkpoint_every: int
    chat_template: bool | None
    device: str
    tags: tuple[str, ...]


@joins_swarm
def tune(
    model: Annotated[
        str | None, typer.Argument(help="Folder, .gguf file, hub id or alias. Default: what the swarm serves.")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='JSONL, each line {"text"}, {"prompt","completion"} or {"text","label"} to classify.',
        ),
    ] = None,
    method: Annotated[str, typer.Option(metavar="|".join(METHODS), help="What is trained.")] = "prompt",
    epochs: Annotated[
        int | None, typer.Option(min=1, help=f"Times through the data. Default: {DEFAULT_EPOCHS}.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps, instead of --epochs.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Rows of a step.")] = 8,
    max_length: Annotated[int, typer.Option(min=2, help="Tokens of a row at most.")] = 256,
    learning_rate: Annotated[
        float | None, typer.Option(min=0, help="The highest. Default: 0.01 for prompts, 0.001 for LoRA.")
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Steps until the highest learning rate. Default: 5 % of all.")
    ] = None,
    schedule: Annotated[
        str, typer.Option(metavar="|".join(SHAPES), help="How the learning rate falls after that.")
    ] = "cosine",
    virtual_tokens: Annotated[int, typer.Option(min=1, help="Of prompts.")] = 16,
    rank: Annotated[int, typer.Option(min=1, help="Of LoRA.")] = 8,
    alpha: Annotated[float, typer.Option(min=0, help="Of LoRA: the change is scaled by alpha / rank.")] = 16.0,
    target_modules: Annotated[
        str | None,
        typer.Option(metavar="A,B", help="Layers that LoRA changes. Default: what is usual for the architecture."),
    ] = None,
    eval_split: Annotated[
        float, typer.Option(min=0, max=0.9, help="Hold out this part of the data to evaluate on.")
    ] = 0.0,
    eval_data: Annotated[Path | None, typer.Option(metavar="FILE", help="Evaluate on this JSONL file.")] = None,
    eval_every: Annotated[int | None, typer.Option(min=1, help="Steps between evaluations. Default: an epoch.")] = None,
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many evaluations that are no better than the best.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the start, the order and the split.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where the result goes. Default: named after data and method.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in --out.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace what is in --out.")] = False,
    checkpoint_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    chat_template: Annotated[
        bool | None,
        typer.Option(
            "--chat-template/--no-chat-template",
            help="Prompts and completions are turns of a chat. Default: if the model has a template.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Of the client's part: auto, cpu, cuda, cuda:N or mps.")] = "auto",
    tag: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="For the model card; repeatable.")] = None,
    *,
    join: JoinOptions,
) -> None:
    """Fine-tune a model over the swarm that serves it."""
    if data is None:
        raise BadInput("what to learn from? Give --data FILE, a JSONL file")
    if method not in METHODS:
        raise BadInput(f"--method {method}: use {', '.join(METHODS)}")
    if schedule not in SHAPES:
        raise BadInput(f"--schedule {schedule}: use {', '.join(SHAPES)}")
    if epochs is not None and steps is not None:
        raise BadInput("--epochs and --steps both say how long: give one of them")
    if eval_data is not None and eval_split:
        raise BadInput("--eval-split and --eval-data both say what to evaluate on: give one of them")
    if patience is not None and eval_data is None and not eval_split:
        raise BadInput("--patience looks at evaluations: give --eval-split (such as 0.1) or --eval-data too")
    options = TuneOptions(
        method=method,
        epochs=epochs,
        steps=steps,
        batch_size=batch_size,
        max_length=max_length,
        learning_rate=LEARNING_RATES[method] if learning_rate is None else learning_rate,
        warmup=warmup,
        schedule=schedule,
        virtual_tokens=virtual_tokens,
        rank=rank,
        alpha=alpha,
        target_modules=tuple(each.strip() for each in (target_modules or "").split(",") if each.strip()),
        eval_every=eval_every,
        patience=patience,
        seed=seed,
        out=out or Path(f"{data.stem}-{method}"),
        resume=resume,
        checkpoint_every=checkpoint_every,
        chat_template=chat_template,
        device=device,
        tags=tuple(tag or ()),
    )
    dataset = read_dataset(data)
    evaluated = None if eval_data is None else read_dataset(eval_data)
    if evaluated is not None and bool(evaluated.labels) != bool(dataset.labels):
        raise BadInput(f"{data} and {eval_data} are of different kinds: one has labels and one has none")
    if evaluated is not None and (strange := set(evaluated.labels) - set(dataset.labels)):
        raise BadInput(f"{eval_data} has labels that {data} has not: {', '.join(sorted(strange))}")
    _check_out(options.out, resume=resume, overwrite=overwrite)
    train, held_out = split(dataset.examples, eval_split, seed)
    if not train:
        raise BadInput(f"{data} has too few examples to hold some out: give more, or leave --eval-split out")
    output = Output(join.json)
    _Run(options, dataset, train, evaluated.examples if evaluated is not None else held_out, output).run(model, join)


def _check_out(out: Path, *, resume: bool, overwrite: bool) -> None:
    from ...tuning.checkpoint import CHECKPOINT

    if out.is_file():
        raise BadInput(f"--out {out} is a file: give a folder")
    if resume and not (out / CHECKPOINT).exists():
        raise BadInput(f"there is no {out / CHECKPOINT} to go on from: leave --resume out, or name its --out")
    if resume or overwrite:
        return
    if (out / CHECKPOINT).exists():
        raise BadInput(
            f"{out} holds a training that is not finished: --resume goes on with it, --overwrite replaces it"
        )
    if (out / NOTE).exists():
        raise BadInput(f"{out} holds an adapter already: give another --out, or --overwrite")


class _Run:
    """One training from the command line."""

    def __init__(
        self,
        options: TuneOptions,
        dataset: Dataset,
        train: tuple[Example, ...],
        held_out: tuple[Example, ...],
        output: Output,
    ) -> None:
        self._options = options
        self._dataset = dataset
        self._train = train
        self._held_out = held_out
        self._output = output

    def run(self, name: str | None, join: JoinOptions) -> None:
        # Told to stop in any way, it keeps what it has.
        signal.signal(signal.SIGTERM, lambda number, frame: signal.raise_signal(signal.SIGINT))
        with ExitStack() as stack:
            model, tokenizer = self._open(name, join, stack)
            training = self._training(model, tokenizer)
            with Report(self._output, training.recipe.steps) as report:
                try:
                    self._loop(training, report)
                except (KeyboardInterrupt, PetalnodeError) as error:
                    report.close()
                    self._keep(training, interrupted=isinstance(error, KeyboardInterrupt))
                    if isinstance(error, PetalnodeError):
                        raise
                    raise typer.Exit(ExitCode.INTERRUPTED) from None
            self._save(training)

    def _open(self, name: str | None, join: JoinOptions, stack: ExitStack) -> tuple[DistributedModel, Any]:
        """The model on the swarm, with the head of a classifier if the data has labels, and its tokenizer."""
        bars = ProgressBars(self._output.errors)

        @asynccontextmanager
        async def resource() -> AsyncIterator[SwarmClient]:
            async with joined(join, self._output, role="tune", listens=False) as (swarm, _):
                found = name or await served_model(swarm)
                folder = await trio.to_thread.run_sync(lambda: resolve(found, need="client", progress=bars))
                identified = await identify_model(swarm, folder, bars)
                bars.stop()
                async with open_client(swarm, identified) as client:
                    yield client

        from ...blocks.client_part import load_client
        from ...client.api.classification import DistributedModelForSequenceClassification
        from ...client.api.connected import Opened
        from ...client.api.model import DistributedModelForCausalLM
        from ...client.api.runtime import TrioThread
        from ...client.text import load_tokenizer

        runtime = TrioThread(resource)
        stack.callback(runtime.close)
        folder = runtime.value.model.folder
        opened = Opened(load_client(folder.path, device=self._options.device), runtime, folder.path)
        tokenizer = load_tokenizer(folder)
        labels = self._dataset.labels
        model: DistributedModel
        if labels:
            if len(labels) < 2:
                raise BadInput(f"all examples have the label {labels[0]!r}: there is nothing to tell apart")
            model = DistributedModelForSequenceClassification(opened, len(labels), None)
            if model.config.pad_token_id is None:
                model.config.pad_token_id = _padding(tokenizer)
        else:
            model = DistributedModelForCausalLM(opened)
        self._model_name = folder.name
        return model, tokenizer

    def _training(self, model: DistributedModel, tokenizer: Any) -> Training:
        from ...tuning.checkpoint import load_checkpoint
        from ...tuning.recipe import Recipe
        from ...tuning.row import rows_of
        from ...tuning.trainer import Training
        from ...tuning.tuned import MethodOptions, Tuned

        options = self._options
        chat = bool(tokenizer.chat_template) if options.chat_template is None else options.chat_template
        if chat and not tokenizer.chat_template:
            raise BadInput(f"{self._model_name} has no chat template: leave --chat-template out")
        labels = self._dataset.labels
        limits: dict[str, Any] = {"max_length": options.max_length, "chat": chat, "labels": labels}
        train = rows_of(self._train, tokenizer, **limits)
        held_out = rows_of(self._held_out, tokenizer, **limits)
        if not train:
            raise BadInput(f"nothing to learn is left within {options.max_length} tokens: raise --max-length")
        if self._held_out and not held_out:
            raise BadInput(f"nothing to evaluate on is left within {options.max_length} tokens: raise --max-length")
        epoch = steps_of_epoch(len(train), options.batch_size)
        steps = options.steps or (options.epochs or DEFAULT_EPOCHS) * epoch
        recipe = Recipe(
            steps=steps,
            batch_size=options.batch_size,
            peak=options.learning_rate,
            warmup=round(WARMUP_SHARE * steps) if options.warmup is None else options.warmup,
            shape=options.schedule,
            evaluate_every=options.eval_every or epoch,
            checkpoint_every=options.checkpoint_every,
            patience=options.patience,
            seed=options.seed,
            method=MethodOptions(
                options.method, options.virtual_tokens, options.rank, options.alpha, options.target_modules
            ),
        )
        tuned = Tuned.of(model, recipe.method, options.seed)
        about = {
            "data": self._dataset.hash,
            "model_version": model.version.hex(),
            "rows": len(train),
            "held_out": len(held_out),
            "max_length": options.max_length,
            "chat_template": chat,
        }
        training = Training(tuned, recipe, train, held_out, about=about, padding=_padding(tokenizer))
        if options.resume:
            training.resume(load_checkpoint(options.out))
        weights = sum(each.numel() for each in tuned.weights.values())
        told = f"{options.method}: {weights:,} weights to train on {len(train):,} rows of {self._dataset.name}"
        told += f", {len(held_out):,} held out" if held_out else ""
        self._output.say(told + (f"; going on at step {training.step + 1}" if training.step else ""))
        return training

    def _loop(self, training: Training, report: Report) -> None:
        from ...tuning.checkpoint import save_checkpoint
        from ...tuning.events import StepDone

        for event in training.run():
            report.tell(event)
            if isinstance(event, StepDone) and event.step % training.recipe.checkpoint_every == 0:
                save_checkpoint(self._options.out, training.checkpoint())

    def _keep(self, training: Training, *, interrupted: bool) -> None:
        """Saves a checkpoint and says how to go on."""
        from ...tuning.checkpoint import save_checkpoint

        if not training.step:
            return
        path = save_checkpoint(self._options.out, training.checkpoint())
        given = [each for each in sys.argv[1:] if each not in ("--resume", "--overwrite")]
        self._output.say(f"{'Interrupted' if interrupted else 'Stopped'} after step {training.step}. Go on with")
        self._output.say(f"  petalnode {shlex.join([*given, '--resume'])}")
        if interrupted:
            self._output.emit(event="interrupted", step=training.step, checkpoint=str(path))

    def _save(self, training: Training) -> None:
        from ...tuning.adapter_folder import save_adapter
        from ...tuning.card import card_of
        from ...tuning.checkpoint import CHECKPOINT

        options, out = self._options, self._options.out
        training.take_best()
        labels = self._dataset.labels
        results: dict[str, Any] = {
            "data": self._dataset.name,
            "SHA-256 of the data": self._dataset.hash,
            "steps": training.step,
            "rows of a step": options.batch_size,
            "loss of the last step": round(training.loss, 4),
        }
        if training.early_stop != EarlyStop(options.patience):
            results["loss on held-out data"] = round(training.early_stop.best, 4)
        note = AdapterNote(
            method=options.method,
            model=self._model_name,
            model_version=training.tuned.model.version.hex(),
            task="classification" if labels else "language",
            labels=labels,
            tags=options.tags,
            results=results,
        )
        save_adapter(out, training.tuned, note, card_of(note))
        (out / CHECKPOINT).unlink(missing_ok=True)
        self._output.say(f"saved in {out}")
        self._output.emit(event="saved", path=str(out))


def _padding(tokenizer: Any) -> int:
    for token in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if token is not None:
            return int(token)
    return 0
