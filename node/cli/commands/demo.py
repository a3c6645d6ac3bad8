"""`petalnode demo`: a swarm of server processes on this machine."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import webbrowser
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import trio
import typer

from ....crypto.identity import Identity
from ....protocols.ids import Span
from ...errors import BadInput, MachineError
from ...links.making import LinkWishes, join_command, near_link
from ...models.sources.resolve import DEFAULT_MODEL
from ...swarm.config import SwarmConfig
from ...swarm.swarm import Swarm, open_swarm
from ..model_choice import model_folder
from ..option import JsonFlag
from ..output import Output

if TYPE_CHECKING:
    from ...models import ModelFolder
    from .api import ApiOptions

READY_TIMEOUT = 600.0
STOP_TIMEOUT = 10.0


def demo(
    servers: Annotated[int, typer.Option(min=1, help="Number of server processes.")] = 3,
    prompt: Annotated[
        str | None, typer.Option(help="Ask one question, print the answer and exit. Default: a chat.")
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum tokens of an answer.")] = 256,
    as_json: JsonFlag = False,
    web: Annotated[bool, typer.Option("--web", help="Chat on a page in the browser, with the API beside it.")] = False,
    no_open: Annotated[bool, typer.Option("--no-open", help="With --web: do not open the page.")] = False,
    http_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="With --web: the port of the page. Default: 8000, or any free one."),
    ] = None,
) -> None:
    """Start a swarm of the default model on this machine, separate from all others, and chat with it."""
    if web and prompt is not None:
        raise BadInput("--prompt is asked on the terminal, and --web on a page: give one of them")
    if not web and (no_open or http_port is not None):
        raise BadInput("--no-open and --http-port are for the page: give --web too")
    page = WebOptions(http_port, opens=not no_open and not as_json) if web else None
    trio.run(_demo, servers, prompt, max_new_tokens, as_json, page)


@dataclass(frozen=True)
class WebOptions:
    """Of `--web`: the port, None for the usual one or any, and whether a browser opens the page."""

    port: int | None
    opens: bool


async def _demo(servers: int, prompt: str | None, max_new_tokens: int, as_json: bool, page: WebOptions | None) -> None:
    from ..conversation.client_parts import ClientParts, import_generation
    from ..conversation.options import ChatOptions
    from ..conversation.talk import chat_in
    from .chat import question

    prompt = question(prompt, "What is the capital of France?") if page is None else None
    output = Output(as_json)
    served = None if page is None else await _page(page, output)
    folder = await model_folder(DEFAULT_MODEL, output, need="all")
    if servers > folder.num_blocks:
        raise BadInput(f"--servers {servers}: {folder.name} has {folder.num_blocks} blocks, one for each at least")
    config = SwarmConfig(identity=Identity.generate(), listen=("/ip4/127.0.0.1/tcp/0",), serve_dht=True)
    with tempfile.TemporaryDirectory(prefix="petalnode-demo-") as scratch:
        async with open_swarm(config) as swarm, trio.open_nursery() as nursery:
            nursery.start_soon(_end_on_sigterm, nursery.cancel_scope)
            output.say(f"starting {servers} servers of {folder.name} on this machine ...")
            parts = ClientParts(None)
            if page is None:  # the first question finds all that the client needs
                nursery.start_soon(parts.load, folder)
                nursery.start_soon(import_generation)
            with trio.move_on_after(READY_TIMEOUT) as scope:
                async with trio.open_nursery() as starting:
                    for number, span in enumerate(even_spans(folder.num_blocks, servers), 1):
                        server = number, span, swarm.addrs[0], Path(scratch) / f"{span.start}.key", servers
                        starting.start_soon(_start, nursery, output, *server)
            if scope.cancelled_caught:
                raise MachineError(f"the servers were not ready within {READY_TIMEOUT:.0f} s")
            if prompt is None:  # with one question all is over before anybody could join
                output.say(f"to join it from this machine:  {join_command(near_link(swarm, LinkWishes()), None)}")
            if page is not None and served is not None:
                await _serve_page(swarm, folder, page, *served, output)
            else:
                options = ChatOptions(prompt=prompt, max_new_tokens=max_new_tokens, show_route=True, yes=True)
                await chat_in(swarm, folder, options, output, parts=parts)
            nursery.cancel_scope.cancel()


async def _start(nursery: trio.Nursery, output: Output, number: int, span: Span, *server: Any) -> None:
    """Starts a server as `_server` has it, and says so when it is ready."""
    peer_id = await nursery.start(_server, number, span, *server)
    output.say(f"  blocks {span}: server …{peer_id[-8:]}")


async def _page(page: WebOptions, output: Output) -> tuple[ApiOptions, list[trio.SocketListener]]:
    """Takes the port, before anything is started, and says where the page will be.

    Raises:
        MachineError: the port that was asked for is taken.
    """
    from ...api.http.server import url_of
    from .api import ApiOptions, listeners_of

    options = ApiOptions() if page.port is None else ApiOptions(http_port=page.port)
    try:
        listeners = await listeners_of(options)
    except MachineError:
        if page.port is not None:
            raise
        listeners = await listeners_of(ApiOptions(http_port=0))
    output.say(f"{url_of(options.host, listeners)} has the chat page as soon as the servers are ready; Ctrl-C ends all")
    return options, listeners


async def _serve_page(
    swarm: Swarm,
    folder: ModelFolder,
    page: WebOptions,
    options: ApiOptions,
    listeners: list[trio.SocketListener],
    output: Output,
) -> None:
    """Serves the page and the API until cancelled."""
    from .api import admission_of, api_in

    on_ready = _open_aside if page.opens and has_screen(sys.platform, os.environ) else lambda url: None
    await api_in(swarm, folder, options, admission_of(options), output, listeners, swarm.addrs[:1], on_ready)


def has_screen(platform: str, environment: Mapping[str, str]) -> bool:
    """Whether a browser would open beside the terminal, and not in it."""
    if platform in ("win32", "cygwin", "darwin"):
        return not environment.get("SSH_CONNECTION")
    return bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY") or environment.get("WSL_DISTRO_NAME"))


def _open_aside(url: str) -> None:
    """Some browsers keep their caller until they end. Nobody waits for them, nor for this thread."""
    threading.Thread(target=_open, args=(url,), daemon=True).start()


def _open(url: str) -> None:
    with suppress(webbrowser.Error, OSError):
        webbrowser.open(url)


async def _end_on_sigterm(scope: trio.CancelScope) -> None:
    """Lets everything be cleaned up; by itself the signal would leave the scratch folder behind."""
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


def even_spans(num_blocks: int, count: int) -> list[Span]:
    """`count` spans that cover `num_blocks`, as even as they can be."""
    edges = [round(index * num_blocks / count) for index in range(count + 1)]
    return [Span(start, end) for start, end in itertools.pairwise(edges)]


async def _server(
    number: int,
    span: Span,
    peer: str,
    identity: Path,
    servers: int,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    """Runs one server process until cancelled; started with its peer id when it is ready.

    The server stops by itself when this process ends, because its standard input is then closed.
    """
    command = [
        *(sys.executable, "-m", "petalnode", "serve", DEFAULT_MODEL, "--blocks", str(span), "--peer", peer),
        *("--name", f"demo {number}", "--listen", "/ip4/127.0.0.1/tcp/0", "--identity", str(identity)),
        *("--until-eof", "--json", "--no-mdns", "--no-remember", "--relay", "off"),
        *("--drain-timeout", "0"),  # nobody is left to move
    ]
    process = await trio.lowlevel.open_process(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": str(threads_per_server(os.cpu_count() or 1, servers))},
        # Ctrl-C on the terminal is for the chat; the servers end with it, by the closed pipe.
        start_new_session=True,
    )
    errors: list[str] = []
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_read_errors, process, errors)
            await _read_events(process, task_status)
            code = await process.wait()
            # Only an end that nobody asked for comes here.
            raise MachineError(f"the server of blocks {span} ended with exit code {code}: {''.join(errors)[-500:]}")
    finally:
        with trio.CancelScope(shield=True):
            await _stop(process)


async def _read_errors(process: trio.Process, errors: list[str]) -> None:
    assert process.stderr is not None
    async for data in process.stderr:
        errors.append(data.decode(errors="replace"))
        del errors[:-50]


async def _read_events(process: trio.Process, task_status: trio.TaskStatus[str]) -> None:
    assert process.stdout is not None
    pending = b""
    async for data in process.stdout:
        *lines, pending = (pending + data).split(b"\n")
        for line in lines:
            event = json.loads(line)
            if event.get("event") == "ready":
                task_status.started(event["peer_id"])


async def _stop(process: trio.Process) -> None:
    assert process.stdin is not None
    await process.stdin.aclose()
    with trio.move_on_after(STOP_TIMEOUT):
        await process.wait()
        return
    process.kill()
    await process.wait()


def threads_per_server(cores: int, servers: int) -> int:
    """Compute threads for each of several servers on one machine: more than there are cores slow everybody down."""
    return max(1, cores // servers)
