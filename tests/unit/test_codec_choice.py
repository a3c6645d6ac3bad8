"""Which codec `auto` takes: by bandwidth, computing and what the model's values allow."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from petalnode.node.client.api.remote import gradient_scale
from petalnode.node.client.chunks import rounding_errors, to_chunks
from petalnode.node.client.core import CODEC_CHOICES, CODEC_OF, parse_codec
from petalnode.node.errors import BadInput
from petalnode.node.swarm.cost import COST, WireCost, choose_codec
from petalnode.protocols.framing import CODECS
from petalnode.protocols.tensors import decode, encode

USUAL = {"none": 0.0, "float16": 5e-4, "bfloat16": 4e-3, "int8-block64": 0.02}
MBIT = 8e-6
"""Seconds per byte at one Mbit/s."""
SERVER = WireCost(step=0.01, token=0.001, round_trip=0.02, per_byte=MBIT / 10)


def chosen(server: WireCost = SERVER, dtype: str = "float32", values: int = 576, **errors: float) -> str:
    return choose_codec([server] * 3, dtype, values, {**USUAL, **errors})


@pytest.mark.parametrize(("mbit", "codec"), [(1, "float16"), (10, "float16"), (100, "float16"), (1000, "none")])
def test_slow_line_has_a_codec_and_fast_none(mbit: float, codec: str) -> None:
    assert chosen(replace(SERVER, per_byte=MBIT / mbit)) == codec


def test_what_was_never_measured_does_not_count() -> None:
    assert chosen(replace(SERVER, per_byte=None)) == "none"
    assert choose_codec([], "float32", 576, USUAL) == "none"
    assert choose_codec([replace(SERVER, per_byte=MBIT)] * 3, "float32", 576, {}) == "none"


def test_server_that_computes_for_long_needs_no_codec() -> None:
    assert chosen(replace(SERVER, step=1.0, token=0.1)) == "none"
    assert chosen(replace(SERVER, step=1.0, token=0.0001)) == "float16"  # for prompts


def test_half_precision_needs_no_float16() -> None:
    assert chosen(dtype="bfloat16") == chosen(dtype="float16") == "none"


def test_model_that_cannot_bear_a_codec_has_none() -> None:
    assert chosen(float16=2 * COST.auto_error) == chosen(float16=1e9) == chosen(float16=float("nan")) == "none"
    assert chosen(**{"int8-block64": COST.auto_error / 2}) == "int8-block64"


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 600), st.floats(0, 1e-3), st.integers(1, 1 << 16))
def test_a_faster_line_never_wants_a_coarser_codec(
    step: float, token: float, round_trip: float, per_byte: float, values: int
) -> None:
    server = WireCost(step, token, round_trip, per_byte)
    errors = dict.fromkeys(CODECS, 0.0)
    found = [
        choose_codec([replace(server, per_byte=per_byte * share)], "float32", values, errors) for share in (0.0, 0.1, 1)
    ]
    assert found[0] == "none"
    assert [CODECS.index(codec) for codec in found] == sorted(CODECS.index(codec) for codec in found)


def test_names_that_a_person_gives() -> None:
    assert all(parse_codec(name) == name for name in CODEC_CHOICES)
    assert set(CODEC_OF.values()) == set(CODECS)
    with pytest.raises(BadInput, match="auto"):
        parse_codec("auto", tuple(CODEC_OF))
    with pytest.raises(BadInput, match="int8-block64"):
        parse_codec("int8-block64")


# --- what is measured of a model's values


def measured(tensor: torch.Tensor) -> dict[str, float]:
    return rounding_errors(to_chunks(tensor, "none", 100))


def usual(tokens: int = 20) -> torch.Tensor:
    return torch.randn(1, tokens, 576, generator=torch.Generator().manual_seed(1))


def test_ordinary_values_bear_float16() -> None:
    errors = measured(usual())
    assert (
        errors["none"] == 0
        and errors["float16"] <= COST.auto_error < errors["bfloat16"] < errors["int8-block64"] < 0.02
    )


def test_massive_activations_bear_it_while_there_is_room() -> None:
    one = usual()
    one[0, 0, 5] = 3000.0
    assert measured(one)["float16"] <= COST.auto_error
    one[0, 0, 5] = 9000.0
    assert measured(one)["float16"] > 1 > measured(one)["bfloat16"]


@pytest.mark.parametrize(("largest", "codec"), [(4000.0, "float16"), (20_000.0, "none")])
@pytest.mark.parametrize("width", [576, 100])  # 100: blocks go on from token to token
def test_outliers_everywhere_hide_nothing_of_int8s_effect(width: int, largest: float, codec: str) -> None:
    """As GPT-2 has them: by the norm alone, of which they are most, int8 would be as good as float16."""
    one = torch.randn(1, 20, width, generator=torch.Generator().manual_seed(1))
    one[:, :, 5] = largest
    by_norm = float((decode(*encode(one, "int8-block64")) - one).norm() / one.norm())
    errors = measured(one)
    assert by_norm < 10 / largest and errors["int8-block64"] > 0.1
    assert choose_codec([replace(SERVER, per_byte=100 * MBIT)] * 3, "float32", width, errors) == codec


def test_too_small_values_do_not_bear_it() -> None:
    assert measured(1e-6 * usual())["float16"] > COST.auto_error


# --- gradients


@pytest.mark.parametrize("size", [1e-30, 1e-9, 1e-5, 1.0, 1e6, 1e30])
def test_gradients_are_scaled_to_the_codecs_bits(size: float) -> None:
    gradient = size * usual(3)
    scale = gradient_scale(gradient)
    assert 16 <= float((gradient * scale).abs().max()) < 32
    assert torch.equal(gradient * scale / scale, gradient)  # a power of two rounds nothing
    if size < 1e-5:
        lost = decode(*encode(gradient, "float16")).double() - gradient
        kept = (decode(*encode(gradient * scale, "float16")) / scale).double() - gradient
        assert kept.norm() < 1e-3 * gradient.double().norm() < lost.norm()


def test_the_least_gradients_stay_finite() -> None:
    """Those of a classifier that is sure of all rows."""
    for size in (1e-38, 1e-44):
        gradient = torch.tensor([[[size, 0.0]]])
        scaled = gradient * gradient_scale(gradient)
        assert torch.isfinite(scaled).all() and scaled[0, 0, 0] > 0


def test_a_gradient_of_nothing_stays_as_it_is() -> None:
    assert gradient_scale(torch.zeros(1, 2, 3)) == 1.0
