"""Targets that read files which a stranger has handed to somebody."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final

import torch

from petalnode.crypto.bounded_json import BadJson, JsonLimits, parse_json
from petalnode.crypto.identity import Identity, IdentityError
from petalnode.node.blocks.kernels.library import library
from petalnode.node.blocks.kernels.tiles import TiledMatrix, held_as
from petalnode.node.cli.conversation.settings import for_a_person
from petalnode.node.client.chat import held_chat, read_dialogue
from petalnode.node.client.generation.sampling import Sampling
from petalnode.node.errors import BadInput, MachineError, ModelError
from petalnode.node.models.adapter import read_adapter
from petalnode.node.models.adapter_note import parse_note
from petalnode.node.models.checkpoint import Checkpoint, read_header, read_index
from petalnode.node.models.digests import part_digests
from petalnode.node.models.folder import open_folder
from petalnode.node.models.gguf import header as gguf_header
from petalnode.node.models.gguf.header import read_gguf_header
from petalnode.node.models.gguf.stored import row_count, stored_rows, stored_values
from petalnode.node.models.manifest import canonical_architecture
from petalnode.node.models.parts import EMBEDDINGS
from petalnode.node.models.sources.gguf_files import choose_gguf, name_of
from petalnode.node.models.sources.hub_parts import fetch_header
from petalnode.node.models.sources.ranges import RangedFile
from petalnode.node.placement.planning.machines_file import fleet_of, read_machines
from petalnode.node.trust.bundle import BadBundle, Bundle
from petalnode.node.trust.receipt_file import AnswerTokens, SignedReply, check, load, to_json
from petalnode.node.tuning.adapter_files import check_adapter
from petalnode.node.tuning.dataset import read_dataset
from petalnode.protocols import wire_pb2 as wire
from tests.fuzz import corpus
from tests.fuzz.harness import Target, parser
from tests.fuzz.mutation import Mutator
from tests.fuzz.parsers import bundle_bytes
from tests.quantised_checkpoints import LAYOUTS
from tests.tiny_gguf import BLOCKS

Files = dict[str, bytes]


def file_target(
    name: str, share: int, make: Callable[[Mutator], Files], read: Callable[[Path], object], *allowed: type[Exception]
) -> Target:
    """`read(folder)` gets a folder with these files, and may raise what it documents."""

    class Reader:
        def __init__(self, folder: Path) -> None:
            self._folder = folder

        async def feed(self, given: Files) -> None:
            for old in self._folder.iterdir():
                old.unlink()
            for file, data in given.items():
                (self._folder / file).write_bytes(data)
            try:
                read(self._folder)
            except allowed:
                pass

        def held(self) -> Mapping[str, int]:
            return {}

    @asynccontextmanager
    async def opened() -> AsyncIterator[Reader]:
        with tempfile.TemporaryDirectory() as folder:
            yield Reader(Path(folder))

    # `read` of a file takes as many bytes as it is allowed to give, before it knows how many there are.
    return Target(name, share, make, opened, peak=300 << 20)


def as_json(mutator: Mutator, content: Any) -> bytes:
    """Other values in it, or other bytes, or both."""
    try:
        data = json.dumps(mutator.json(content) if mutator.chance(0.8) else content).encode("utf-8", "surrogatepass")
    except RecursionError:
        data = b"[" * 100_000
    return mutator.bytes(data) if mutator.chance(0.25) else data


# --- models


@cache
def _gguf() -> bytes:
    from tests.tiny_gguf import write_tiny_gguf

    with tempfile.TemporaryDirectory() as folder:
        return write_tiny_gguf(Path(folder) / "model.gguf").read_bytes()


def _gguf_file(mutator: Mutator) -> Files:
    data = _gguf()
    head, rest = data[:12_000], data[12_000:]  # almost all of it is metadata; a change of weights says nothing
    return {"model.gguf": mutator.bytes(head) + (rest if mutator.chance(0.5) else b"")}


_HUB_FILES: Final = ("a-Q4_K_M.gguf", "b/a-BF16-00001-of-00002.gguf", "b/a-BF16-00002-of-00002.gguf", "mmproj-F16.gguf")
_WANTED: Final = ("Q4_K_M", "BF16")
_ENTRY: Final = b'{"model.norm.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
_SAFETENSORS: Final = len(_ENTRY).to_bytes(8, "little") + _ENTRY + bytes(8)


class _InMemory(RangedFile):
    """A file of a hub that is here."""

    data: bytes = b""

    def stream(self, start: int, end: int, stop: threading.Event | None = None) -> Iterator[bytes]:
        assert 0 <= start <= end <= self.nbytes
        yield self.data[start:end]


def _read_by_ranges(folder: Path) -> None:
    gguf_header._read.cache_clear()  # it remembers those of the last files
    for name, read in (("model.safetensors", read_header), ("model.gguf", read_gguf_header)):
        data = (folder / name).read_bytes()
        file = _InMemory(name, len(data), lambda: ("", {}))
        file.data = data
        with suppress(ModelError):
            fetch_header(file, folder, threading.Event())
            read(folder / name)


def _gguf_folder(mutator: Mutator) -> Files:
    """The file with its weights, or others in their place, and a note that names it."""
    data = _gguf()
    head, rest = data[:12_000], data[12_000:]
    files = {"model.gguf": (mutator.bytes(head) if mutator.chance(0.7) else head) + mutator.bytes(rest)}
    note = {"files": ["model.gguf"]}
    return files | {"gguf.json": as_json(mutator, note) if mutator.chance(0.2) else json.dumps(note).encode()}


def _read_gguf(folder: Path) -> None:
    """Digests as they are made, values as they are opened, and matrices as the kernels hold them."""
    gguf_header._read.cache_clear()  # it remembers those of the last files
    checkpoint = Checkpoint(folder, BLOCKS)
    checkpoint.check()
    part_digests(checkpoint, (EMBEDDINGS, 1))
    for file in checkpoint.gguf:
        for tensor in read_gguf_header(file).tensors[:8]:
            stored_values(file, tensor)
            shape = row_count(tensor), tensor.shape[-1]
            if library() is not None and held_as(tensor.kind, shape) is not None:
                rows = stored_rows(file, tensor, 0, shape[0])
                TiledMatrix.of_stored(tensor.kind, [rows], shape).rows(0, shape[0], torch.float32)


_TENSORS: Final = {
    "__metadata__": {"format": "pt"},
    "model.embed_tokens.weight": {"dtype": "F32", "shape": [4, 2], "data_offsets": [0, 32]},
    "model.layers.0.self_attn.q_proj.weight": {"dtype": "BF16", "shape": [2, 2], "data_offsets": [32, 40]},
    "model.layers.1.self_attn.q_proj.weight": {"dtype": "F16", "shape": [2, 2], "data_offsets": [40, 48]},
    "model.norm.weight": {"dtype": "F32", "shape": [2], "data_offsets": [48, 56]},
    "lm_head.weight": {"dtype": "F8_E4M3", "shape": [4, 2], "data_offsets": [56, 64]},
}
_LORA: Final = {
    "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": {
        "dtype": "F32",
        "shape": [2, 3],
        "data_offsets": [0, 24],
    },
    "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight": {
        "dtype": "F32",
        "shape": [5, 2],
        "data_offsets": [24, 64],
    },
}


def safetensors(mutator: Mutator, header: Any, *, changed: bool = True) -> bytes:
    text = as_json(mutator, header) if changed else json.dumps(header).encode()
    length = len(text).to_bytes(8, "little")
    if changed and mutator.chance(0.1):
        length = mutator.bytes(length)
    body = b"\0" * 64 if mutator.chance(0.8) else mutator.random.randbytes(mutator.random.choice((0, 63, 64, 65)))
    return length + text + body


_QUANTISED: Final = [stated for stated, _ in LAYOUTS.values()]


def _model_files(mutator: Mutator) -> Files:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 2,
        "text_config": {"num_hidden_layers": 2},
        "is_encoder_decoder": False,
        "rope_theta": 10000.0,
        "rope_scaling": {"factor": 8.0, "type": "linear"},
    }
    if mutator.chance(0.3):
        config["quantization_config"] = mutator.random.choice(_QUANTISED)
    index = {"metadata": {"total_size": 64}, "weight_map": dict.fromkeys(list(_TENSORS)[1:], "part.safetensors")}
    which = mutator.random.randrange(3)
    files = {
        "config.json": as_json(mutator, config) if which == 0 else json.dumps(config).encode(),
        "part.safetensors": safetensors(mutator, _TENSORS, changed=which == 1),
        "model.safetensors": safetensors(mutator, _TENSORS, changed=which == 1),
    }
    if mutator.chance(0.5):
        files["model.safetensors.index.json"] = as_json(mutator, index) if which == 2 else json.dumps(index).encode()
    return files


def _read_model(folder: Path) -> None:
    if (folder / "model.safetensors.index.json").exists():
        try:
            read_index(folder / "model.safetensors.index.json")
        except ModelError:
            pass
    try:
        read_header(folder / "model.safetensors")
    except ModelError:
        pass
    model = open_folder(folder, "model")
    canonical_architecture(model.config)
    with Checkpoint(folder, model.num_blocks) as checkpoint:
        checkpoint.check()
        for key in checkpoint.keys:
            checkpoint.slice(key)


# --- adapters


_NOTE: Final = {
    "format": 1,
    "method": "lora",
    "model": "model",
    "model_version": "00" * 32,
    "task": "language",
    "labels": ["a", "b"],
    "tags": ["t"],
    "results": {"loss": 1.5},
}
_LORA_CONFIG: Final = {
    "peft_type": "LORA",
    "r": 2,
    "lora_alpha": 4,
    "bias": "none",
    "target_modules": ["q_proj"],
    "alpha_pattern": {"q_proj": 8, "^model.layers.0.self_attn.q_proj": 2.0},
    "modules_to_save": ["score"],
    "use_rslora": True,
    "init_lora_weights": True,
    "base_model_name_or_path": "model",
    "task_type": "CAUSAL_LM",
}


def _adapter_files(mutator: Mutator) -> Files:
    which = mutator.random.randrange(3)
    prompt = {"prompt_embeddings": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}}
    lora = mutator.chance(0.7)
    config = _LORA_CONFIG if lora else {**_LORA_CONFIG, "peft_type": "PROMPT_TUNING"}
    note = {**_NOTE, "method": "lora" if lora else mutator.random.choice(("prompt", "deep-prompt"))}
    files = {
        "adapter_config.json": as_json(mutator, config) if which == 0 else json.dumps(config).encode(),
        "adapter_model.safetensors": safetensors(mutator, _LORA if lora else prompt, changed=which == 1),
        "deep_prompts.safetensors": safetensors(
            mutator,
            {**prompt, "deep_prompts": {"dtype": "F32", "shape": [2, 2, 4], "data_offsets": [0, 64]}},
            changed=which == 1,
        ),
    }
    if mutator.chance(0.7):
        files["petalnode.json"] = as_json(mutator, note) if which == 2 else json.dumps(note).encode()
    return files


def _read_adapter(folder: Path) -> None:
    try:
        check_adapter(folder)
    except BadInput:
        pass
    adapter = read_adapter(folder)
    adapter.check_fits(corpus.Span(0, 2), {0: {"self_attn.q_proj": (3, 5)}, 1: {}}, 3, 2)
    _ = adapter.identity


# --- what a person is given


def _dataset(mutator: Mutator) -> Files:
    lines: list[Any] = [
        {"text": "a text"},
        {"prompt": "asked", "completion": "answered"},
        {"messages": [{"role": "user", "content": "asked"}, {"role": "assistant", "content": "answered", "weight": 1}]},
        {"text": "a text", "label": mutator.random.choice(("1", "a", "--5", 3, "9" * 5000, "-", "٣"))},
    ]
    chosen = mutator.random.choice(lines)
    data = b"\n".join(as_json(mutator, chosen) if mutator.chance(0.5) else json.dumps(chosen).encode() for _ in "abc")
    return {"examples.jsonl": data}


_MACHINES: Final = {
    "machines": [
        {"name": "a", "device": "rtx3090", "region": "eu", "blocks": 4, "rtt_ms": {"b": 10, "us": 90}},
        {"name": "b", "memory_gb": 24, "ms_per_block": 1.5, "region": "us"},
        {"name": "c", "device": "t4"},
    ],
    "client": {"region": "eu", "rtt_ms": {"a": 3}, "ms_per_token": 2},
    "rtt_ms": {"eu": {"us": 80}},
    "model": {"blocks": 8, "block_mb": 200},
}
_COLUMNS: Final = b"name,device,region,blocks,memory_gb,ms_per_block,rtt_ms:b\n"
_CSV: Final = _COLUMNS + b"a,rtx3090,eu,4,,1.5,10\nb,,us,,24,2,\nclient,,eu,,,,3\n"


def _machines(mutator: Mutator) -> Files:
    if mutator.chance(0.3):
        return {"machines.csv": mutator.bytes(_CSV)}
    return {"machines.json": as_json(mutator, _MACHINES)}


def _read_machines(folder: Path) -> None:
    for file in folder.iterdir():
        read = read_machines(file)
        fleet_of(read, read.num_blocks or 8, read.block_bytes).problem(read.num_blocks or 8)


_MESSAGES: Final = {
    "messages": [
        {"role": "system", "content": "short"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "hi"},
    ]
}
_SETTINGS: Final = {"temperature": 0.6, "top_p": 0.9, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
_CHAT: Final = {
    "format": "petalnode-chat/1",
    "identity": "00" * 32,
    "model_version": "00" * 32,
    "turns": [["user", "hello"], ["assistant", "hi"]],
    "tokens": [1, 2, 3],
    "adapter": "",
    "session": {
        "links": [[corpus.SERVER.peer_id, 0, 3, "00" * 16, "00" * 16]],
        "max_length": 100,
        "position": 3,
        "route_epoch": 1,
    },
}


def _read_chat(folder: Path) -> None:
    with held_chat(folder / "chat.json"):
        pass


_ASKED: Final = wire.Step(position=3), corpus.tensor(1, 1, 8), AnswerTokens((1, 2, 3, 4, 5), 3)
_REPLY: Final = SignedReply(corpus.ATTACKER.peer_id, corpus.receipt(), *_ASKED)


def _read_json(data: bytes) -> None:
    """What is read is what others read, and goes over the wire."""
    for strict in (True, False):
        found = parse_json(data, JsonLimits(1 << 20, 20_000, strict=strict))
        assert repr(found) == repr(json.loads(data))
        json.dumps(found, ensure_ascii=False).encode()


TARGETS: Final[tuple[Target, ...]] = (
    file_target("GGUF file", 12, _gguf_file, lambda folder: read_gguf_header(folder / "model.gguf"), ModelError),
    file_target(
        "header by ranges",
        6,
        lambda mutator: _gguf_file(mutator) | {"model.safetensors": mutator.bytes(_SAFETENSORS)},
        _read_by_ranges,
        ModelError,
    ),
    parser(
        "GGUF files on a hub",
        3,
        lambda mutator: mutator.bytes(" ".join(_HUB_FILES).encode()).decode(errors="replace").split(" "),
        lambda names: [name_of("org/tiny", names, choose_gguf("org/tiny", names, wanted)[0]) for wanted in _WANTED],
        ModelError,
    ),
    file_target("GGUF weights", 12, _gguf_folder, _read_gguf, ModelError),
    file_target("model folder", 8, _model_files, _read_model, ModelError),
    file_target("adapter folder", 8, _adapter_files, _read_adapter, BadInput),
    file_target(
        "note of an adapter",
        10,
        lambda mutator: {"n": as_json(mutator, _NOTE)},
        lambda folder: parse_note((folder / "n").read_bytes(), "n"),
        BadInput,
    ),
    parser("JSON", 12, lambda mutator: as_json(mutator, _NOTE), _read_json, BadJson),
    file_target("dataset", 10, _dataset, lambda folder: read_dataset(folder / "examples.jsonl").labels, BadInput),
    file_target("machines", 12, _machines, _read_machines, BadInput),
    file_target(
        "saved conversation",
        3,
        lambda mutator: {"chat.json": as_json(mutator, _CHAT)},
        _read_chat,
        BadInput,
        MachineError,
    ),
    file_target(
        "file of receipts",
        6,
        lambda mutator: {"r.json": as_json(mutator, to_json("x", [_REPLY, _REPLY], tokens=True))},
        lambda folder: check(*load(folder / "r.json")),
        BadInput,
    ),
    file_target(
        "conversation of others",
        6,
        lambda mutator: {"chat.json": as_json(mutator, _MESSAGES)},
        lambda folder: read_dialogue(folder / "chat.json"),
        BadInput,
    ),
    file_target(
        "generation settings",
        6,
        lambda mutator: {"generation_config.json": as_json(mutator, _SETTINGS)},
        lambda folder: for_a_person(Sampling(), {}, folder),
    ),
    file_target(
        "identity file",
        1,
        lambda mutator: {
            "key": mutator.bytes(bytes.fromhex("08011240") + corpus.ATTACKER.seed + corpus.ATTACKER.public_key)
        },
        lambda folder: Identity.load(folder / "key"),
        IdentityError,
    ),
    file_target(
        "evidence on disk",
        2,
        lambda mutator: {"evidence": bundle_bytes(mutator)},
        lambda folder: Bundle.load(folder / "evidence"),
        BadBundle,
    ),
)
