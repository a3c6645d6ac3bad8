"""The model version, and the manifest that it is the hash of.

A manifest holds the canonical architecture (`canonical_architecture`) and digests of the embeddings, each block, and
norm and head (`part_digests`). It is a few kilobytes, and is made by a node that has the whole model. A node that holds
a part of the model checks that part by it.

A folder may have it as a file (`MANIFEST_FILE`), next to the weights. Who publishes a model, on the hub or elsewhere,
says by it which version its repository is at a commit. Who has only a part of the weights need not ask strangers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from ...crypto.bounded_json import JsonLimits, parse_json_object
from ...crypto.canonical import Field, digest
from ...protocols.wire_pb2 import Manifest as WireManifest
from ..errors import ModelError
from .checkpoint import Checkpoint
from .digests import part_digests
from .folder import MAX_BLOCKS, TEXT_FIELDS, ModelFolder
from .parts import EMBEDDINGS, HEAD, Need, Part, describe, parts_of_need
from .progress import Progress, no_progress

_DOMAIN = "petalnode/model/1"
MANIFEST_FILE: Final = "petalnode-manifest.json"
_DIGEST_BYTES = 32
MAX_CONFIG_BYTES = 256 << 10
MAX_WIRE_BYTES = MAX_CONFIG_BYTES + (MAX_BLOCKS + 2) * (_DIGEST_BYTES + 8) + 64
MAX_FILE_BYTES: Final = 2 * MAX_WIRE_BYTES + (MAX_BLOCKS + 2) * 8
"""Of a manifest file: digests are written in hexadecimal digits, and a configuration with its quotes escaped."""
_FILE_LIMITS: Final = JsonLimits(MAX_FILE_BYTES, values=2 * MAX_BLOCKS + 64, depth=2)
_LEFT_OUT: Final = frozenset(
    {
        *("transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "_model_name_or_path"),
        *("torch_dtype", "dtype", "torchscript", "use_bfloat16"),
        *("attn_implementation", "_attn_implementation", "_attn_implementation_autoset", "use_cache"),
        *("output_attentions", "output_hidden_states", "output_scores", "return_dict", "return_dict_in_generate"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id"),
        *("decoder_start_token_id", "forced_bos_token_id", "forced_eos_token_id", "suppress_tokens"),
        *("begin_suppress_tokens", "bad_words_ids", "task_specific_params", "prefix", "tokenizer_class"),
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups"),
        *("diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "chunk_size_feed_forward", "pruned_heads", "finetuning_task"),
        *("initializer_range", "initializer_factor", "gradient_checkpointing"),
        *("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout"),
        *("layerdrop", "activation_dropout", "classifier_dropout", "summary_first_dropout"),
        *("id2label", "label2id", "problem_type", "auto_map", "license"),
    }
)
"""Fields of a configuration that do not decide what is computed: who wrote it and where, the dtype to load in (the
tensors' own dtypes are hashed with them), how to compute, what only generation and what only training uses."""


@dataclass(frozen=True)
class Manifest:
    """What a model version is the hash of.

    Attributes:
        config: canonical JSON of the architecture.
        embeddings, head: 32-byte digests.
        blocks: one 32-byte digest per transformer block.

    Raises:
        ModelError: if a size is out of range: manifests come from peers, too.
    """

    config: bytes
    embeddings: bytes
    blocks: tuple[bytes, ...]
    head: bytes

    def __post_init__(self) -> None:
        if not 0 < len(self.config) <= MAX_CONFIG_BYTES:
            raise ModelError(f"A manifest's configuration of {len(self.config)} bytes is out of range.")
        if not 1 <= len(self.blocks) <= MAX_BLOCKS:
            raise ModelError(f"A manifest of {len(self.blocks)} blocks is out of range (1 to {MAX_BLOCKS}).")
        if any(len(sha) != _DIGEST_BYTES for sha in (self.embeddings, self.head, *self.blocks)):
            raise ModelError("A manifest's digest is not 32 bytes long.")

    @cached_property
    def version(self) -> bytes:
        """The model version: 32 bytes."""
        return digest(_DOMAIN, self.config, self.embeddings, list(self.blocks), self.head)

    def digest_of(self, part: Part) -> bytes:
        if part == EMBEDDINGS:
            return self.embeddings
        return self.head if part == HEAD else self.blocks[part]

    def to_wire(self) -> bytes:
        """A serialised `wire.proto` Manifest, at most `MAX_WIRE_BYTES` long."""
        return WireManifest(
            config=self.config, embeddings=self.embeddings, blocks=self.blocks, head=self.head
        ).SerializeToString(deterministic=True)

    @classmethod
    def from_wire(cls, data: bytes, version: bytes | None = None) -> Manifest:
        """Reads what `to_wire` wrote. `data` is not trusted.

        Args:
            version: the model version that it must be the manifest of, if known.

        Raises:
            ModelError: if it is malformed, too large, or the manifest of another version.
        """
        if len(data) > MAX_WIRE_BYTES:
            raise ModelError(f"A manifest of {len(data)} bytes is out of range.")
        message = WireManifest()
        try:
            message.ParseFromString(data)
        except Exception as error:  # protobuf's DecodeError derives from Exception alone
            raise ModelError("A manifest that cannot be read.") from error
        manifest = cls(message.config, message.embeddings, tuple(message.blocks), message.head)
        if version is not None and manifest.version != version:
            raise ModelError(
                f"The manifest is that of model version {manifest.version.hex()[:12]}, not of {version.hex()[:12]}."
            )
        return manifest

    def to_json(self) -> str:
        """What `MANIFEST_FILE` has."""
        fields = {
            "model_version": self.version.hex(),
            "config": self.config.decode(),
            "embeddings": self.embeddings.hex(),
            "blocks": [sha.hex() for sha in self.blocks],
            "head": self.head.hex(),
        }
        return json.dumps(fields, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Reads what `to_json` wrote. `text` is not trusted.

        Raises:
            ModelError: if it is malformed, or its version is not that of its digests.
        """
        try:
            said = parse_json_object(text, _FILE_LIMITS)
            blocks = tuple(bytes.fromhex(sha) for sha in said["blocks"])
            parts = bytes.fromhex(said["embeddings"]), blocks, bytes.fromhex(said["head"])
            manifest = cls(said["config"].encode(), *parts)
            if bytes.fromhex(said["model_version"]) != manifest.version:
                raise ModelError("A manifest whose model version is not that of its digests.")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ModelError("A manifest that cannot be read.") from error
        return manifest


def compute_manifest(folder: ModelFolder, progress: Progress = no_progress) -> Manifest:
    """The manifest of a model that is on this disk as a whole. Reads all of it once; later calls are quick.

    Raises:
        ModelError: if a part is missing, truncated or malformed; names the file.
    """
    checkpoint = Checkpoint(folder.path, folder.num_blocks)
    parts = parts_of_need("all", folder.num_blocks)
    digests = part_digests(checkpoint, parts, progress, f"Checking {folder.name}")
    return Manifest(
        config=canonical_architecture(folder.config),
        embeddings=digests[EMBEDDINGS],
        blocks=tuple(digests[block] for block in range(folder.num_blocks)),
        head=digests[HEAD],
    )


def check_pinned(folder: ModelFolder, version: bytes) -> None:
    """
    Raises:
        ModelError: another model version than this was asked for.
    """
    if folder.pinned is not None and not version.hex().startswith(folder.pinned):
        raise ModelError(
            f"{folder.name} in {folder.path} is model version {version.hex()[:16]}, not {folder.pinned}, which was "
            "asked for. Use the folder or revision that has it, or leave the version out."
        )


def verify_part(folder: ModelFolder, manifest: Manifest, need: Need, progress: Progress = no_progress) -> None:
    """Checks that the parts of `folder` that `need` asks for are those of `manifest`; reads only them, and once.

    Raises:
        ModelError: if they are not: names the block or part that differs.
    """
    if canonical_architecture(folder.config) != manifest.config:
        raise ModelError(
            f"{folder.path / 'config.json'} describes another architecture than the swarm's model "
            f"{manifest.version.hex()[:12]} has. Use the folder or revision that the swarm was started with."
        )
    parts = folder.parts(need)
    if not parts:
        return
    checkpoint = Checkpoint(folder.path, folder.num_blocks)
    digests = dict(part_digests(checkpoint, parts, progress, f"Checking {folder.name}"))
    if checkpoint.layout.drafts and digests.get(EMBEDDINGS, manifest.embeddings) != manifest.embeddings:
        older = Checkpoint(folder.path, folder.num_blocks, drafts=False)
        digests |= part_digests(older, (EMBEDDINGS,), progress, f"Checking {folder.name}")
    differing = [part for part, found in digests.items() if found != manifest.digest_of(part)]
    if differing:
        raise ModelError(
            f"The weights in {folder.path} are not those of the swarm's model {manifest.version.hex()[:12]}: "
            f"{_listed(differing)} {'differs' if len(differing) == 1 else 'differ'}. Use the folder or "
            "revision that the swarm was started with, or copy the model again."
        )


def stated_manifest(folder: ModelFolder, need: Need, progress: Progress = no_progress) -> Manifest | None:
    """The manifest that the folder has as a file, which the parts that `need` asks for were checked against. None if it
    has none, or if another version was asked for.

    Raises:
        ModelError: it cannot be read, or is that of other weights than those beside it.
    """
    file = folder.path / MANIFEST_FILE
    try:
        with file.open("rb") as stream:
            text = stream.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ModelError(f"Cannot read {file}: {error.strerror}.") from error
    instead = "Get the model again, or remove that file: then servers of the swarm are asked."
    if len(text) > MAX_FILE_BYTES:
        raise ModelError(f"{file} is larger than {MAX_FILE_BYTES >> 10} KiB: it is no manifest. {instead}")
    try:
        manifest = Manifest.from_json(text)
        if folder.pinned is not None and not manifest.version.hex().startswith(folder.pinned):
            return None
        verify_part(folder, manifest, need, progress)
    except ModelError as error:
        raise ModelError(f"{file} is not that of the model beside it: {error} {instead}") from error
    return manifest


def write_manifest(manifest: Manifest, folder: Path) -> Path:
    """Writes the manifest into a folder, and returns the file.

    Raises:
        OSError: it cannot be written.
    """
    file = folder / MANIFEST_FILE
    file.write_text(manifest.to_json())
    return file


def held_weights(folder: ModelFolder, need: Need, progress: Progress = no_progress) -> bytes:
    """32 bytes that stand for what is here of a model: its name, the hub's commit, its architecture, and the parts that
    `need` asks for.

    Raises:
        ModelError: if a part is missing, truncated or malformed; names the file.
    """
    parts = folder.parts(need)
    digests: Mapping[Part, bytes] = {}
    if parts:
        digests = part_digests(Checkpoint(folder.path, folder.num_blocks), parts, progress, f"Checking {folder.name}")
    held: list[Field] = [[str(part), digests[part]] for part in parts]
    named = [folder.name, folder.revision or ""]
    return digest(f"{_DOMAIN}/held", named, canonical_architecture(folder.config), held)


def _listed(parts: Iterable[Part]) -> str:
    names = [describe(part) for part in parts]
    return ", ".join(names) if len(names) <= 6 else f"{', '.join(names[:6])} and {len(names) - 6} more parts"


def canonical_architecture(config: Mapping[str, Any]) -> bytes:
    """Canonical JSON of `config` without what does not decide the computation.

    The configuration is taken as it was written, field by field. So every version of transformers gives the same bytes.
    Keys are sorted; a whole number is written without a fraction: `10000` and `10000.0` are one value that writers
    spell differently.

    Raises:
        ModelError: it is nested deeper than any configuration.
    """
    try:
        return json.dumps(_kept(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode()
    except RecursionError:
        raise ModelError("The configuration is nested too deeply: it is no model's.") from None


def _kept(config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _kept(value) if key in TEXT_FIELDS and isinstance(value, Mapping) else _normal(value)
        for key, value in config.items()
        if key not in _LEFT_OUT
    }


def _normal(value: Any) -> Any:
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, Mapping):
        return {key: _normal(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_normal(item) for item in value]
    return value
