"""An adapter on disk: a folder as peft saves it, read and checked before anything of it is used.

`adapter_config.json` and `adapter_model.safetensors` are peft's; `petalnode.json` beside them says which version of
which model it was trained for. Deep prompts, which peft does not know, are in `deep_prompts.safetensors`. Nothing else
is read; above all no pickle, which could run anybody's program.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...crypto.bounded_json import BadJson, JsonLimits, read_json_object
from ...crypto.canonical import digest
from ...protocols.adapter import (
    MAX_ADAPTER_BYTES,
    MAX_ADAPTER_TENSORS,
    Linears,
    TensorDigest,
    check_tensors,
    hash_of_adapter,
    hashes_of_blocks,
    is_name,
)
from ...protocols.ids import Span
from ...protocols.training import LORA_PARTS, PROMPTS, LoraName
from ..errors import BadInput
from .adapter_note import AdapterNote, read_note
from .checkpoint import StoredTensor, read_header

if TYPE_CHECKING:
    import torch

CONFIG: Final = "adapter_config.json"
WEIGHTS: Final = "adapter_model.safetensors"
DEEP_PROMPTS: Final = "deep_prompts.safetensors"
CONFIG_LIMITS: Final = JsonLimits(nbytes=1 << 20, values=150_000, depth=16, strict=False)
_WHOLE_DOMAIN: Final = "petalnode/adapter-whole/1"
_PICKLES: Final = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
_EXPONENTS: Final = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""Of each dtype of an adapter, whole numbers of its width, and the bits of its exponent."""
_DTYPES: Final = tuple(_EXPONENTS)
_FINITE_STEP: Final = 1 << 20
_PREFIX: Final = "base_model.model."
_LAYERS: Final = re.compile(r"(\^?)([A-Za-z0-9_]+(?:\\?\.[A-Za-z0-9_]+)*)\$?")
_MAX_LAYERS: Final = 256  # characters
_REFUSED: Final = {
    "use_dora": "DoRA",
    "lora_bias": "biases",
    "use_qalora": "QA-LoRA",
    "layer_replication": "layers that are there twice",
    "target_parameters": "parameters that are no linear layers",
    "trainable_token_indices": "embeddings of its own",
    "alora_invocation_tokens": "activation by tokens",
    "arrow_config": "Arrow routing",
    "use_bdlora": "block-diagonal LoRA",
    "monteclora_config": "MonteCLoRA",
    "velora_config": "VeLoRA",
    "kasa_config": "KaSA",
    "lora_ga_config": "a start that changes the model (LoRA-GA)",
}
_CHANGING_STARTS: Final = ("pissa", "olora", "loftq", "corda")


@dataclass(frozen=True, eq=False)
class Adapter:
    """What changes a model: its blocks, what stands before every sequence, and a head of its own.

    Attributes:
        name: for people and announcements.
        tensors: what changes the blocks, on the CPU, by names as in protocols/adapter.py; the scaling is in lora_B.
        blocks: (number, hash) of every block that `tensors` are of.
        hash: of all of them; empty if the blocks are not changed.
        soft_prompt: [virtual tokens, embedding size], or None.
        local: parameters of the part of the model that the client holds, by their names in transformers.
        note: what it was made for, if that is known.
    """

    name: str
    tensors: Mapping[str, torch.Tensor]
    blocks: tuple[tuple[int, bytes], ...] = ()
    hash: bytes = b""
    soft_prompt: torch.Tensor | None = None
    local: Mapping[str, torch.Tensor] = field(default_factory=dict)
    note: AdapterNote | None = None

    @classmethod
    def of(cls, name: str, tensors: Mapping[str, torch.Tensor], **more: Any) -> Adapter:
        """Hashes the tensors: 0.5 ms per MiB."""
        blocks = hashes_of_blocks(digests_of(tensors))
        return cls(name, tensors, blocks, hash_of_adapter(blocks) if blocks else b"", **more)

    @property
    def identity(self) -> str:
        """Names all of it, the soft prompt too, in hexadecimal digits."""
        soft = [found.sha256 for found in digests_of({"": self.soft_prompt})] if self.soft_prompt is not None else []
        return digest(_WHOLE_DOMAIN, self.hash, tuple(soft)).hex()

    def part(self, span: Span) -> dict[str, torch.Tensor]:
        """The tensors of these blocks."""
        return {name: tensor for name, tensor in self.tensors.items() if int(name.partition(".")[0]) in span}

    def check_model(self, version: bytes, model: str) -> None:
        """
        Raises:
            BadInput: it was trained for another model, or another version of it.
        """
        if self.note is not None and self.note.model_version != version.hex():
            raise BadInput(
                f"the adapter {self.name} was trained for version {self.note.model_version[:12]} of {self.note.model}, "
                f"and this is version {version.hex()[:12]} of {model}: their weights differ"
            )

    def check_fits(self, span: Span, linears: Linears, hidden_size: int, num_blocks: int) -> None:
        """Whether its part for `span` can change blocks with these linear layers.

        Raises:
            BadInput: it was made for another architecture.
        """
        try:
            if self.blocks and self.blocks[-1][0] >= num_blocks:
                raise ValueError(f"it changes block {self.blocks[-1][0]}, and the model has {num_blocks} blocks")
            shapes = {name: tuple(tensor.shape) for name, tensor in self.part(span).items()}
            check_tensors(shapes, span, linears, hidden_size)
        except ValueError as error:
            raise BadInput(f"the adapter {self.name} is not for this model: {error}") from None


def digests_of(tensors: Mapping[str, torch.Tensor]) -> list[TensorDigest]:
    """What the hash of an adapter is made of."""
    from ...protocols.tensors import encode

    digests = []
    for name, tensor in tensors.items():
        header, payload = encode(tensor, "none")
        digests.append(TensorDigest(name, tuple(header.shape), header.dtype, hashlib.sha256(payload).digest()))
    return digests


def read_adapter(folder: Path) -> Adapter:
    """The adapter in `folder`, with tensors that are finite and within bounds.

    Raises:
        BadInput: it is none, is damaged, is a pickle, is too large, or wants what petalnode cannot do.
    """
    folder = _folder(folder)
    name = _name_of(folder)
    note = read_note(folder)
    if note is not None and note.method == "deep-prompt":
        return _read_deep_prompts(folder, name, note)
    config = _read_config(folder)
    kind = str(config.get("peft_type", "")).upper()
    tensors = _read_tensors(folder / WEIGHTS)
    if kind == "LORA":
        return _lora(folder, name, config, tensors, note)
    if kind == "PROMPT_TUNING":
        soft, local = _prompt(tensors, config.get("modules_to_save"), folder)
        return Adapter.of(name, {}, soft_prompt=soft, local=local, note=note)
    raise BadInput(
        f"{folder / CONFIG} is of peft's type {kind or 'nothing'}: petalnode takes LORA and PROMPT_TUNING adapters"
    )


def check_adapter_files(folder: Path) -> None:
    """Checks what can be told without torch of an adapter: its files, and that its tensors are finite.

    Raises:
        BadInput: as `read_adapter`.
    """
    import numpy as np

    folder = _folder(folder)
    note = read_note(folder)
    deep = note is not None and note.method == "deep-prompt"
    if not deep:
        _read_config(folder)
    for stored in _checked_header(folder / (DEEP_PROMPTS if deep else WEIGHTS)).values():
        width, exponent = _EXPONENTS[stored.dtype]
        values = np.memmap(stored.file, width, "r", stored.start, (stored.nbytes // np.dtype(width).itemsize,))
        # All bits of the exponent are set in NaN and infinity, and in nothing else.
        for start in range(0, len(values), _FINITE_STEP):
            if bool(((values[start : start + _FINITE_STEP] & exponent) == exponent).any()):
                raise _not_finite(stored.file, stored.key)


def _folder(path: Path) -> Path:
    if path.suffix in _PICKLES:
        raise _pickled(path)
    folder = path.parent if path.name == WEIGHTS else path
    if not folder.is_dir():
        raise BadInput(f"there is no folder {folder} with an adapter")
    return folder


def _not_finite(file: Path, key: str) -> BadInput:
    return BadInput(f"{file}: {key} holds NaN or infinity; its training has failed")


def _name_of(folder: Path) -> str:
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", folder.resolve().name).strip("-._")[:64]
    return name if is_name(name) else "adapter"


def _pickled(file: Path) -> BadInput:
    return BadInput(
        f"{file} is a pickle, which can run any program when it is read: only {WEIGHTS} is read here. Whoever made "
        "it can save it so with peft's save_pretrained(..., safe_serialization=True)"
    )


def _read_config(folder: Path) -> dict[str, Any]:
    file = folder / CONFIG
    try:
        return read_json_object(file, CONFIG_LIMITS)
    except FileNotFoundError:
        raise BadInput(f"{folder} holds no adapter: there is no {CONFIG} in it") from None
    except OSError as error:
        raise BadInput(f"cannot read {file}: {error.strerror}") from None
    except BadJson as error:
        raise BadInput(f"{file} is damaged: {error}. Copy or download it again") from None


def _checked_header(file: Path) -> Mapping[str, StoredTensor]:
    """The tensors of a safetensors file, not read yet.

    Raises:
        BadInput: missing, damaged, too large, or of another dtype.
    """
    if not file.exists():
        for other in sorted(file.parent.glob("*")) if file.parent.is_dir() else ():
            if other.suffix in _PICKLES:
                raise _pickled(other)
        raise BadInput(f"{file.parent} holds no adapter: there is no {file.name} in it")
    header = read_header(file, MAX_ADAPTER_TENSORS)
    total = sum(stored.nbytes for stored in header.values())
    if total > MAX_ADAPTER_BYTES or len(header) > MAX_ADAPTER_TENSORS:
        raise BadInput(
            f"{file} is too large for an adapter: {len(header)} tensors of {total >> 20} MiB, and the limits are "
            f"{MAX_ADAPTER_TENSORS} and {MAX_ADAPTER_BYTES >> 20} MiB. Train it with a smaller rank"
        )
    for stored in header.values():
        if stored.dtype not in _DTYPES:
            raise BadInput(f"{file}: {stored.key} is of {stored.dtype}; an adapter's tensors are {', '.join(_DTYPES)}")
    return header


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """All tensors of a safetensors file.

    Raises:
        BadInput: missing, damaged, too large, of another dtype, or not finite.
    """
    _checked_header(file)
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (SafetensorError, OSError) as error:
        raise BadInput(f"{file} cannot be read: {error}. Copy or download it again") from None
    for key, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise _not_finite(file, key)
    return tensors


def _lora(
    folder: Path, name: str, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], note: AdapterNote | None
) -> Adapter:
    _check_options(folder / CONFIG, config)
    saved = config.get("modules_to_save") or []
    changes: dict[str, torch.Tensor] = {}
    paths: dict[str, str] = {}
    local: dict[str, torch.Tensor] = {}
    for key, tensor in tensors.items():
        parameter = key.removeprefix(_PREFIX)
        weight = _lora_name(parameter)
        if weight is not None:
            changes[str(weight)] = tensor
            paths[str(weight)] = parameter.removesuffix(f".{weight.part}.weight")
            continue
        if parameter.partition(".")[0] in saved:
            local[parameter] = tensor
            continue
        raise BadInput(
            f"{folder / WEIGHTS}: {key} is no LoRA weight of a block, and nothing else can be changed; train with "
            "target_modules that are linear layers of the blocks"
        )
    if not changes:
        raise BadInput(f"{folder / WEIGHTS} holds no LoRA weights of blocks")
    alphas = _Alphas.of(config, folder / CONFIG)
    scaled: dict[str, torch.Tensor] = {}
    for key, tensor in changes.items():
        weight = LoraName.parse(key)
        assert weight is not None
        other = changes.get(str(replace(weight, part=LORA_PARTS[weight.part == LORA_PARTS[0]])))
        if other is None or other.dim() != 2 or not other.numel():
            raise BadInput(f"{folder / WEIGHTS}: beside {key} there is no other half of two dimensions")
        scaled[key] = tensor
        if weight.part == LORA_PARTS[1]:
            scaled[key] = _scaled(tensor, alphas.scaling(paths[key], other.shape[0]))
    return Adapter.of(name, scaled, local=local, note=note)


def _check_options(file: Path, config: Mapping[str, Any]) -> None:
    """
    Raises:
        BadInput: an option that changes what the weights mean, and that is not done here.
    """
    if config.get("bias", "none") != "none":
        raise BadInput(f"{file} has bias={config['bias']!r}, and petalnode changes no biases: train with bias='none'")
    for option, meaning in _REFUSED.items():
        if config.get(option):
            raise BadInput(f"{file} has {option}: petalnode cannot do {meaning}, only plain LoRA")
    start = str(config.get("init_lora_weights", True)).lower()
    if start.startswith(_CHANGING_STARTS):
        raise BadInput(
            f"{file} has init_lora_weights={start!r}, which changed the model's own weights as well: save it as plain "
            "LoRA (peft: save_pretrained(path_initial_model_for_weight_conversion=...))"
        )


def _lora_name(parameter: str) -> LoraName | None:
    """What a parameter of peft's LoRA ("model.layers.3.self_attn.q_proj.lora_A.weight") is of; None if it is none."""
    if not parameter.endswith(".weight"):
        return None
    names = parameter.removesuffix(".weight").split(".")
    number = next((index for index, name in enumerate(names) if name.isdecimal()), len(names))
    return LoraName.parse(".".join(names[number:]))


def _scaled(b: torch.Tensor, scaling: float) -> torch.Tensor:
    """lora_B with the scaling in it; in float32 where its own dtype would not hold that exactly."""
    exact = abs(math.frexp(scaling)[0]) == 0.5
    return b * scaling if exact else b.float() * scaling


@dataclass(frozen=True)
class _Alphas:
    """lora_alpha of each layer (peft: LoraConfig's lora_alpha, alpha_pattern, use_rslora).

    peft takes the keys of alpha_pattern for regular expressions, which a stranger can write so that they take years.
    Here a key is the name of layers: all of it ("^model.layers.2.q_proj"), or its end ("q_proj"). To look up a layer
    takes as long with many keys as with one.

    Attributes:
        ends, wholes: by names, the place of the key among all keys, of which the first that fits counts, and its alpha.
    """

    usual: float
    ends: Mapping[str, tuple[int, float]]
    wholes: Mapping[str, tuple[int, float]]
    rank_stabilised: bool
    file: Path

    @classmethod
    def of(cls, config: Mapping[str, Any], file: Path) -> _Alphas:
        """
        Raises:
            BadInput: something in it is no number, or no name of layers.
        """
        ends: dict[str, tuple[int, float]] = {}
        wholes: dict[str, tuple[int, float]] = {}
        try:
            usual = float(config["lora_alpha"])
            for place, (key, alpha) in enumerate((config.get("alpha_pattern") or {}).items()):
                found = _LAYERS.fullmatch(key) if len(key) <= _MAX_LAYERS else None
                if found is None:
                    raise ValueError(key)
                names = wholes if found[1] else ends
                names.setdefault(found[2].replace("\\.", "."), (place, float(alpha)))
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise BadInput(
                f"{file}: lora_alpha and the values of alpha_pattern must be numbers, and its keys names of layers or "
                "their ends, as q_proj or layers.2.self_attn.q_proj: other regular expressions are not taken"
            ) from None
        return cls(usual, ends, wholes, bool(config.get("use_rslora")), file)

    def scaling(self, path: str, rank: int) -> float:
        """What peft multiplies B A x with for the layer at `path`.

        Raises:
            BadInput: it is zero or not finite.
        """
        fitting = [self.wholes[path]] if path in self.wholes else []
        tail = path if len(path) <= _MAX_LAYERS else path[-_MAX_LAYERS - 1 :].partition(".")[2]
        while tail:
            if tail in self.ends:
                fitting.append(self.ends[tail])
            tail = tail.partition(".")[2]
        alpha = min(fitting)[1] if fitting else self.usual
        scaling = alpha / (math.sqrt(rank) if self.rank_stabilised else rank)
        if not math.isfinite(scaling) or not scaling:
            raise BadInput(f"{self.file}: a lora_alpha of {alpha:g} for rank {rank} makes no sense")
        return scaling


def _prompt(
    tensors: Mapping[str, torch.Tensor], heads: Any, folder: Path
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The embeddings of virtual tokens, and the weights of `heads` beside them."""
    others = dict(tensors)
    prompt = others.pop("prompt_embeddings", None)
    if prompt is None or prompt.dim() != 2 or not prompt.numel():
        raise BadInput(f"{folder} holds no prompt_embeddings of [virtual tokens, embedding size]")
    local = {key.removeprefix("base_model."): tensor for key, tensor in others.items()}
    for name in local:
        if name.partition(".")[0] not in (heads or ()):
            raise BadInput(f"{folder} has {name} beside its prompt, which is nothing that a prompt needs")
    return prompt.float(), local


def _read_deep_prompts(folder: Path, name: str, note: AdapterNote) -> Adapter:
    tensors = _read_tensors(folder / DEEP_PROMPTS)
    deep = tensors.pop("deep_prompts", None)
    heads = {key.removeprefix("base_model.").partition(".")[0] for key in tensors} if note.labels else ()
    soft, local = _prompt(tensors, heads, folder)
    if deep is None or deep.dim() != 3 or deep.shape[1] != soft.shape[0]:
        raise BadInput(f"{folder / DEEP_PROMPTS} holds no deep_prompts of [blocks, {soft.shape[0]}, hidden size]")
    changes = {f"{block}.{PROMPTS}": prompts.contiguous() for block, prompts in enumerate(deep)}
    return Adapter.of(name, changes, soft_prompt=soft, local=local, note=note)
