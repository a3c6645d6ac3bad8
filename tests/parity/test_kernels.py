"""Blocks whose decode steps the compiled kernels compute, against the same blocks by torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from petalnode.node.blocks.architecture import block_sizes
from petalnode.node.blocks.client_part import load_client
from petalnode.node.blocks.kernels import choice, packing
from petalnode.node.blocks.kernels.tiles import StoredMatrix, TiledMatrix
from petalnode.node.blocks.passes import Batch, SpanPasses, run_through
from petalnode.node.blocks.quantisation import quantiser
from petalnode.node.blocks.quantisation.matrix import QuantisedLinear
from petalnode.node.blocks.quantisation.rounding import rounded
from petalnode.node.blocks.span import load_span
from petalnode.node.blocks.span_adapter import AdapterRows
from petalnode.node.errors import MachineError
from petalnode.node.models.manifest import compute_manifest
from petalnode.node.models.progress import no_progress
from petalnode.node.models.sources.gguf_files import open_gguf
from petalnode.node.verification.judging import distance
from petalnode.node.verification.tolerances import Kind, find_tolerance
from petalnode.protocols.ids import Span
from tests.noted_calls import calls_of
from tests.parity.kernel_spans import KNOWN, SPAN, conversation, lora, needs_kernels, off, pair, saved, values
from tests.tiny_gguf import BLOCKS, write_tiny_gguf
from tests.tiny_models import HIDDEN, save_tiny


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PETALNODE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(quantiser, "KEPT_FREE", 0)


@pytest.fixture
def gguf_folder(tmp_path: Path) -> Path:
    return open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf"), no_progress).path


@needs_kernels
@pytest.mark.parametrize("name", KNOWN)
def test_steps_are_those_of_torch(name: str, tmp_path: Path) -> None:
    by_torch, native = pair(saved(name, tmp_path / "model"))
    assert by_torch.step is None and native.step is not None
    for expected, given in zip(conversation(by_torch), conversation(native), strict=True):
        assert off(given, expected) < 1e-5


@needs_kernels
@pytest.mark.parametrize("name", KNOWN)
def test_tokens_at_once_equal_those_one_by_one(name: str, tmp_path: Path) -> None:
    blocks = pair(saved(name, tmp_path / "model"))[1]
    hidden = values(2, 12)
    at_once, one_by_one = (blocks.make_cache(2, 12, [0, 1]) for _ in range(2))
    for cache in (at_once, one_by_one):
        blocks.forward(hidden[:, :3], cache)  # with padding: by torch
    given = torch.cat([blocks.forward(hidden[:, 3:10], at_once), blocks.forward(hidden[:, 10:], at_once)], dim=1)
    expected = [blocks.forward(hidden[:, place : place + 1], one_by_one) for place in range(3, 12)]
    assert torch.equal(given, torch.cat(expected, dim=1))
    assert torch.equal(at_once.memory, one_by_one.memory)


@needs_kernels
def test_steps_of_a_part_of_the_blocks(tmp_path: Path) -> None:
    by_torch, native = pair(save_tiny("llama", tmp_path / "model"))
    for part in (Span(1, 2), Span(2, 4)):
        for expected, given in zip(conversation(by_torch, part=part), conversation(native, part=part), strict=True):
            assert off(given, expected) < 1e-5


@needs_kernels
@pytest.mark.parametrize("quantisation", ["none", "int8"])
def test_row_does_not_depend_on_rows_beside_it(tmp_path: Path, quantisation: str) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    blocks = load_span(folder, SPAN, dtype="float32", device="cpu", quantisation=quantisation, kernels="native")
    assert blocks.step is not None
    caches = [blocks.make_cache(1, 30) for _ in range(13)]
    prompts = [values(1, 3 + index, seed=index) for index in range(len(caches))]
    for cache, prompt in zip(caches, prompts, strict=True):
        blocks.forward(prompt, cache)
    steps = [(values(1, 1, seed=100 + index), cache) for index, cache in enumerate(caches)]
    together = blocks.decode(steps)
    for index, (hidden, cache) in enumerate(steps):
        cache.rollback(cache.length - 1)
        assert torch.equal(blocks.decode([(hidden, cache)])[0], together[index])
    for _, cache in steps:
        cache.rollback(cache.length - 1)
    for again, before in zip(blocks.decode(steps[::-1]), together[::-1], strict=True):
        assert torch.equal(again, before)


@needs_kernels
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt2", "qwen3_moe", "gpt_oss", "qwen3_next", "deepseek_v3"])
def test_steps_do_not_depend_on_number_of_threads(name: str, tmp_path: Path) -> None:
    blocks = load_span(saved(name, tmp_path / "model"), SPAN, dtype="float32", device="cpu", kernels="native")
    assert blocks.step is not None
    expected = conversation(blocks)
    blocks.step.threads = 3
    assert all(torch.equal(one, other) for one, other in zip(conversation(blocks), expected, strict=True))


@needs_kernels
def test_more_threads_are_used_where_they_are_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    monkeypatch.setattr(choice, "usable_threads", lambda: 2)
    for two, expected in ((0.97, 1), (0.6, 2)):
        seconds = iter([1.0, two])
        monkeypatch.setattr(choice, "best_time", lambda work, left=seconds: next(left))
        step = load_span(folder, SPAN, dtype="float32", device="cpu", kernels="native").step
        assert step is not None and step.threads == expected


ATTENTION = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


@needs_kernels
@pytest.mark.parametrize(
    ("name", "layers", "known"),
    [
        ("qwen3", (*ATTENTION, *MLP), True),
        ("gemma3", (ATTENTION[1], MLP[2]), True),
        ("mixtral", ATTENTION, True),
        ("gpt2", ("attn.c_proj", "mlp.c_fc", "mlp.c_proj"), True),
        ("gpt2", ("attn.c_attn",), False),  # three matrices in one
    ],
    ids=["qwen3", "gemma3", "mixtral", "gpt2", "gpt2-together"],
)
def test_adapters_of_some_of_the_rows(name: str, layers: tuple[str, ...], known: bool, tmp_path: Path) -> None:
    answers = []
    for blocks in pair(save_tiny(name, tmp_path / "model")):
        adapters = [lora(blocks, layers, 1), None, lora(blocks, layers[:1], 2, rank=16), None]
        part = Span(2, 4)
        caches = [blocks.make_cache(batch, 12, None, part) for batch in (1, 2, 1, 1)]
        for seed, (cache, adapter) in enumerate(zip(caches, adapters, strict=True)):
            blocks.forward(values(cache.batch, 3 + seed, seed=seed), cache, adapter)
        if blocks.step is not None:
            uses = [AdapterRows(adapter, 0, 1, 5) for adapter in adapters if adapter is not None]
            assert blocks.step.takes(caches, uses) == known
        for turn in range(2):
            steps = [(values(cache.batch, 1, seed=9 * turn + index), cache) for index, cache in enumerate(caches)]
            answers.append(torch.cat(blocks.decode(steps, adapters)))
    assert off(answers[2], answers[0]) < 1e-5 and off(answers[3], answers[1]) < 1e-5


@needs_kernels
def test_more_rows_than_kernels_take_go_to_torch(tmp_path: Path) -> None:
    _, native = pair(save_tiny("llama", tmp_path / "model"))
    assert native.step is not None
    assert native.step.takes([native.make_cache(32, 4)])
    many = [native.make_cache(20, 4), native.make_cache(13, 4)]
    assert not native.step.takes(many)
    outputs = native.decode([(values(cache.batch, 1), cache) for cache in many])
    assert [len(output) for output in outputs] == [20, 13]


@needs_kernels
@pytest.mark.parametrize("name", ["bloom", "granite", "deepseek_v3", "falcon"])
def test_other_blocks_go_to_torch(name: str, tmp_path: Path) -> None:
    by_torch, native = pair(save_tiny(name, tmp_path / "model"))
    assert native.step is None
    for expected, given in zip(conversation(by_torch), conversation(native), strict=True):
        assert off(given, expected) < 1e-5


@needs_kernels
def test_step_that_computes_something_else_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = choice.SpanStep.run
    monkeypatch.setattr(choice.SpanStep, "run", lambda *given: right(*given) * 1.001)
    _, native = pair(save_tiny("llama", tmp_path / "model"))
    assert native.step is None
    assert "the compiled kernels differ" in caplog.text


@needs_kernels
def test_a_slower_step_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    seconds = iter([1.0, 0.9])  # the kernels', then torch's
    monkeypatch.setattr(choice, "best_time", lambda work: next(seconds))
    assert load_span(folder, SPAN, dtype="float32", device="cpu", kernels="auto").step is None
    seconds = iter([1.0, 1.2])
    assert load_span(folder, SPAN, dtype="float32", device="cpu", kernels="auto").step is not None


@needs_kernels
def test_gguf_weights_are_held_in_their_own_form(gguf_folder: Path) -> None:
    by_torch, native = pair(gguf_folder, Span(0, BLOCKS))
    matrices = [
        module.matrix
        for block in native.stack.blocks
        for module in block.modules()
        if isinstance(module, QuantisedLinear)
    ]
    assert len(matrices) == 7 * BLOCKS
    assert all(isinstance(matrix, TiledMatrix) and matrix.form == "q4" for matrix in matrices)
    assert native.weight_bytes < 0.25 * by_torch.weight_bytes
    assert (by_torch.kernels, native.kernels) == ("torch", "native")
    assert native.quantisation == "none"  # what is announced: the values are those of the model
    for expected, given in zip(conversation(by_torch), conversation(native), strict=True):
        assert off(given, expected) < 1e-5


@needs_kernels
def test_prompts_of_packed_weights_go_through_the_step(gguf_folder: Path) -> None:
    by_torch, native = pair(gguf_folder, Span(0, BLOCKS))
    assert native.step is not None and native.step.takes_prompts
    hidden, caches = values(2, 150), [blocks.make_cache(2, 151, [0, 3]) for blocks in (by_torch, native)]
    for first, last, through_step in ((0, 4, False), (4, 150, True)):  # padding goes to torch
        with calls_of(choice.SpanStep.run) as ran:
            expected, given = (
                blocks.forward(hidden[:, first:last], cache)
                for blocks, cache in zip((by_torch, native), caches, strict=True)
            )
        assert off(given[:, -1], expected[:, -1]) < 1e-5
        assert [call["hidden"].shape[1] for call in ran] == ([146] if through_step else [])


@needs_kernels
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen3", torch.bfloat16), ("gpt2", torch.float16), ("mixtral", torch.bfloat16), ("youtu", torch.bfloat16)],
    ids=["qwen3", "gpt2", "mixtral", "youtu"],
)
def test_matrices_of_sixteen_bits_stay_so(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    by_torch, native = pair(saved(name, tmp_path / "model", dtype=dtype))
    assert native.step is not None and native.quantisation == "none"
    held = [
        module for block in native.stack.blocks for module in block.modules() if isinstance(module, QuantisedLinear)
    ]
    assert len(held) == len(SPAN) * {"qwen3": 7, "youtu": 8}.get(name, 4)
    assert all(
        isinstance(module.matrix, StoredMatrix) and module.matrix.tensors()["weight"].dtype == dtype for module in held
    )
    assert native.weight_bytes < 0.6 * by_torch.weight_bytes
    for expected, given in zip(conversation(by_torch), conversation(native), strict=True):
        assert off(given, expected) < 1e-5


@needs_kernels
def test_matrices_of_a_mapped_checkpoint_are_not_copied(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model", dtype=torch.bfloat16)
    blocks = load_span(folder, SPAN, dtype="float32", device="cpu", kernels="native")
    matrix = blocks.stack.blocks[0].self_attn.q_proj.matrix
    before = matrix.tensors()["weight"].clone()
    data = bytearray((folder / "model.safetensors").read_bytes())
    place = data.find(before.view(torch.int16).numpy().tobytes())
    with (folder / "model.safetensors").open("r+b") as file:  # not to be done to a file in use
        file.seek(place)
        file.write(bytes(2))
    assert not torch.equal(matrix.tensors()["weight"], before)


@needs_kernels
def test_gradients_through_packed_weights(gguf_folder: Path) -> None:
    found = []
    for blocks in pair(gguf_folder, Span(0, BLOCKS)):
        batch = Batch(Span(0, BLOCKS), values(2, 5))
        found.append(run_through(SpanPasses(blocks, 1 << 30).backward(batch, values(2, 5, seed=7))).hidden)
    assert off(found[1], found[0]) < 1e-5


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("Q4_0", "q4_half"),
        ("Q8_0", "q8_half"),
        ("Q4_K", "q4_k"),
        ("Q5_K", "q5_k"),
        ("Q6_K", "q6_k"),
        ("Q2_K", "q2_k"),
        ("BF16", "bf16"),
    ],
)
def test_steps_with_the_kinds_that_people_have(tmp_path: Path, kind: str, form: str) -> None:
    folder = open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf", kind), no_progress)
    by_torch, native = pair(folder.path, Span(0, BLOCKS))
    matrix = native.stack.blocks[0].mlp.down_proj.matrix
    assert isinstance(matrix, TiledMatrix) and matrix.form == form and native.step is not None
    for seed in (0, 1):
        hidden = torch.randn(2, 6, native.hidden_size, generator=torch.Generator().manual_seed(seed))
        found = []
        for blocks in (by_torch, native):
            cache = blocks.make_cache(2, 6)
            found.append(blocks.forward(hidden[:, :5], cache))
            found += blocks.decode([(hidden[:, 5:], cache)])
        assert off(found[2], found[0]) < 1e-5 and off(found[3], found[1]) < 1e-5


@needs_kernels
def test_what_plan_says_is_what_blocks_take(tmp_path: Path) -> None:
    for kind in ("Q4_0", "Q6_K", "F32"):
        folder = open_gguf(write_tiny_gguf(tmp_path / f"{kind}.gguf", kind), no_progress)
        for kernels in ("native", "torch"):
            sizes = block_sizes(folder.path, "float32", "none", kernels)
            blocks = load_span(folder.path, Span(0, 2), dtype="float32", device="cpu", kernels=kernels)
            assert sum(sizes.held[:2]) == blocks.weight_bytes, (kind, kernels)
        if kind != "F32":
            assert sizes.whole[0] > 3 * block_sizes(folder.path, "float32", "none", "native").held[0]


@needs_kernels
def test_model_version_does_not_depend_on_form(tmp_path: Path) -> None:
    folder = open_gguf(write_tiny_gguf(tmp_path / "tiny.gguf"), no_progress)
    before = compute_manifest(folder).version
    load_span(folder.path, Span(0, BLOCKS), dtype="float32", device="cpu", kernels="native")
    assert compute_manifest(folder).version == before


@needs_kernels
@pytest.mark.parametrize(
    ("name", "quantisation"),
    [
        ("llama", "int8"),
        ("llama", "nf4"),
        ("phi3", "int8"),
        ("gpt2", "nf4"),
        ("mixtral", "int8"),
        ("gpt_oss", "int8"),
        ("qwen3_5", "nf4"),
    ],
)
def test_quantised_weights_by_the_kernels(tmp_path: Path, name: str, quantisation: str) -> None:
    wide = {} if name == "gpt2" else {"intermediate_size": 128}  # whole blocks of NF4
    by_torch, native = pair(save_tiny(name, tmp_path / "model", **wide), SPAN, quantisation)
    assert native.quantisation == quantisation and native.step is not None
    for expected, given in zip(conversation(by_torch), conversation(native), strict=True):
        assert off(given, expected) < (1e-2 if quantisation == "int8" else 3e-2)  # torch's round activations or scales


@needs_kernels
@pytest.mark.parametrize("quantisation", ["none", "int8", "nf4"])
def test_validators_find_the_kernels_answers_right(tmp_path: Path, quantisation: str) -> None:
    """They recompute by torch, and judge by what was measured of servers of the same dtype and quantisation."""
    folder = save_tiny("llama", tmp_path / "model", intermediate_size=128)
    by_torch, native = pair(folder, SPAN, quantisation)
    tolerance = find_tolerance(Kind("float32", quantisation, blocks=len(SPAN)))
    assert tolerance is not None and native.step is not None
    for truth, claimed in zip(conversation(by_torch), conversation(native), strict=True):
        assert distance(claimed, truth).worst < tolerance.ok_worst


ROUNDS = "none/activations=int8"


@needs_kernels
@pytest.mark.parametrize("name", ["llama", "gpt2", "phi3", "mixtral", "gemma3", "qwen3_next"])
def test_steps_with_rounded_activations_are_those_of_torch(name: str, tmp_path: Path) -> None:
    """Block by block: over several, a last bit that decides a rounding makes as much as the roundings do."""
    folder = saved(name, tmp_path / "model")
    exact = load_span(folder, SPAN, dtype="float32", device="cpu")
    by_torch, native = pair(folder, SPAN, ROUNDS)
    assert native.quantisation == by_torch.quantisation == ROUNDS and native.step is not None
    for part in (Span(1, 2), Span(2, 3)):
        pairs = zip(conversation(exact, part=part), conversation(by_torch, part=part), strict=True)
        assert all(1e-4 < off(given, expected) < 0.1 for expected, given in pairs)
        pairs = zip(conversation(by_torch, part=part), conversation(native, part=part), strict=True)
        assert all(off(given, expected) < 5e-2 for expected, given in pairs)


def test_rounded_activations_without_the_library(gguf_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks see what entered, and gradients are those of layers that do not round."""
    monkeypatch.setattr(choice, "library", lambda: None)
    blocks = load_span(gguf_folder, Span(0, 1), dtype="float32", device="cpu", quantisation=ROUNDS, kernels="auto")
    layer = blocks.stack.blocks[0].self_attn.q_proj
    given = values(3, 2).requires_grad_()
    seen = []
    layer.register_forward_hook(lambda module, args, output: seen.append(args[0]))
    output = layer(given)
    assert torch.equal(output, torch.nn.functional.linear(rounded(given.detach()), layer.weight))
    assert torch.equal(seen[0], given)
    (gradient,) = torch.autograd.grad(output.sum(), given)
    assert off(gradient, layer.weight.sum(0).expand_as(gradient)) < 1e-6


@needs_kernels
def test_rounded_products_of_weights_in_their_own_form(gguf_folder: Path) -> None:
    """Prompts, too; and gradients of the values."""
    _, native = pair(gguf_folder, Span(0, BLOCKS), ROUNDS)
    layer = native.stack.blocks[0].mlp.down_proj
    assert isinstance(layer, QuantisedLinear) and isinstance(layer.matrix, TiledMatrix)
    into = layer.in_features
    rows = torch.randn(70, into, generator=torch.Generator().manual_seed(2)).requires_grad_()
    expected = rounded(rows.detach()) @ layer.matrix.rows(0, layer.out_features, torch.float32).t()
    assert off(layer(rows).detach(), expected) < 1e-6
    (gradient,) = torch.autograd.grad(layer(rows).sum(), rows)
    assert off(gradient[0], layer.matrix.rows(0, layer.out_features, torch.float32).sum(0)) < 1e-5


def test_rounded_activations_are_of_float32_only(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    with pytest.raises(MachineError, match="--activations int8 computes in float32, not in bfloat16"):
        load_span(folder, SPAN, dtype="bfloat16", device="cpu", quantisation=ROUNDS)


def test_without_the_library_torch_computes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "library", lambda: None)
    folder = save_tiny("llama", tmp_path / "model")
    blocks = load_span(folder, SPAN, dtype="float32", device="cpu", kernels="auto")
    assert blocks.step is None and blocks.kernels == "torch"
    with pytest.raises(MachineError, match="make setup"):
        load_span(folder, SPAN, dtype="float32", device="cpu", kernels="native")


def test_the_kernels_compute_in_float32_only(tmp_path: Path) -> None:
    folder = save_tiny("llama", tmp_path / "model")
    assert load_span(folder, SPAN, dtype="bfloat16", device="cpu", kernels="auto").step is None
    with pytest.raises(MachineError, match="not in bfloat16 on cpu"):
        load_span(folder, SPAN, dtype="bfloat16", device="cpu", kernels="native")


@needs_kernels
def test_clients_ends_are_held_in_bits_of_file(gguf_folder: Path) -> None:
    by_torch = load_client(gguf_folder, device="cpu", dtype="float32", kernels="torch")
    native = load_client(gguf_folder, device="cpu", dtype="float32", kernels="native")
    head, table = native.model.get_output_embeddings(), native.model.get_input_embeddings()
    assert isinstance(head, QuantisedLinear) and isinstance(table, packing.HeldEmbedding)
    assert not isinstance(by_torch.model.get_output_embeddings(), QuantisedLinear)
    ids = torch.tensor([[5, 319, 0, 17], [17, 16, 15, 5]])
    assert torch.equal(native.embed(ids), by_torch.embed(ids))
    assert native.embed(ids[:, :0]).shape == (2, 0, HIDDEN)
    with pytest.raises(IndexError, match="out of range"):
        table(torch.tensor([320]))
    for tokens in (1, 5, 40):
        hidden = values(1, tokens)
        assert off(native.head(hidden), by_torch.head(hidden)) < 1e-6
    labels = torch.arange(6).unsqueeze(0)
    expected = by_torch.loss_gradient(values(1, 6), labels)
    assert off(native.loss_gradient(values(1, 6), labels), expected) < 1e-5


@needs_kernels
def test_a_head_of_other_weights_stays_with_torch(tmp_path: Path) -> None:
    client = load_client(save_tiny("llama", tmp_path / "model"), device="cpu", dtype="float32", kernels="native")
    assert not isinstance(client.model.get_output_embeddings(), packing.TiledLinear)
