"""A GGUF file as a model: a folder of the cache with its configuration and tokenizer, whose weights stay in the file.

Nothing of the weights is written. The folder is made once for a path and header, and is found by both. That the weights
in the file are still the same is seen by the model version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from ...errors import ModelError, reason_of
from ..cache_dir import cache_dir, import_once, imported_folder, require_space
from ..checkpoint import write_gguf_note
from ..folder import ModelFolder, open_folder
from ..gguf.architectures import ARCHITECTURES, named
from ..gguf.config import is_read_anew, read_gguf_config
from ..gguf.header import gguf_parts, read_gguf_header
from ..gguf.weights import GgufWeights
from ..progress import Progress

_FORMAT: Final = 2
"""Part of the folder's name in the cache: goes up whenever something else would be written."""
_OLD_FORMAT: Final = 1
_TOKENIZER_BYTES: Final = 64 << 20
_log = logging.getLogger(__name__)


def open_gguf(file: Path, progress: Progress) -> ModelFolder:
    """The model in `file`, or of which `file` is a part.

    Raises:
        ModelError: if the file is truncated, or of an architecture or form that cannot be served.
        MachineError: if the disk is full.
    """
    files = gguf_parts(file)
    remove_old_imports()
    path = import_once(
        _key(files), f"Reading {file.name}", lambda folder: write_folder(files, folder, progress), progress
    )
    return open_folder(path, file.stem)


def packaged_key(sha256: str) -> str:
    """The name in the cache of the folder of a GGUF file that is kept there itself."""
    return f"gguf-{sha256[:32]}-{_FORMAT}"


def _key(files: Sequence[Path]) -> str:
    sha = hashlib.sha256()
    for file in files:
        resolved = file.resolve()
        with resolved.open("rb") as stream:
            header = stream.read(read_gguf_header(file).end)
        sha.update(os.fsencode(resolved) + b"\0" + hashlib.sha256(header).digest())
        if is_read_anew(read_gguf_header(file)):
            sha.update(b"anew")
    return packaged_key(sha.hexdigest())


def write_folder(
    files: Sequence[Path], folder: Path, progress: Progress, config: Mapping[str, Any] | None = None
) -> None:
    """Writes configuration and tokenizer of `files` into `folder`, and where the weights are.

    `config` is what becomes `config.json`; it is read out of the files if it is not given.

    Raises:
        ModelError, MachineError: as `open_gguf`.
    """
    require_space(folder.parent, _TOKENIZER_BYTES, f"Reading {files[0].name}")
    progress(f"Reading {files[0].name}", 0, None)
    config = read_gguf_config(files) if config is None else dict(config)
    weights = _weights(files, config)
    weights.check_shapes()
    progress("Converting the tokenizer", 0, None)
    _write_tokenizer(files[0], folder, config)
    config["dtype"] = weights.dtype()
    ids = {name: id_ for name, id_ in config.items() if name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "config.json", config)
    inside = folder.resolve()
    write_gguf_note(folder, (file.name if file.parent.resolve() == inside else str(file.resolve()) for file in files))


def _weights(files: Sequence[Path], config: Mapping[str, Any]) -> GgufWeights:
    """Of the model that `config` describes, which is built without memory."""
    import torch
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.modeling_auto import AutoModelForCausalLM

    try:
        with torch.device("meta"):  # without a dtype, which transformers would make the default of all threads
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config), dtype=None)
    except Exception as error:  # what a header says may break transformers in any way
        raise ModelError(
            f"{files[0]}: transformers cannot build the {config.get('model_type')!r} model that its header describes "
            f"({reason_of(error)})"
        ) from error
    shapes = {name: tuple(weight.shape) for name, weight in model.state_dict().items()}
    return GgufWeights(tuple(files), config, shapes, getattr(model, "all_tied_weights_keys", None) or {})


def _write_tokenizer(file: Path, folder: Path, config: Mapping[str, Any]) -> None:
    from transformers.models.auto.configuration_auto import AutoConfig
    from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    # As AutoTokenizer chooses, which reads all of the file once more to know the configuration.
    kind = TOKENIZER_MAPPING.get(type(AutoConfig.for_model(**config)), PreTrainedTokenizerFast)
    if named(read_gguf_header(file)) in ARCHITECTURES or kind.__name__ == "MistralCommonBackend":
        kind = PreTrainedTokenizerFast  # the others of these read no GGUF
    try:
        tokenizer = kind.from_pretrained(str(file.parent), gguf_file=file.name, local_files_only=True)
    except (ValueError, KeyError, NotImplementedError) as error:
        raise ModelError(f"{file} has a tokenizer that transformers cannot read from GGUF ({error}).") from error
    tokenizer.save_pretrained(folder)


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def remove_old_imports() -> None:
    """Removes what earlier versions made of GGUF files: float32 copies, and packed blocks of these."""
    models = imported_folder("any").parent
    old = [path for path in models.glob(f"gguf-*-{_OLD_FORMAT}*") if path.is_dir()]
    old += (cache_dir() / "quantised").glob("packed*-float32-cpu*")
    if not old:
        return
    freed = 0
    for path in old:
        with suppress(OSError):
            freed += sum(file.stat().st_size for file in (path, *path.rglob("*")) if file.is_file())
            shutil.rmtree(path) if path.is_dir() else path.unlink()
            (models / f"{path.name}.lock").unlink(missing_ok=True)
    _log.warning(
        "removed the float32 copies that an earlier version had made of GGUF files (%.1f GB): weights are now read out "
        "of the files themselves, which are as they were. Their model versions are others than before",
        freed / 1e9,
    )
