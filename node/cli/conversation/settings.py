"""How a person's conversation chooses tokens, and when an answer has gone round in circles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ....crypto.bounded_json import BadJson, JsonLimits, read_json_object
from ...errors import BadInput

if TYPE_CHECKING:
    from ...client.generation.sampling import Sampling

_LIMITS: Final = JsonLimits(nbytes=1 << 20, values=10_000, strict=False)
_OF_MODELS: Final = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of `generation_config.json` and of Sampling alike."""
_USUAL_TEMPERATURE: Final = 0.7  # as the page has it


@dataclass(frozen=True)
class Repetition:
    """What counts as going round in circles: the last tokens are one sequence again and again."""

    longest: int = 64  # tokens of the sequence
    times: int = 4
    tokens: int = 80  # in all, at least: a line of dashes, or of a table, is shorter


REPETITION: Final = Repetition()


def repeats(tokens: Sequence[int]) -> bool:
    """Whether an answer has come to repeat itself for certain."""
    for period in range(1, min(REPETITION.longest, len(tokens) // REPETITION.times) + 1):
        length = max(period * REPETITION.times, REPETITION.tokens)
        if len(tokens) >= length and all(tokens[-at] == tokens[-at - period] for at in range(1, length - period + 1)):
            return True
    return False


def model_settings(folder: Path) -> dict[str, float]:
    """What the model's own configuration says about choosing tokens; nothing if it says nothing that can be read."""
    try:
        found = read_json_object(folder / "generation_config.json", _LIMITS)
    except (OSError, BadJson):
        return {}
    return {name: float(found[name]) for name in _OF_MODELS if _is_number(found.get(name))}


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6


def for_a_person(given: Sampling, named: Mapping[str, float | None], folder: Path) -> Sampling:
    """`given` with what was `named` by an option, else with the model's own settings, else with the usual
    temperature."""
    own = model_settings(folder) if named.get("temperature") != 0 else {}
    sampling = replace(given, temperature=_USUAL_TEMPERATURE)
    for name, value in own.items():
        with suppress(BadInput):
            sampling = _with(sampling, name, int(value) if name == "top_k" else value)
    for name, option in named.items():
        sampling = sampling if option is None else _with(sampling, name, option)
    return sampling


def _with(sampling: Sampling, name: str, value: Any) -> Sampling:
    return replace(sampling, **{name: value})


def changed(sampling: Sampling, words: Sequence[str]) -> Sampling:
    """As `/set NAME VALUE` asks.

    Raises:
        BadInput: there is no such setting, or it takes no such value.
    """
    known = {field.name: getattr(sampling, field.name) for field in fields(sampling) if field.name != "logit_bias"}
    name = words[0].replace("-", "_") if words else ""
    if name not in known or len(words) != 2:
        raise BadInput(f"/set NAME VALUE, where NAME is one of {', '.join(known)}")
    try:
        whole = name in ("max_new_tokens", "top_k", "seed")
        value = None if (name, words[1]) == ("seed", "none") else (int if whole else float)(words[1])
    except ValueError:
        raise BadInput(f"/set {name} {words[1]}: give a number") from None
    return _with(sampling, name, value)


def described(sampling: Sampling) -> str:
    """The settings in one line, for a person."""
    names = [field.name for field in fields(sampling) if field.name != "logit_bias"]
    return ", ".join(f"{name} {getattr(sampling, name)}" for name in names)
