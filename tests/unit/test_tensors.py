from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from petalnode.protocols import wire_pb2 as wire
from petalnode.protocols.framing import CODECS, TensorError, all_finite, wire_nbytes
from petalnode.protocols.tensors import DTYPES, decode, decode_answer, dtype_name, encode

shapes = st.lists(st.integers(0, 9), min_size=1, max_size=4)
seeds = st.integers(0, 2**32 - 1)
EXACT = {
    ("float32", "none"),
    ("float16", "none"),
    ("bfloat16", "none"),
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
}


def random(shape: list[int], seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


@given(shapes, seeds, st.sampled_from(sorted(DTYPES)), st.sampled_from(CODECS))
def test_round_trip(shape: list[int], seed: int, dtype: str, codec: str) -> None:
    tensor = random(shape, seed, DTYPES[dtype])
    header, payload = encode(tensor, codec)
    assert len(payload) == header.nbytes == wire_nbytes(shape, dtype, codec)
    back = decode(header, payload)
    assert back.shape == tensor.shape and back.dtype == tensor.dtype
    if (dtype, codec) in EXACT:
        assert torch.equal(back, tensor)
    assert torch.isfinite(back).all()


@given(st.integers(1, 500), seeds, st.sampled_from([1e-3, 1.0, 300.0]))
def test_int8_is_off_by_half_step_at_most(count: int, seed: int, scale: float) -> None:
    tensor = random([count], seed, scale=scale)
    back = decode(*encode(tensor, "int8-block64"))
    for start in range(0, count, 64):
        block, got = tensor[start : start + 64], back[start : start + 64]
        step = block.abs().max() / 127
        # Half a step, and what float16 rounds off the scale (its smallest steps are 2**-24) over 127 steps.
        rounded_off = max(float(step) * 2**-11, 2**-25)
        assert (block - got).abs().max() <= 0.5 * step + 127 * rounded_off + 1e-7


@given(st.integers(1, 200), seeds, st.sampled_from(["float16", "bfloat16"]))
def test_half_codecs_round_once(count: int, seed: int, codec: str) -> None:
    tensor = random([count], seed)
    assert torch.equal(decode(*encode(tensor, codec)), tensor.to(DTYPES[codec]).float())


@pytest.mark.parametrize("value", [0.0, 1e-9, -1e-9])
def test_int8_of_nothing_is_zero(value: float) -> None:
    header, payload = encode(torch.full((1, 3, 70), value), "int8-block64")
    assert not any(payload) and torch.equal(decode(header, payload), torch.zeros(1, 3, 70))


def test_int8_takes_little_over_byte_value() -> None:
    header, _ = encode(torch.zeros(4, 5, 576), "int8-block64")
    assert header.nbytes == 4 * 5 * 576 + 2 * 4 * 5 * 9
    assert wire_nbytes([65], "float32", "int8-block64") == 65 + 2 * 2
    assert wire_nbytes([0], "float32", "int8-block64") == 0


def test_zeros_stay_zeros() -> None:
    for codec in CODECS:
        assert torch.equal(decode(*encode(torch.zeros(3, 50), codec)), torch.zeros(3, 50))


def test_an_outlier_hurts_its_own_block_only() -> None:
    tensor = random([192], 0)
    expected = decode(*encode(tensor, "int8-block64"))
    tensor[70] = 4000.0
    back = decode(*encode(tensor, "int8-block64"))
    assert torch.equal(back[:64], expected[:64]) and torch.equal(back[128:], expected[128:])
    assert back[70] == pytest.approx(4000.0, rel=1e-3)


@pytest.mark.parametrize("value", [1e-9, 6e-8, 5e-5, 1e-38])
def test_values_below_the_scale_become_zero_or_stay(value: float) -> None:
    tensor = torch.full((64,), value)
    back = decode(*encode(tensor, "int8-block64"))
    assert torch.isfinite(back).all()
    assert (back - tensor).abs().max() <= 2**-24 * 127  # a step of float16's smallest number


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
def test_the_largest_of_a_block_does_not_wrap(dtype: torch.dtype) -> None:
    tensor = torch.cat([torch.linspace(-1, 1, 64), torch.linspace(0.999, 1, 64)]).to(dtype)
    back = decode(*encode(tensor, "int8-block64"))
    assert torch.equal(back.sign(), tensor.sign()) and (back.float() - tensor.float()).abs().max() < 0.01


def test_values_beyond_the_codec_do_not_become_nan() -> None:
    """Hidden states of large models have outliers of tens of thousands."""
    tensor = torch.tensor([1e5, -1e5, 1.0] + [0.0] * 61)
    assert decode(*encode(tensor, "bfloat16"))[0] == pytest.approx(1e5, rel=1e-2)
    assert torch.isfinite(decode(*encode(tensor, "int8-block64"))).all()
    assert not decode(*encode(tensor, "float16")).isnan().any()


def test_what_is_not_contiguous_or_needs_gradients() -> None:
    tensor = random([6, 5], 0).t().requires_grad_()
    assert torch.equal(decode(*encode(tensor, "none")), tensor.detach())
    assert not decode(*encode(tensor, "none")).requires_grad


def test_what_arrives_may_be_written_to() -> None:
    header, payload = encode(torch.ones(3), "none")
    decode(header, payload).zero_()
    assert decode(header, payload).sum() == 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64])
def test_other_dtypes_do_not_travel(dtype: torch.dtype) -> None:
    with pytest.raises(TensorError, match="do not travel"):
        encode(torch.zeros(3, dtype=dtype), "none")
    with pytest.raises(TensorError):
        dtype_name(dtype)


@pytest.mark.parametrize(
    "wrong",
    [
        {"shape": [2, 3]},
        {"shape": []},
        {"shape": [2**31, 2**31]},
        {"dtype": "float64"},
        {"dtype": ""},
        {"codec": "zip"},
        {"codec": "int8-block64"},
        {"codec": ""},
        {"nbytes": 15},
        {"nbytes": 2**60},
    ],
    ids=str,
)
def test_headers_that_lie_are_refused(wrong: dict[str, object]) -> None:
    header, payload = encode(torch.zeros(2, 2), "none")
    fields = {"shape": list(header.shape), "dtype": header.dtype, "codec": header.codec, "nbytes": header.nbytes}
    with pytest.raises(TensorError):
        decode(wire.Tensor(**fields | wrong), payload)


@given(st.binary(max_size=200), shapes, st.sampled_from(sorted(DTYPES)), st.sampled_from(CODECS))
def test_any_bytes_are_a_tensor_or_refused(data: bytes, shape: list[int], dtype: str, codec: str) -> None:
    header = wire.Tensor(shape=shape, dtype=dtype, codec=codec, nbytes=len(data))
    if len(data) == wire_nbytes(shape, dtype, codec):
        assert decode(header, data).numel() == math.prod(shape)
    else:
        with pytest.raises(TensorError):
            decode(header, data)


@pytest.mark.parametrize("dtype", list(DTYPES.values()))
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen_in_bytes(dtype: torch.dtype, codec: str, value: float) -> None:
    tensor = random([3, 30], 0, dtype)
    assert all_finite(*encode(tensor, codec))
    tensor[1, 20] = value
    assert not all_finite(*encode(tensor, codec))


@pytest.mark.parametrize("codec", ["none", "float16", "int8-block64"])
def test_answer_may_lack_features_behind_hidden_states(codec: str) -> None:
    asked, payload = encode(torch.randn(2, 3, 8 * 4, generator=torch.Generator().manual_seed(1)), codec)
    asked.nbytes = len(payload)
    narrow = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(2))
    header, answer = encode(narrow, codec)
    header.nbytes = len(answer)
    assert torch.equal(decode_answer(asked, answer), decode(header, answer))
    assert torch.equal(decode_answer(asked, payload), decode(asked, payload))
    for data in (answer[:-1], answer + b"1", b"", payload + b"1"):
        with pytest.raises(TensorError):
            decode_answer(asked, data)
