"""A GGUF file as an ordinary model folder, made once and kept in the cache.

The names and layouts of the tensors, the configuration and the tokenizer are transformers' own reading of GGUF; the
weights are dequantised tensor by tensor, so a file of any size needs memory for one block and one shard. They are
written as the exact float32 values that the quantised ones stand for; a file whose weights are all bfloat16 or all
float16 keeps that type. Nothing depends on the machine: everyone who imports a file gets the same model version.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import pi, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ...errors import ModelError
from ..cache_dir import import_once, imported_folder, require_space
from ..checkpoint import ShardWriter
from ..digests import file_digest, known_file_digest
from ..folder import ModelFolder, open_folder
from ..progress import Progress
from .gguf_header import GgufHeader, GgufTensor, read_gguf_header

if TYPE_CHECKING:
    import torch

# Part of the folder's name in the cache: goes up whenever an import would write something else.
_IMPORT_FORMAT = 1
_TOKENIZER_BYTES = 64 << 20
# One divisor for each rotary frequency. llama.cpp stores the frequency scaling of Llama 3.1 and its successors so, and
# not the settings it was computed from. transformers does not read that tensor, and the model would fail in long texts:
# the settings are found again, and checked against every divisor.
ROPE_FACTORS = "rope_freqs.weight"
# The only settings that were ever published with this scaling; the factor itself differs from model to model.
_LOW, _HIGH, _CONTEXT = 1.0, 4.0, 8192
_TOLERANCE = 1e-4
_DEQUANTISED: Final = frozenset(("Q2_K",))
"""Types whose values no form of the compiled kernels holds: blocks of 16 with a scale and an offset."""
_log = logging.getLogger(__name__)
_BLOCK = re.compile(r"blk\.(\d+)\.")


def import_gguf(file: Path, progress: Progress) -> ModelFolder:
    """The folder of `file`'s model; makes it if no file of the same content was imported yet.

    Raises:
        ModelError: if the file is truncated, or of an architecture or form that cannot be imported.
        MachineError: if the disk is full.
    """
    key = gguf_key(file_digest(file, progress))
    path = import_once(key, f"Importing {file.name}", lambda folder: write_folder(file, folder, progress), progress)
    return open_folder(path, file.stem)


def write_config_of(file: Path, folder: Path) -> ModelFolder | None:
    """Writes into `folder` the `config.json` that an import of `file` would have, by the file's header and norms alone.

    None, and nothing is written, if the file is imported already.

    Raises:
        ModelError: as `import_gguf`.
    """
    known = known_file_digest(file)
    if known is not None and imported_folder(gguf_key(known)).is_dir():
        return None
    header = read_gguf_header(file)
    _refuse_split(file, header)
    config = read_gguf_config(file, header)
    dtype = _dtype(file, header, _Names(file, header, config))
    _write_json(folder / "config.json", config | {"dtype": _name_of(dtype)})
    return open_folder(folder, file.stem)


def word_on_kinds(name: str, kinds: Iterable[str]) -> str | None:
    """What is said of the weights of file `name` that no compiled kernel multiplies as they are, if it has any."""
    wide = sorted(set(kinds) & _DEQUANTISED)
    if not wide:
        return None
    return (
        f"{name}: weights in {', '.join(wide)} are dequantised and take the memory of float32; Q3_K, Q4_K and "
        "the other types stay in few bits"
    )


def gguf_key(sha: bytes) -> str:
    """The name in the cache of what a GGUF file with this SHA-256 becomes."""
    return f"gguf-{sha.hex()[:32]}-{_IMPORT_FORMAT}"


def write_folder(file: Path, folder: Path, progress: Progress, config: Mapping[str, Any] | None = None) -> None:
    """Writes configuration, tokenizer and weights of `file` into `folder`. Raises as `import_gguf` does.

    `config` is what becomes `config.json`; it is read out of `file` if it is not given.
    """
    header = read_gguf_header(file)
    _refuse_split(file, header)
    weights = 4 * sum(prod(tensor.shape) for tensor in header.tensors)
    require_space(folder.parent, weights + _TOKENIZER_BYTES, f"Importing {file.name}")
    progress(f"Reading {file.name}", 0, None)
    config = read_gguf_config(file, header) if config is None else dict(config)
    names = _Names(file, header, config)
    # the tokenizer is as much work as the weights of a small model, and those let other threads run
    with ThreadPoolExecutor(max_workers=1) as pool:
        tokenizer = pool.submit(_write_tokenizer, file, folder)
        config["dtype"] = _write_weights(file, header, names, folder, progress)
        progress("Converting the tokenizer", 0, None)
        tokenizer.result()
    ids = {name: id_ for name, id_ in config.items() if name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "config.json", config)


def read_gguf_config(file: Path, header: GgufHeader) -> dict[str, Any]:
    """`config.json` as transformers reads it out of the file, before it adds its defaults.

    The defaults are added when the folder is loaded: they grow with every version of transformers, and the
    model version is a hash over what stands here.
    """
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    architecture = header.metadata.get("general.architecture")
    try:
        config = dict(load_gguf_checkpoint(str(file), return_tensors=False)["config"])
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(
            f"{file} has architecture {architecture!r}, which transformers cannot read from GGUF ({error}). "
            "Use the model's safetensors folder."
        ) from error
    config.pop("_model_name_or_path", None)
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config["model_type"])
    if name is None:
        raise ModelError(f"{file} has architecture {architecture!r}, which is no decoder-only language model.")
    config["architectures"] = [name]
    for tensor in header.tensors:
        if tensor.name == ROPE_FACTORS:
            try:
                scaling = rope_scaling(_values_of(file, tensor).tolist(), config)
            except ValueError as error:
                raise ModelError(f"{file} cannot be imported: {error}. Use the model's safetensors folder.") from error
            if scaling is not None:
                config["rope_scaling"] = scaling
    return config


def _write_weights(file: Path, header: GgufHeader, names: _Names, folder: Path, progress: Progress) -> str:
    """Writes all weights and returns the name of their dtype."""
    from gguf import GGMLQuantizationType

    what, total, done = f"Importing {file.name}", sum(tensor.nbytes for tensor in header.tensors), 0
    progress(what, 0, total)
    dtype = _dtype(file, header, names)
    word = word_on_kinds(file.name, (GGMLQuantizationType(tensor.quantisation).name for tensor in header.tensors))
    if word is not None:
        _log.warning("%s", word)
    writer = ShardWriter(folder)
    for group in _by_block(header.tensors):
        tensors: dict[str, torch.Tensor] = {}
        for tensor in group:
            names.place(tensor, _values_of(file, tensor), tensors)
            done += tensor.nbytes
            progress(what, done, total)
        names.check_shapes(tensors)
        writer.add({name: value.to(dtype).contiguous() for name, value in tensors.items()})
    names.check_all_written()
    writer.close()
    return _name_of(dtype)


class _Names:
    """transformers' table from GGUF tensors to a model's weights, and its conversion of their values."""

    def __init__(self, file: Path, header: GgufHeader, config: dict[str, Any]) -> None:
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.modeling_gguf_pytorch_utils import (
            TENSOR_PROCESSORS,
            TensorProcessor,
            get_gguf_hf_weights_map,
        )

        self._file = file
        architecture = header.metadata["general.architecture"]
        self._processor = TENSOR_PROCESSORS.get(architecture, TensorProcessor)(config=config)
        with torch.device("meta"):  # without a dtype, which transformers would make the default of all threads
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=None)
        try:
            self._names: dict[str, str] = get_gguf_hf_weights_map(_Outer(model, depth=1), self._processor)
        except NotImplementedError as error:
            raise ModelError(f"{file}: the installed `gguf` package does not know it ({error}).") from error
        tied = getattr(model, "all_tied_weights_keys", None) or {}
        self._shapes = {name: weight.shape for name, weight in model.state_dict().items() if name not in tied}
        self._written: set[str] = set()

    def place(self, tensor: GgufTensor, values: Any, tensors: dict[str, torch.Tensor]) -> None:
        """Puts `values` (float32 array, in GGUF's layout) under the model's name into `tensors`, in its layout."""
        import numpy as np
        import torch

        if tensor.name == ROPE_FACTORS:
            return  # it is in the configuration
        result = self._processor.process(
            weights=values,
            name=tensor.name,
            tensor_key_mapping=self._names,
            parsed_parameters={"tensors": tensors},
        )
        if result.name is None:
            return  # a fused weight, which the processor has put there itself
        if result.name not in self._names:
            raise ModelError(
                f"{self._file} holds {tensor.name!r}, for which transformers has no place: without it the "
                "model would compute something else. Use the model's safetensors folder."
            )
        tensors[self._names[result.name]] = torch.from_numpy(np.ascontiguousarray(result.weights))

    def check_shapes(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Notes that `tensors` are written, and checks that they fit the architecture that was read."""
        for name, value in tensors.items():
            wanted = self._shapes.get(name, value.shape)
            if value.shape != wanted:
                raise ModelError(
                    f"{self._file} holds {name!r} as {list(value.shape)}, where transformers reads {list(wanted)} out "
                    "of its configuration. Use the model's safetensors folder."
                )
        self._written.update(tensors)

    def check_all_written(self) -> None:
        missing = sorted(self._shapes.keys() - self._written)
        if missing:
            shown = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
            raise ModelError(f"{self._file} lacks weights of its architecture: {shown}. It cannot be imported.")


class _Outer:
    """A model and its base model, without the modules inside.

    transformers looks for names in every module by itself, because a file may have been made from the base
    model; deeper modules never add a name, and asking all of them takes seconds.
    """

    def __init__(self, module: torch.nn.Module, depth: int) -> None:
        self._module, self._depth = module, depth
        self.config = getattr(module, "config", None)
        self.state_dict = module.state_dict

    def named_children(self) -> list[tuple[str, _Outer]]:
        if self._depth == 0:
            return []
        return [(name, _Outer(child, self._depth - 1)) for name, child in self._module.named_children()]


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(file: Path, header: GgufHeader, names: _Names) -> torch.dtype:
    """The smallest type that holds every value of the file exactly, if the file itself uses it; else float32.

    Norms are stored as float32 in files of half precision too, most of them with values that came from it.
    """
    import torch
    from gguf import GGMLQuantizationType as Kind

    kinds = {tensor.quantisation for tensor in header.tensors}
    for half, dtype in ((Kind.BF16, torch.bfloat16), (Kind.F16, torch.float16)):
        if half in kinds and kinds <= {half, Kind.F32}:
            placed: dict[str, torch.Tensor] = {}
            for tensor in header.tensors:
                if tensor.quantisation == Kind.F32:
                    names.place(tensor, _values_of(file, tensor), placed)
            if all(torch.equal(value, value.to(dtype).float()) for value in placed.values()):
                return dtype
    return torch.float32


def _values_of(file: Path, tensor: GgufTensor) -> Any:
    """The float32 values of a tensor, as an array of its shape."""
    import numpy as np
    from gguf import GGMLQuantizationType, dequantize

    try:
        raw = np.fromfile(file, dtype=np.uint8, count=tensor.nbytes, offset=tensor.start)
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror}.") from error
    if raw.nbytes != tensor.nbytes:
        raise ModelError(f"{file} became shorter while it was read. Run it again when it is complete.")
    kind = GGMLQuantizationType(tensor.quantisation)
    if kind == GGMLQuantizationType.F32:
        return raw.view(np.float32).reshape(tensor.shape)
    if kind == GGMLQuantizationType.F16:
        return raw.view(np.float16).astype(np.float32).reshape(tensor.shape)
    try:
        return dequantize(raw.reshape(*tensor.shape[:-1], -1), kind).reshape(tensor.shape)
    except NotImplementedError as error:
        raise ModelError(
            f"{file} is quantised as {kind.name}, which the installed `gguf` package cannot dequantise. Use "
            "a file in another quantisation."
        ) from error


def _by_block(tensors: Iterable[GgufTensor]) -> Iterator[list[GgufTensor]]:
    """The tensors in groups that belong together: what is outside the blocks first, then block after block.

    Weights that transformers fuses (experts' gate and up) are of one block.
    """
    groups: dict[int, list[GgufTensor]] = {}
    for tensor in tensors:
        found = _BLOCK.match(tensor.name)
        groups.setdefault(int(found[1]) if found else -1, []).append(tensor)
    for number in sorted(groups):
        yield sorted(groups[number], key=lambda tensor: tensor.name)


def _write_tokenizer(file: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(f"{file} has a tokenizer that transformers cannot read from GGUF ({error}).") from error
    tokenizer.save_pretrained(folder)


def _refuse_split(file: Path, header: GgufHeader) -> None:
    count = header.metadata.get("split.count", 1)
    if isinstance(count, int) and count > 1:
        raise ModelError(
            f"{file} is one of {count} parts. Merge them with llama.cpp's `llama-gguf-split --merge` and "
            "give the merged file."
        )


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def rope_scaling(factors: Sequence[float], config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `rope_scaling` of a configuration that gives `factors`, one for each pair of a head's dimensions.

    None if they are all 1, which scales nothing.

    Raises:
        ValueError: if no scaling that transformers knows gives them.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    factor = round(max(factors), 3)
    expected = _llama3(len(factors), float(config.get("rope_theta", 10000.0)), factor)
    if any(abs(found - wanted) > _TOLERANCE * wanted for found, wanted in zip(factors, expected, strict=True)):
        raise ValueError("its rotary frequencies are scaled in a way that is not known here")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW,
        "high_freq_factor": _HIGH,
        "original_max_position_embeddings": _CONTEXT,
    }


def _llama3(count: int, theta: float, factor: float) -> list[float]:
    """The divisors of `count` frequencies: 1 for short waves, `factor` for long ones, smooth in between."""
    divisors = []
    for index in range(count):
        turns = _CONTEXT * theta ** (-index / count) / (2 * pi)  # in the context the model was first trained on
        smooth = min(max((turns - _LOW) / (_HIGH - _LOW), 0.0), 1.0)
        divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors
