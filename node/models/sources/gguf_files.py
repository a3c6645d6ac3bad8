"""A GGUF file as a model: a folder of the cache with its configuration and tokenizer, whose weights stay in the file.
And which GGUF files of a repository are one model.

Nothing of the weights is written. The folder is made once for a path and header, and is found by both. That the weights
in the file are still the same is seen by the model version.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any, Final

from ...errors import ModelError, reason_of
from ..cache_dir import cache_dir, import_once, imported_folder, require_space
from ..checkpoint import write_gguf_note
from ..folder import ModelFolder, open_folder
from ..gguf.architectures import ARCHITECTURES, named
from ..gguf.config import is_read_anew, read_gguf_config
from ..gguf.header import MAX_PARTS, PART, gguf_parts, read_gguf_header
from ..gguf.weights import GgufWeights
from ..progress import Progress

_FORMAT: Final = 2
"""Part of the folder's name in the cache: goes up whenever something else would be written."""
_OLD_FORMAT: Final = 1
_TOKENIZER_BYTES: Final = 64 << 20
_KIND: Final = re.compile(r"(?:^|[-._])((?:UD-)?(?:I?Q\d\w*|MXFP4\w*|BF16|F16|F32))(?=[-.])", re.IGNORECASE)
_NO_MODEL: Final = ("mmproj", "imatrix")
_NAMED: Final = 12
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


# --- which files of a repository on a hub are meant by a kind of weights, or by one of their names


def kind_of(file: str) -> str | None:
    """The kind of weights that the name of a GGUF file states: "Q4_K_M"."""
    found = _KIND.findall(PurePosixPath(file).name)
    return found[-1].upper() if found else None


def choose_gguf(model_id: str, files: Iterable[str], wanted: str) -> tuple[str, ...]:
    """The GGUF files of one model, in order: those of the kind `wanted`, or those of which `wanted` is one.

    Raises:
        ModelError: there are none, or several; or a part is missing.
    """
    every = set(files)
    models = [name for name in sorted(every) if name.lower().endswith(".gguf") and not _is_extra(name)]
    first = [name for name in models if (part := PART.fullmatch(name)) is None or int(part["number"]) == 1]
    if wanted.lower().endswith(".gguf"):
        found = [name for name in models if name == wanted]
    else:
        found = [name for name in first if kind_of(name) == wanted.upper()]
    if len(found) != 1:
        kinds = list(dict.fromkeys(kind_of(name) or name for name in (found or first)))
        named = ", ".join(found or kinds[:_NAMED]) or "none"
        raise ModelError(
            f"{model_id!r} has {'several GGUF files' if found else 'no GGUF file'} {wanted!r}: name one of {named}"
            f" ({model_id}:KIND, or {model_id}/FILE.gguf)."
        )
    part = PART.fullmatch(found[0])
    if part is None:
        return (found[0],)
    count = int(part["count"])
    names = [f"{part['name']}-{number:05}-of-{part['count']}.gguf" for number in range(1, min(count, MAX_PARTS) + 1)]
    missing = [name for name in names if name not in every]
    if missing or not 1 <= count <= MAX_PARTS:
        raise ModelError(
            f"{model_id!r} is incomplete on the hub: of {count} parts {missing[:1] or 'too many'} is missing."
        )
    return tuple(names)


def name_of(model_id: str, files: Iterable[str], first: str) -> str:
    """What announcements call the model of the GGUF file `first`: by its kind, where that says which it is."""
    kind = kind_of(first)
    try:
        if kind is not None and choose_gguf(model_id, files, kind)[0] == first:
            return f"{model_id}:{kind}"
    except ModelError:
        pass
    return f"{model_id}/{first}"


def _is_extra(name: str) -> bool:
    return any(word in PurePosixPath(name).name.lower() for word in _NO_MODEL)
