"""`petalnode completion` and `man`: made from the commands, so that they have what these take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from ....errors import BadInput

_MARKUP = re.compile(r"\[/?[a-z ]+\]")


def _commands(group: Any) -> Iterator[tuple[str, Any]]:
    """All commands by the words that call them, groups followed by their own."""
    for name, command in group.commands.items():
        yield name, command
        if hasattr(command, "commands"):
            for inner, found in command.commands.items():
                yield f"{name} {inner}", found


def _options(command: Any) -> list[tuple[list[str], Any]]:
    """The options, each with its names; what is not explained in the help is."""
    options = [param for param in command.params if param.param_type_name == "option"]
    return [([*param.opts, *param.secondary_opts], param) for param in options] + [(["--help"], None)]


def completion_script(group: Any, shell: str) -> str:
    """For `shell`: names of commands, their options, and files.

    Raises:
        BadInput: it is no shell that is known.
    """
    every = [(path, sorted(name for names, _ in _options(command) for name in names if name.startswith("--")))
             for path, command in _commands(group)]  # fmt: skip
    inner: dict[str, list[str]] = {path.split()[0]: [] for path, _ in every if " " in path}
    for path, _ in every:
        if " " in path:
            inner[path.split()[0]].append(path.split()[1])
    if shell == "fish":
        lines = ["function __petalnode_in", "    set -l words (commandline -opc)"]
        lines += ["    set -l last (math 1 + (count $argv))", '    test "$words[2..$last]" = "$argv"', "end"]
        for name, command in group.commands.items():
            about = _MARKUP.sub("", command.get_short_help_str(80)).replace("\\", "\\\\").replace("'", "\\'")
            lines.append(f"complete -c petalnode -n __fish_use_subcommand -f -a {name} -d '{about}'")
        for path, words in inner.items():
            here = f"__petalnode_in {path}; and test (count (commandline -opc)) -eq 2"
            lines.append(f"complete -c petalnode -n '{here}' -f -a '{' '.join(words)}'")
        for path, options in every:
            lines += [f"complete -c petalnode -n '__petalnode_in {path}' -l {option[2:]}" for option in options]
        return "\n".join(lines) + "\n"
    if shell not in ("bash", "zsh"):
        raise BadInput(f"{shell}: give bash, zsh or fish")
    cases = [f'        "{path}") words="{" ".join([*inner.get(path, []), *options])}" ;;' for path, options in every]
    begin = (
        "autoload -U +X compinit && compinit\nautoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    )
    return begin + "\n".join(
        [
            "_petalnode() {",
            '    local now="${COMP_WORDS[COMP_CWORD]}" words="" path="${COMP_WORDS[1]}"',
            f'    case "$path" in {"|".join(inner)})',
            '        ((COMP_CWORD > 2)) && path="$path ${COMP_WORDS[2]}" ;;',
            "    esac",
            f'    words="{" ".join(group.commands)} --help --version"',
            '    if ((COMP_CWORD > 1)); then case "$path" in',
            *cases,
            "    esac; fi",
            '    COMPREPLY=($(compgen -W "$words" -- "$now"))',
            "}",
            "complete -o default -F _petalnode petalnode",
            "",
        ]
    )


def _plain(text: str | None) -> str:
    """Help without its marks, as roff has text."""
    shown = _MARKUP.sub("", text or "").replace("\\", "\\e").replace("-", "\\-").strip()
    return "\n".join(
        line.strip() if line.strip()[:1] not in (".", "'") else f"\\&{line.strip()}" for line in shown.splitlines()
    )


def man_page(group: Any, version: str) -> str:
    """The page in roff."""
    parts = [f'.TH PETALNODE 1 "" "petalnode {version}"', ".SH NAME", f"petalnode \\- {_plain(group.help)}"]
    parts += [".SH SYNOPSIS", ".B petalnode", "COMMAND [OPTIONS]", ".SH COMMANDS"]
    for path, command in _commands(group):
        places = (param for param in command.params if param.param_type_name == "argument")
        arguments = " ".join(param.metavar or (param.name or "").upper() for param in places)
        parts += [f".SS {_plain(f'petalnode {path} {arguments}')}", _plain(command.help)]
        for names, param in _options(command):
            value = "" if param is None or param.is_flag else f" {(param.metavar or param.name or '').upper()}"
            parts += [
                ".TP",
                f".B {_plain(', '.join(names) + value)}",
                _plain(getattr(param, "help", None) or "Print the help."),
            ]
    parts += [".SH EXIT STATUS", "0 done; 1 a result that says no; 2 wrong use or bad input; 3 the swarm cannot serve;",
              "4 this machine cannot; 130 interrupted.", ""]  # fmt: skip
    return "\n".join(parts)


def completion(shell: Annotated[str, typer.Argument(help="bash, zsh or fish.")]) -> None:
    """Print a script that completes commands and options in a shell."""
    from ...app import every_command

    print(completion_script(every_command(), shell), end="")


def man() -> None:
    """Print the manual page."""
    from ....version import __version__
    from ...app import every_command

    print(man_page(every_command(), __version__), end="")
