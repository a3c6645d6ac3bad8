"""Which arguments of a model's forward and generate are honoured, as decided without a model."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from petalnode.node.client.api.arguments import check_generate, forward_arguments
from petalnode.node.errors import BadInput


def forward(input_ids: Any = None, labels: Any = None, pixel_values: Any = None) -> None:
    """A model that takes an argument which is not known here."""


def test_what_model_names_and_nobody_honours_is_refused() -> None:
    with pytest.raises(BadInput, match="pixel_values is not supported"):
        forward_arguments(forward, (), {"pixel_values": 1})


def test_argument_behind_an_ineffective_one_is_read() -> None:
    for first in ({"labels": None}, {"labels": 1}):
        with pytest.raises(BadInput, match="pixel_values"):
            forward_arguments(forward, (), first | {"pixel_values": 1})


def test_none_is_passed_only_where_the_model_says() -> None:
    given = {"labels": None, "head_mask": None, "return_dict": 1}
    assert forward_arguments(forward, (3,), given) == {"input_ids": 3, "labels": None, "return_dict": 1}


def test_what_models_own_configuration_wants_is_looked_at() -> None:
    with pytest.raises(BadInput, match="dola_layers"):
        check_generate({}, GenerationConfig(dola_layers="high"))
    check_generate({"generation_config": GenerationConfig()}, GenerationConfig(dola_layers="high"))
