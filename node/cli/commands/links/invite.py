"""`petalnode invite`: a link with which somebody else joins this swarm."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import trio
import typer
from rich.text import Text

from ....client.deadlines import DEADLINES
from ....errors import BadInput, MachineError
from ....links.format import INVITE, check_word
from ....links.making import LinkWishes, link_now, qr_code, where_from
from ....swarm.swarm import Swarm
from ...join import JoinOptions, joined, joins_swarm
from ...model_choice import is_named, served_by
from ...option import option
from ...output import Output
from ...terminal import choose_model

if TYPE_CHECKING:
    import segno

_UNITS: Final = {"m": 60.0, "h": 3600.0, "d": 86400.0}
INSTALL: Final = "pip install -c packaging/constraints.txt ."
"""In a checkout; docs/install.md."""
_QUIET_ZONE: Final = 2  # modules around the code


@joins_swarm
def invite(
    model: Annotated[
        str | None, typer.Argument(help="The model of the link, as the swarm calls it. Default: the one it serves.")
    ] = None,
    valid: str = option("7d", "How long the link is good for, such as 30m, 12h or 7d.", "TIME"),
    with_key: bool = option(
        True, "Whether the key of a private swarm is in the link.", names=("--with-key/--without-key",)
    ),
    qr: Path | None = option(None, "Write a QR code of the link: .svg, .png, .pdf or .txt.", "FILE"),
    *,
    join: JoinOptions,
) -> None:
    """Print a link with which somebody else joins this swarm: `petalnode join LINK`."""
    join.check()
    lifetime = _seconds(valid)
    trio.run(_invite, model, lifetime, with_key, qr, join)


async def _invite(model: str | None, lifetime: float, with_key: bool, qr: Path | None, join: JoinOptions) -> None:
    output = Output(join.json)
    async with joined(join, output, role="invite", listens=False) as (swarm, identity):
        name, version = await _model(swarm, model, output)
        wishes = LinkWishes(name, version, join.psk, with_key and join.psk is not None, lifetime)
        link, made = await link_now(swarm, wishes, identity)
    word = await trio.to_thread.run_sync(check_word, link)
    if name and not made.model:
        output.warn(f"{name} is no name that a link can have: who joins is asked which model of the swarm")
    ended = time.strftime("%Y-%m-%d %H:%M", time.localtime(made.expires))
    output.emit(
        event="invite",
        link=link,
        check_word=word,
        model=made.model or None,
        model_version=version.hex() or None,
        peers=list(made.addrs),
        expires=made.expires,
        has_key=made.swarm_key is not None,
        command=f"petalnode join {link}",
        install=f"{INSTALL} && petalnode join {link}",
    )
    code = qr_code(link)
    if qr is not None:
        _write(code, qr)
        output.note(f"the QR code is in {qr}")
    if output.as_json:
        return
    output.say(link, style="bold")
    if output.console.is_terminal and code.symbol_size(border=_QUIET_ZONE)[0] <= output.console.width:
        output.table(Text(drawn(code), style="black on white"))
    output.say(f"for {made.model_argument or 'whatever model the swarm serves'}, until {ended}; check word: {word}")
    output.say(f"through {', '.join(made.addrs)}")
    output.say(f"to send on, for who has petalnode:  petalnode join {link}")
    output.say(f"and for who has a checkout of it:   {INSTALL} && petalnode join {link}")
    if made.swarm_key is not None:
        output.warn("the link has the swarm's key: whoever sees it can join for good. Send it over a safe channel")
    elif made.swarm_key_hash:
        output.note("the swarm is private: who joins needs the key's file, too (--swarm-key FILE)")
    reach = where_from(made.addrs)
    if reach:
        output.warn(f"these addresses are reached from {reach} only: docs/nat.md says how others can")


async def _model(swarm: Swarm, model: str | None, output: Output) -> tuple[str, bytes]:
    """(name, version) of the model that the link is for; empty where the swarm serves none.

    Raises:
        BadInput: the swarm serves several, or others than the one that was named.
    """
    view = await swarm.refresh(sample=True, timeout=DEADLINES.refresh)
    models = view.models(now=time.time())
    servers = view.servers(now=time.time())
    if model is None:
        models = served_by(swarm.named, models, servers)
    fitting = {version: named for version, named in models.items() if is_named(model, named[0], version)}
    if not fitting and (model is not None or models):
        raise BadInput(f"this swarm does not serve {model}, but {', '.join(sorted({n for n, _ in models.values()}))}")
    if not fitting:
        return "", b""
    version = await choose_model(fitting, servers, output)
    return fitting[version][0], version


def drawn(code: segno.QRCode) -> str:
    """The code in half blocks, for a terminal: two rows of modules a line, dark on light."""
    rows = [[bool(module) for module in row] for row in code.matrix_iter(border=_QUIET_ZONE)]
    rows += [[False] * len(rows[0])] * (len(rows) % 2)
    signs = {(True, True): "█", (True, False): "▀", (False, True): "▄", (False, False): " "}
    pairs = zip(rows[::2], rows[1::2], strict=True)
    return "\n".join("".join(signs[above, below] for above, below in zip(*pair, strict=True)) for pair in pairs)


def _write(code: segno.QRCode, file: Path) -> None:
    try:
        code.save(str(file), border=4) if file.suffix == ".txt" else code.save(str(file), border=4, scale=4)
    except OSError as error:
        raise MachineError(f"{file} cannot be written: {error.strerror}") from None
    except ValueError:
        raise BadInput(f"--qr {file}: give a file that ends in .svg, .png, .pdf or .txt") from None


def _seconds(text: str) -> float:
    number, unit = text[:-1], text[-1:]
    seconds = int(number) * _UNITS[unit] if number.isdecimal() and unit in _UNITS else 0.0
    if not 0 < seconds < INVITE.max_lifetime:
        raise BadInput(f"--valid {text}: give a time below a year, such as 30m, 12h or 7d")
    return seconds
