"""Which part of a model a checkpoint key belongs to: the embeddings, one block, or norm and head.

Works on key names alone, for any architecture: the blocks are the numbered list of modules whose numbers run
from 0 to num_blocks - 1 (`model.layers.N.`, `transformer.h.N.`, `gpt_neox.layers.N.`, `model.decoder.layers.N.` ...).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from ...protocols.ids import Span
from ..errors import ModelError

EMBEDDINGS: Final = "embeddings"
HEAD: Final = "head"
Part: TypeAlias = int | Literal["embeddings", "head"]

# What a node wants of a model: a client holds embeddings, norm and head; a server holds a span of blocks.
Need: TypeAlias = Literal["client", "all", "config"] | Span

_HEAD_MODULES = frozenset(
    {
        *("norm", "ln_f", "norm_f", "final_norm", "final_layernorm", "final_layer_norm", "project_out", "output_norm"),
        *("lm_head", "embed_out", "output", "score", "classifier", "qa_outputs"),
    }
)
_LANGUAGE_WORDS = ("language", "text")
COPIES: Final = ("embed_tokens.", "shared_head.head.")
"""What an MTP head may have once more."""
_PLAIN = (".weight", ".bias", "_bias")


def parts_of_need(need: Need, num_blocks: int) -> tuple[Part, ...]:
    """The parts that `need` asks for, in the order embeddings, blocks, head.

    Raises:
        ModelError: if a span passes the end of the model.
    """
    if need == "config":
        return ()
    if need == "client":
        return (EMBEDDINGS, HEAD)
    if need == "all":
        return (EMBEDDINGS, *range(num_blocks), HEAD)
    if need.end > num_blocks:
        raise ModelError(
            f"The model has {num_blocks} blocks: {need} passes its end. The last possible span ends at {num_blocks}."
        )
    return tuple(range(need.start, need.end))


def describe(part: Part) -> str:
    """How a message names the part."""
    if part == EMBEDDINGS:
        return "the embeddings"
    return "the final norm and head" if part == HEAD else f"block {part}"


@dataclass(frozen=True)
class CheckpointLayout:
    """Where the blocks of a checkpoint stand.

    Attributes:
        base: what stands before the list and before its neighbours: "model.", "transformer.", or nothing.
        blocks: what stands before a block's number: "model.layers.", "h."
        num_blocks: how many blocks the model has. Higher numbers are not the model's.
        drafts: whether the first of these is a head for the token after next (DeepSeek-V3, arXiv 2412.19437, section
            2.2). Then it belongs to the embeddings, without the copies of these and of the head.
    """

    base: str
    blocks: str
    num_blocks: int
    drafts: bool = False

    def part_of(self, key: str) -> Part | None:
        """The part that holds `key`; None for what the model itself does not use."""
        if key.startswith(self.blocks):
            number, _, rest = key[len(self.blocks) :].partition(".")
            if number.isdecimal() and int(number) >= self.num_blocks:
                drafts = self.drafts and int(number) == self.num_blocks and not rest.startswith(COPIES)
                return EMBEDDINGS if drafts else None
            if number.isdecimal():
                return int(number)
        module = self.local_name(key).partition(".")[0]
        return HEAD if module in _HEAD_MODULES else EMBEDDINGS

    def local_name(self, key: str) -> str:
        """`key` without what depends on how the model was wrapped when it was saved, or on the block's number."""
        if key.startswith(self.blocks):
            number, dot, rest = key[len(self.blocks) :].partition(".")
            if dot and number.isdecimal() and int(number) < self.num_blocks:
                return rest
        return key.removeprefix(self.base)


def find_layout(keys: Iterable[str], num_blocks: int) -> CheckpointLayout:
    """Finds the list of blocks among checkpoint keys.

    Raises:
        ModelError: if there is none, or if it lacks some of the blocks.
    """
    keys = tuple(keys)
    lists: dict[str, set[int]] = {}
    sizes: dict[str, int] = {}
    for key in keys:
        names = key.split(".")
        for place, name in enumerate(names[:-1]):
            if name.isdecimal():
                prefix = "".join(f"{outer}." for outer in names[:place])
                lists.setdefault(prefix, set()).add(int(name))
                sizes[prefix] = sizes.get(prefix, 0) + 1
                break  # what is numbered inside a numbered module (experts) is no list of blocks
    if not lists:
        raise ModelError("no numbered list of blocks among its tensors: it is no transformer checkpoint.")
    wanted = range(num_blocks)

    def fitness(prefix: str) -> tuple[int, bool, bool, int, int]:
        held = sum(number in lists[prefix] for number in wanted)
        language = any(word in prefix for word in _LANGUAGE_WORDS)
        return held, "mtp." not in prefix, language, -prefix.count("."), sizes[prefix]

    best = max(lists, key=fitness)
    missing = [number for number in wanted if number not in lists[best]]
    if missing:
        raise ModelError(
            f"its configuration says {num_blocks} blocks, but under {best!r} it lacks {_numbers(missing)}."
        )
    base = best.removesuffix(".")
    base = base[: base.rfind(".") + 1]
    behind = [key for key in keys if key.startswith(f"{best}{num_blocks}.")]
    drafts = f"{best}{num_blocks}.eh_proj.weight" in behind and all(key.endswith(_PLAIN) for key in behind)
    return CheckpointLayout(base, best, num_blocks, drafts)


def group_by_part(keys: Iterable[str], layout: CheckpointLayout) -> Mapping[Part, tuple[str, ...]]:
    """The keys of each part, sorted. Every part of the model is there, an empty one too."""
    groups: dict[Part, list[str]] = {part: [] for part in parts_of_need("all", layout.num_blocks)}
    for key in sorted(keys):
        part = layout.part_of(key)
        if part is not None:
            groups[part].append(key)
    return {part: tuple(group) for part, group in groups.items()}


def _numbers(missing: list[int]) -> str:
    shown = ", ".join(str(number) for number in missing[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return f"block{'s' if len(missing) > 1 else ''} {shown}{more}"
