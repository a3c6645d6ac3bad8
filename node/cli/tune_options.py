"""The options of `petalnode tune`, and what can be told of them without a network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..client.core import CODEC_OF
from ..errors import BadInput
from ..models.adapter_note import METHODS, NOTE, Method
from ..models.cache_dir import check_writable
from ..tuning.adapter_files import CHECKPOINT, WRITE_ADVICE
from ..tuning.dataset import Dataset, Example, read_dataset, split
from ..tuning.recipe import SHAPES, Shape
from .option import option
from .strangers import TrustedOptions

DEFAULT_EPOCHS: Final = 3


@dataclass(frozen=True)
class TuneOptions(TrustedOptions):
    """The options of `petalnode tune`."""

    data: Path | None = option(
        None, 'Training data, JSONL of {"text"}, {"prompt","completion"}, {"messages"} or {"text","label"}.', "FILE"
    )
    method: Method = option("prompt", "Train a soft prompt, prompts at every block, or LoRA.", among=METHODS)
    epochs: int | None = option(None, f"Passes over the training data. Default: {DEFAULT_EPOCHS}.", min=1)
    steps: int | None = option(None, "Optimiser steps, instead of --epochs.", min=1)
    batch_size: int = option(8, "Examples per step.", min=1)
    max_length: int = option(256, "Maximum tokens per example.", min=2)
    learning_rate: float | None = option(None, "Peak learning rate. Default: 0.01 for prompts, 0.001 for LoRA.", min=0)
    warmup: int | None = option(None, "Steps of linear warm-up to the peak. Default: 5% of all steps.", min=0)
    schedule: Shape = option("cosine", "Learning rate decay after warm-up.", among=SHAPES)
    virtual_tokens: int = option(16, "Length of the prompt (methods prompt, deep-prompt).", min=1)
    rank: int = option(8, "Rank of LoRA.", min=1)
    alpha: float = option(16.0, "Scale of LoRA: its output is multiplied by alpha / rank.", min=0)
    target_modules: str | None = option(
        None, "Linear layers that LoRA changes. Default: the usual attention layers of the model.", "A,B"
    )
    eval_split: float = option(0.0, "Fraction of the data to hold out for evaluation.", min=0, max=0.9)
    eval_data: Path | None = option(None, "Evaluate on this JSONL file.", "FILE")
    eval_every: int | None = option(None, "Steps between evaluations. Default: one epoch.", min=1)
    patience: int | None = option(None, "Stop early after this many evaluations without improvement.", min=1)
    seed: int = option(0, "Random seed of the initial weights, the data order and the split.")
    out: Path | None = option(None, "Folder for the result. Default: named after --data and --method.", "DIR")
    codec: str = option(
        "none",
        "How hidden states and their gradients travel: none, as they are; the others take less of a slow "
        "line, and round both.",
        among=tuple(CODEC_OF),
    )
    resume: bool = option(False, "Continue from the checkpoint in --out.")
    overwrite: bool = option(False, "Replace the contents of --out.")
    checkpoint_every: int = option(50, "Steps between checkpoints.", min=1)
    chat_template: bool | None = option(
        None,
        "Format prompts and completions as turns of a chat. Default: if the model has a chat template.",
        names=("--chat-template/--no-chat-template",),
    )
    device: str = option("auto", "Device of embeddings and head, which run here: auto, cpu, cuda, cuda:N or mps.")
    sample_tokens: int = option(
        48, "Length of the sample that is shown before and after the training; 0 shows none.", min=0
    )
    tag: list[str] | None = option(None, "Tag in the model card; repeatable.", "TEXT")

    @property
    def targets(self) -> tuple[str, ...]:
        """The linear layers that LoRA changes, by name; none for those that are usual.

        Raises:
            BadInput: they are named for another method, or the list has no name in it.
        """
        if self.target_modules is None:
            return ()
        names = tuple(name.strip() for name in self.target_modules.split(",") if name.strip())
        if self.method != "lora":
            raise BadInput(
                f"--target-modules are layers that LoRA changes, and --method is {self.method}: add --method lora"
            )
        if not names:
            raise BadInput("--target-modules is empty: give names of layers, such as q_proj,v_proj, or leave it out")
        return names

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
        if self.chat_template is False and any(example.messages for example in dataset.examples):
            raise BadInput(
                '"messages" are learned by the model\'s chat template, and --no-chat-template was given: leave it out, '
                'or use "prompt" and "completion"'
            )
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
