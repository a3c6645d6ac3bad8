"""Options of commands, many of them as fields of dataclasses that several commands share."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, fields
from typing import Annotated, Any

import typer

JsonFlag = Annotated[bool, typer.Option("--json", help="One JSON object per line on standard output.")]
"""Of commands that join no swarm; those that do have it in `JoinOptions`."""


def option(
    default: Any,
    help: str,
    metavar: str | None = None,
    *,
    names: Sequence[str] = (),
    among: Sequence[str] = (),
    **more: Any,
) -> Any:
    """A field, or the default of a parameter, that is an option of its name, or of `names`; `more` as `typer.Option`
    takes it. Its value is one of those `among`, if any are given.

    A flag has no `--no-...`, unless it is among the names.
    """
    if among:
        metavar, more = "|".join(among), {**more, "parser": _one_of(among)}
    return field(default=default, metadata={"names": names, "help": help, "metavar": metavar, **more})


def _one_of(names: Sequence[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:  # with a name, which click asks for
        if text not in names:
            raise typer.BadParameter(f"{text}: use {', '.join(names)}")
        return text

    return parse


def options_of(group: Any) -> Iterator[inspect.Parameter]:
    """The fields of a dataclass as parameters of a command, annotated as typer wants it."""
    types = typing.get_type_hints(group)
    return (parameter_of(found.name, types[found.name], found) for found in fields(group))


def parameter_of(name: str, kind: Any, found: Any) -> inspect.Parameter:
    """What `option` has made, as a parameter of this name and type."""
    how = dict(found.metadata)
    names = how.pop("names") or ((f"--{name.replace('_', '-')}",) if kind is bool else ())
    annotation = Annotated[kind, typer.Option(*names, **how)]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=found.default, annotation=annotation)
