"""The compiled kernels: each form of weights, on each instruction set that this processor has, on the same vectors."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from petalnode.node.blocks.kernels import library as library_module
from petalnode.node.blocks.kernels.library import ISAS, Library, Matrix, build, library
from petalnode.node.blocks.kernels.tiles import (
    FORMS,
    STORED,
    StoredMatrix,
    TiledInt8Matrix,
    TiledMatrix,
    TiledNf4Matrix,
    held_as,
)
from petalnode.node.blocks.quantisation.matrix import Int8Matrix, Nf4Matrix
from petalnode.node.blocks.quantisation.rounding import rounded
from tests.tiny_gguf import stored_rows

pytestmark = pytest.mark.skipif(library() is None, reason="the kernels are not built (make setup, with a C compiler)")

SHAPE = (150, 192)  # rows that are no whole number of tiles
MOST_ROWS = 33  # one more than the kernels take


def found() -> Library:
    kernels = library()
    assert kernels is not None
    return kernels


def isas() -> list[str]:
    """The instruction sets of this processor that there are kernels for."""
    kernels = library()
    if kernels is None:
        return ["plain"]
    before = kernels.isa
    try:
        return [isa for isa in ISAS if kernels.select(isa)]
    finally:
        kernels.select(before)


@pytest.fixture(params=isas())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    kernels, before = found(), found().isa
    assert kernels.select(request.param)
    yield request.param
    kernels.select(before)


def weights(shape: tuple[int, int] = SHAPE, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.3


def held(kind: str, shape: tuple[int, int] | None = None) -> tuple[TiledMatrix, torch.Tensor, int]:
    """A random matrix of a GGUF file's kind, its values, and the bytes that the file has for it."""
    shape = shape or ((48, 512) if gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][0] == 256 else SHAPE)
    rows = np.ascontiguousarray(stored_rows(kind, shape, np.random.default_rng(3))).view(np.uint8)
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[kind])
    exact = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(shape)
    return TiledMatrix.of_stored(kind, [rows], shape), exact, rows.nbytes


def matrices() -> list[tuple[str, TiledMatrix, torch.Tensor]]:
    """(name, matrix, the float32 values that it stands for)."""
    made: list[tuple[str, TiledMatrix, torch.Tensor]] = []
    for kind in STORED:
        matrix, values, _ = held(kind)
        made.append((kind, matrix, values))
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        narrow = weights().to(dtype)
        made.append((str(dtype), StoredMatrix(narrow), narrow.float()))
    nf4, int8 = Nf4Matrix.quantise(weights()), Int8Matrix.quantise(weights())
    made.append(("nf4", TiledNf4Matrix.quantise(weights()), nf4.rows(0, SHAPE[0], torch.float32)))
    made.append(("int8", TiledInt8Matrix.quantise(weights()), int8.rows(0, SHAPE[0], torch.float32)))
    return made


def rows_for(values: torch.Tensor, count: int = MOST_ROWS) -> torch.Tensor:
    return torch.randn(count, values.shape[1], generator=torch.Generator().manual_seed(9))


@pytest.mark.parametrize("kind", STORED)
def test_matrix_takes_about_what_it_takes_in_file(kind: str) -> None:
    """Most as much; those of 5 bits are held in 6, of 2 and 3 in 4."""
    matrix, _, nbytes = held(kind, (64, 1024))
    assert held_as(kind, (64, 1024)) == matrix.form
    assert matrix.nbytes == FORMS[matrix.form].nbytes((64, 1024)) or kind.endswith("16")
    more = {"2": 1.96, "3": 1.33, "5": 1.21, "X": 1.18}.get(kind[1], 1.03)
    assert nbytes <= matrix.nbytes <= nbytes * more


def test_formless_weights_are_known_before_they_are_read() -> None:
    for kind, shape in (
        ("IQ2_XS", (16, 256)),
        ("F32", (16, 64)),
        ("Q4_K", (16, 128)),
        ("Q4_0", (16, 48)),
        ("F16", (16, 8)),
    ):
        assert held_as(kind, shape) is None
    rows = stored_rows("Q4_K", (16, 256), np.random.default_rng(0))
    for shape in ((32, 128), (32, 256), (16, 512), (15, 256)):
        with pytest.raises(ValueError, match="not the bytes of a matrix"):
            TiledMatrix.of_stored("Q4_K", [rows], shape)
    for odd in (rows[:, :-1], rows[::2]):
        with pytest.raises(ValueError, match="not the bytes of a matrix"):
            TiledMatrix.of_stored("Q4_K", [odd], (len(odd), 256))
    for parts in ([rows[:8], rows[8:]], [rows, rows], [rows[:0]]):
        with pytest.raises(ValueError, match="not the bytes of a matrix"):
            TiledMatrix.of_stored("Q4_K", parts, (16, 256))


@pytest.mark.parametrize("kind", STORED)
def test_matrix_read_in_pieces_is_same(kind: str) -> None:
    rows = np.ascontiguousarray(stored_rows(kind, (84, 512), np.random.default_rng(5))).view(np.uint8)
    whole = TiledMatrix.of_stored(kind, [rows], (84, 512)).tensors()
    parts = TiledMatrix.of_stored(kind, [rows[:32], rows[32:48], rows[48:]], (84, 512)).tensors()
    assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)


def test_values_are_those_of_weights_to_bit(isa: str) -> None:
    for name, matrix, values in matrices():
        assert torch.equal(matrix.rows(0, len(values), torch.float32), values), name
        assert torch.equal(matrix.rows(16, 33, torch.float32), values[16:33]), name


def test_products_are_exact_to_rounding(isa: str) -> None:
    for name, matrix, values in matrices():
        rows = rows_for(values)
        exact = rows.double() @ values.double().t()
        for count in (1, 2, 3, 5, 8, 16, 32, MOST_ROWS):
            off = (matrix.product(rows[:count]) - exact[:count]).norm() / exact[:count].norm()
            rounded = name == "int8" and count > 32  # as `Int8Matrix` rounds activations: to sixteen bits
            assert off < (1e-4 if rounded else 1e-6), (name, count)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K", "Q8_0", "Q6_K"])
def test_values_of_all_sizes_multiply_as_float32(isa: str, kind: str) -> None:
    """Outliers, tiny values, and what is not finite."""
    matrix, values, _ = held(kind)
    random = torch.Generator().manual_seed(4)
    rows = torch.randn(9, values.shape[1], generator=random)
    rows[1] *= 10.0 ** torch.randint(-20, 20, (values.shape[1],), generator=random)
    rows[2, ::64], rows[3] = 3000.0, rows[3].abs() * 1e-24
    rows[4], rows[5], rows[6, :32] = 1e-38, 0.0, 0.0
    rows[7], rows[8] = 1.0, -(2.0**23 - 1)
    largest = rows.view(9, -1, 32).abs().amax(2, keepdim=True).expand(-1, -1, 32).reshape(rows.shape)
    sizes = largest.double() @ values.double().abs().t()
    exact = rows.double() @ values.double().t()
    for given in (matrix.product(rows), torch.cat([matrix.product(row[None]) for row in rows])):
        assert bool(((given - exact).abs() <= 1e-6 * sizes + 1e-25 * values.abs().sum(1)).all())
    for odd in (float("nan"), float("inf"), -float("inf")):
        rows[0, 7] = odd
        given = matrix.product(rows)
        assert not bool(torch.isfinite(given[0]).any()) and bool(torch.isfinite(given[2:]).all())


def test_row_does_not_depend_on_rows_beside_it(isa: str) -> None:
    for name, matrix, values in matrices():
        rows = rows_for(values, 32)
        together = matrix.product(rows)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 11, 31):
            assert torch.equal(matrix.product(rows[:count]), together[:count]), (name, count)
            assert torch.equal(matrix.product(rows[-count:]), together[-count:]), (name, count)


def product(matrix: TiledMatrix, rows: torch.Tensor, threads: int) -> torch.Tensor:
    output = torch.empty(len(rows), matrix.shape[0])
    scratch = torch.empty(len(rows) * 3 * matrix.shape[1])
    found().functions.petalnode_multiply(
        ctypes.byref(matrix.described), rows.data_ptr(), len(rows), output.data_ptr(), scratch.data_ptr(), threads
    )
    return output


def test_many_rows_have_the_bits_of_single_ones(isa: str) -> None:
    """More rows and longer ones than codes are opened for at once."""
    made = [held(kind, (83, 768))[0] for kind in ("Q4_0", "Q4_1", "Q4_K", "Q2_K", "Q5_1", "Q6_K", "Q8_0", "IQ4_NL")]
    made += [TiledInt8Matrix.quantise(weights((83, 720))), TiledNf4Matrix.quantise(weights((83, 704)))]
    made += [StoredMatrix(weights((83, 2416)).to(dtype)) for dtype in (torch.bfloat16, torch.float16)]
    for matrix in made:
        rows = torch.randn(150, matrix.shape[1], generator=torch.Generator().manual_seed(2))
        together = product(matrix, rows, 1)
        for place in (0, 6, 77, 127, 128, 149):
            assert torch.equal(product(matrix, rows[place : place + 1], 1)[0], together[place]), (matrix.form, place)
        for count in (3, 4, 6, 7, 8, 9, 13, 131):
            assert torch.equal(product(matrix, rows[-count:].contiguous(), 1), together[-count:]), (matrix.form, count)


def test_results_do_not_depend_on_number_of_threads(isa: str) -> None:
    for name, matrix, values in matrices():
        rows = rows_for(values, 32)
        alone = product(matrix, rows, 1)
        for threads in (2, 3, 100):
            assert torch.equal(product(matrix, rows, threads), alone), (name, threads)


def test_rounded_rows_have_equal_bits_on_all_instructions() -> None:
    """Weights of 4 and 8 bits that stand for numbers in a row: sums of whole numbers. The others multiply the same
    rounded values."""
    kernels = found()
    before = kernels.isa
    try:
        for name, matrix, values in matrices():
            matrix.round_rows()
            rows = rows_for(values) * 3
            rows[0, :32], rows[1] = 0.0, 1e-33
            right = rounded(rows).double() @ values.double().t()
            whole = matrix._by_bytes
            answers = []
            for isa in isas():
                kernels.select(isa)
                given = matrix.product(rows)
                assert float((given - right).norm() / right.norm()) < 1e-6, (name, isa)
                some = torch.cat([matrix.product(rows[start : start + 3]) for start in range(0, 33, 3)])
                assert torch.equal(some[:32], matrix.product(rows[:32])), (name, isa)
                answers.append(given)
            assert not whole or all(torch.equal(one, answers[0]) for one in answers), name
    finally:
        kernels.select(before)


def test_rounded_values_are_those_of_the_kernels(isa: str) -> None:
    """By the product with the identity in 16 bits."""
    values = torch.randn(8, 80, generator=torch.Generator().manual_seed(1))
    values[1] = values[1].sign() * 5
    values[2] = 2.0**-140
    values[3, :32] = 0.0
    ones = StoredMatrix(torch.eye(80).to(torch.bfloat16))
    ones.round_rows()
    right = rounded(values)
    assert torch.equal(ones.product(values), right) and torch.equal(right[2], torch.zeros(80))
    assert float((right[0] - values[0]).norm() / values[0].norm()) < 0.01
    for odd in (float("nan"), -float("inf")):
        values[0, 40] = odd
        found = rounded(values[:1])
        assert found[0, 32:64].isnan().all() and torch.equal(found[0, :32], right[0, :32])
        assert not torch.isfinite(ones.product(values[:1])[0, 40])


def test_sums_of_the_largest_codes_do_not_overflow(isa: str) -> None:
    for form, code in (("int8", -127), ("q8_half", 127), ("q4", 0), ("q4", 15), ("q4_half", 0), ("q4_half", 15)):
        shape, kinds = (32, 64), FORMS[form].kinds((32, 64))
        tensors = {name: torch.ones(of, dtype=dtype) for name, (dtype, of) in kinds.items()}
        word = sum(((code - 8) & 15) << 4 * place for place in range(8)) if form.startswith("q4") else code
        tensors["weight"].fill_(word - (1 << 32) if word >= 1 << 31 else word)
        matrix = TiledMatrix.from_tensors(form, shape, tensors)
        weight = matrix.rows(0, 32, torch.float32)
        assert set(weight.unique().tolist()) == {float(code + (form == "q4") - 8 * (form == "q4_half"))}
        matrix.round_rows()
        for value in (127.0, -127.0):
            expected = value * 64 * weight[0, 0].expand(9, 32)
            assert torch.equal(matrix.product(torch.full((9, 64), value)), expected)


def test_several_callers_at_once() -> None:
    """One of them has the helpers; the others compute alone meanwhile."""
    _, matrix, values = matrices()[0]
    rows = rows_for(values, 8)
    expected = product(matrix, rows, 1)

    def work(_: int) -> bool:
        return all(torch.equal(product(matrix, rows, 2), expected) for _ in range(50))

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, range(6)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_child_of_fork_has_helpers_of_its_own() -> None:
    _, matrix, values = matrices()[0]
    rows = rows_for(values, 8)
    expected = product(matrix, rows, 2).numpy().tobytes()
    output, scratch = torch.empty(8, SHAPE[0]), torch.empty(8 * 3 * SHAPE[1])
    given = ctypes.byref(matrix.described), rows.data_ptr(), 8, output.data_ptr(), scratch.data_ptr(), 3
    held, call = output.numpy(), found().functions.petalnode_multiply  # no torch in the child, whose pools are gone too

    def right() -> bool:
        held[:] = 0
        call(*given)
        return bool(held.tobytes() == expected)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a process that has threads
        child = os.fork()
    if not child:
        os._exit(0 if all(right() for _ in range(20)) else 1)
    assert right()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_gradients_are_those_of_the_values(isa: str) -> None:
    for name, matrix, values in matrices():
        rows = rows_for(values, 3).requires_grad_()
        matrix.multiply(rows).square().sum().backward()
        same = rows.detach().clone().requires_grad_()
        (same @ values.t()).square().sum().backward()
        assert rows.grad is not None and same.grad is not None
        assert (rows.grad - same.grad).norm() < 1e-5 * same.grad.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_major_weights_with_a_bias(isa: str, dtype: torch.dtype) -> None:
    weight, bias = weights((37, 96)).to(dtype), weights((1, 37))[0]
    numbers = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
    described = Matrix(numbers[dtype], 37, 96, 96, weight.data_ptr(), None, None, bias.data_ptr())
    rows = rows_for(weight, 32)
    results, scratch = [], torch.empty(3 * rows.numel())
    for count in (32, 7, 1):
        output = torch.empty(count, 37)
        found().functions.petalnode_multiply(
            ctypes.byref(described), rows.data_ptr(), count, output.data_ptr(), scratch.data_ptr(), 1
        )
        exact = rows[:count].double() @ weight.double().t() + bias
        assert (output - exact).norm() < 1e-6 * exact.norm()
        results.append(output)
    assert torch.equal(results[0][:7], results[1]) and torch.equal(results[0][:1], results[2])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_row_major_weights_with_long_rows(isa: str, dtype: torch.dtype) -> None:
    """More inputs than are multiplied at a time, and a rest of them; more outputs than a piece of work."""
    weight = weights((83, 1040)).to(dtype)
    weight[5, 7] = float("inf")
    numbers = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
    described = Matrix(numbers[dtype], *weight.shape, weight.shape[1], weight.data_ptr(), None, None, None)
    rows = rows_for(weight, 33)

    def times(part: torch.Tensor) -> torch.Tensor:
        output, scratch = torch.full((len(part) + 1, len(weight)), 7.0), torch.empty(3 * part.numel())
        found().functions.petalnode_multiply(
            ctypes.byref(described), part.data_ptr(), len(part), output.data_ptr(), scratch.data_ptr(), 2
        )
        assert bool((output[-1] == 7.0).all())
        return output[:-1]

    together = times(rows)
    exact, finite = rows.double() @ weight.double().t(), torch.arange(len(weight)) != 5
    assert (together - exact)[:, finite].norm() < 1e-6 * exact[:, finite].norm()
    assert bool(torch.isinf(together[:, 5]).all())
    for count in (1, 2, 3, 4, 5, 8, 9, 13, 16, 17, 24, 29, 32):
        assert torch.equal(times(rows[:count].contiguous()), together[:count]), count
        assert torch.equal(times(rows[-count:].contiguous()), together[-count:]), count


def test_tensors_of_another_matrix_are_refused() -> None:
    matrix, _, _ = held("Q4_1")
    again = TiledMatrix.from_tensors("q4", SHAPE, matrix.tensors())
    assert torch.equal(again.rows(0, 150, torch.float32), matrix.rows(0, 150, torch.float32))
    for form, shape in (("q8_half", SHAPE), ("q4", (150, 128)), ("q4", (200, 192))):
        with pytest.raises(ValueError, match="no matrix"):
            TiledMatrix.from_tensors(form, shape, matrix.tensors())
    with pytest.raises(ValueError, match="no matrix"):
        TiledNf4Matrix.restore(matrix.tensors(), SHAPE, torch.device("cpu"))


def test_all_forms_have_the_sizes_that_they_say() -> None:
    for name, form in FORMS.items():
        kinds = form.kinds((40, 256))
        assert kinds["weight"][1][0] == (40 if form.bits >= 16 else 3), name
        assert ("offset" in kinds) == (form.offset and form.scale != torch.int8)


def test_no_more_threads_than_torch_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0, 1, 5}, raising=False)
    for of_torch, expected in ((1, 1), (2, 2), (16, 3)):
        monkeypatch.setattr(torch, "get_num_threads", lambda count=of_torch: count)
        assert library_module.usable_threads() == expected


def test_without_kernels_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(library_module.ISA_VARIABLE, "none")
    assert library.__wrapped__() is None


def test_without_a_compiler_nothing_is_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/bin/false")
    problem = build(tmp_path / "kernels.so")
    assert problem is not None and "/bin/false" in problem
    monkeypatch.setenv("CC", str(tmp_path / "no-such-compiler"))
    assert "no C compiler" in str(build(tmp_path / "kernels.so"))
    assert not list(tmp_path.iterdir())


def test_a_structure_of_another_size_is_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class LongerRow(ctypes.Structure):
        _fields_ = (*library_module.Row._fields_, ("more", ctypes.c_int64))

    loaded = library()
    if loaded is None:
        pytest.skip("no compiled kernels here")
    structures = library_module.STRUCTURES
    monkeypatch.setattr(library_module, "STRUCTURES", (structures[0], LongerRow, *structures[2:]))
    assert library_module._load(Path(loaded.functions._name)) is None
    assert "LongerRow has another size" in caplog.text
    monkeypatch.setattr(library_module, "STRUCTURES", structures[:-1])
    assert library_module._load(Path(loaded.functions._name)) is None


def test_file_that_is_no_library_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "kernels.so"
    file.write_bytes(b"no library")
    assert library_module._load(file) is None
    assert "cannot be used" in caplog.text


@pytest.mark.parametrize(("name", "expected"), [("plain", "plain"), ("sparc", "None")])
def test_the_environment_names_the_instruction_set(name: str, expected: str) -> None:
    program = "from petalnode.node.blocks.kernels.library import library as f; x = f(); print(x and x.isa)"
    run = subprocess.run(
        [sys.executable, "-c", program], env={"PETALNODE_KERNELS_ISA": name}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == expected
