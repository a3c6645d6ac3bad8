"""`petalnode api`: an OpenAI-compatible HTTP API, and the pages of a chat, over the servers of a swarm."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import trio

from ...api.http.server import LOOPBACK, listen, url_of
from ...client.chat import Text
from ...client.core import ClientOptions, open_client
from ...client.deadlines import DEADLINES
from ...client.swarm_model import identify_model
from ...errors import BadInput, SwarmError
from ...models import ModelFolder
from ...models.cache_dir import data_folder
from ...network.addresses import interface_addresses
from ...swarm.swarm import Swarm
from ..join import JoinOptions, joined, joins_swarm
from ..model_choice import SwarmModelArgument, check_adapter, check_model, linked_model, model_folder, served_model
from ..option import option
from ..output import Output
from ..process import start
from ..strangers import ServerChoice
from ..terminal import unhurried

if TYPE_CHECKING:
    from ...api.engine.generation import ServedModel
    from ...api.http.admission import Admission
    from ...blocks.client_part import ClientModel
    from ...web.swarm_report import LastVerdict


@dataclass(frozen=True)
class ApiOptions(ServerChoice):
    """The options of `petalnode api`."""

    host: str = option("127.0.0.1", "Address to listen on. Others than this machine's own need --api-key-file.")
    http_port: int = option(8000, "Port to listen on; 0 is any free one.", min=0, max=65535)
    api_key_file: Path | None = option(
        None, "Answer only requests with a key of this file, which has their hashes.", "FILE"
    )
    new_api_key: str | None = option(
        None, "Make a key for NAME, add its hash to --api-key-file, print it and exit.", "NAME"
    )
    adapter: list[str] | None = option(
        None,
        "Also serve the model with this adapter: a folder in peft's format, or the name of one that servers "
        "hold; repeatable.",
        "PATH|NAME",
    )
    cors_origin: list[str] | None = option(
        None, "Let web pages of this origin use the API; * is all; repeatable.", "ORIGIN"
    )
    context: int = option(4096, "Maximum tokens of a prompt and its answer, if the model allows as many.", min=16)
    max_requests: int = option(64, "Requests that are answered at once.", min=1, max=4096)
    max_body: int = option(1, "Size of a request in MiB; files of batches have their own.", "MIB", min=1, max=64)
    keep_sessions: int = option(
        16, "Conversations whose caches servers keep for two minutes after an answer.", min=0, max=1024
    )
    draft: str = option(
        "auto",
        "Guess tokens from the text so far, and by the model's MTP head or a smaller MODEL "
        "that runs here, as `petalnode chat` does.",
        "auto|none|MODEL",
    )
    reopen_timeout: float = option(
        2.0,
        "Look for servers for so long, where none that was known can be reached, before an answer that has "
        "not begun is refused with 503.",
        "SECONDS",
        min=0,
        max=600,
    )
    batch_file: Path | None = option(
        None,
        "Keep files and batches (/v1/files, /v1/batches) in this file, up to 1 GiB; there are none without.",
        "FILE",
    )


@joins_swarm
def api(model: SwarmModelArgument = None, *, options: ApiOptions, join: JoinOptions) -> None:
    """Serve an OpenAI-compatible HTTP API and a chat page, which answer over the servers of a swarm."""
    output = Output(join.json)
    if options.new_api_key is not None:
        _make_key(options, output)
        return
    join.check()
    options.chosen_servers()  # before anybody is asked
    model = linked_model(model, join.target)
    check_model(model)
    for adapter in options.adapter or ():
        check_adapter(adapter)
    if options.draft not in ("auto", "none"):
        check_model(options.draft)
    trio.run(_api, model, options, join, output, admission_of(options))


def _make_key(options: ApiOptions, output: Output) -> None:
    from ...api.http.admission import add_key

    if options.api_key_file is None:
        raise BadInput("--new-api-key needs the file that its hash is added to: give --api-key-file FILE")
    key = add_key(options.api_key_file, options.new_api_key or "")
    output.note("this is shown once; the file has a hash of it only. An API that runs takes it from its next start on")
    output.say(key)
    output.emit(event="api-key", name=options.new_api_key, key=key)


def admission_of(options: ApiOptions) -> Admission:
    """
    Raises:
        BadInput: a key file or an origin that cannot be used, or a port that others reach without keys.
    """
    from ...api.http.admission import Admission, ApiKeys

    for origin in options.cors_origin or ():
        scheme, _, host = origin.partition("://")
        if origin != "*" and (scheme not in ("http", "https") or not host or "/" in host):
            raise BadInput(f"--cors-origin {origin}: give scheme and host, such as https://chat.example.org")
    keys = None if options.api_key_file is None else ApiKeys.read(options.api_key_file)
    if keys is None and options.host not in LOOPBACK:
        raise BadInput(
            f"--host {options.host} lets in everybody who reaches this machine: give --api-key-file FILE too "
            "(`petalnode api --new-api-key NAME --api-key-file FILE` makes a key)"
        )
    return Admission(keys, tuple(options.cors_origin or ()), LOOPBACK if keys is None else (), options.max_requests)


async def _api(model: str | None, options: ApiOptions, join: JoinOptions, output: Output, admission: Admission) -> None:
    listeners = await listeners_of(options)
    start.stage("joining the swarm")
    async with joined(join, output, role="chat", listens=False) as (swarm, _):
        start.stage("looking for the model")
        with suppress(SwarmError):
            await swarm.refresh(sample=True, timeout=DEADLINES.refresh)
        folder = await model_folder(model or await served_model(swarm, output), output, need="client", swarm=swarm)
        await api_in(swarm, folder, options, admission, output, listeners, join.peers)


async def api_in(
    swarm: Swarm,
    folder: ModelFolder,
    options: ApiOptions,
    admission: Admission,
    output: Output,
    listeners: Sequence[trio.SocketListener],
    peers: Sequence[str] = (),
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:
    """Serves the API and the pages over the servers of `swarm` until cancelled. `peers` are the addresses by which this
    node joined; `on_ready` is told the URL.

    Raises:
        PetalnodeError: the model or an adapter cannot be used.
    """
    unhurried()
    start.stage(f"loading embeddings and head of {folder.name}")
    local, text, models = await trio.to_thread.run_sync(_load, folder, options.adapter or (), abandon_on_cancel=True)
    guesser: Any = None
    if options.draft not in ("auto", "none"):
        from ...client.generation.draft_model import load_draft_model

        draft = await model_folder(options.draft, output, need="all")
        guesser = await trio.to_thread.run_sync(load_draft_model, draft, text, abandon_on_cancel=True)
    identified = await identify_model(swarm, folder)
    # torch, transformers and starlette, which the thread has imported.
    from ...api.app import create_app
    from ...api.batches.runner import BatchLimits, open_batches
    from ...api.engine.core import Core
    from ...api.engine.generation import ApiLimits
    from ...api.http.server import serve_http
    from ...monitoring.api_metrics import MetricsEndpoint
    from ...monitoring.metrics import LoopDelay
    from ...monitoring.traces import traced
    from ...web.pages import page_routes
    from ...web.swarm_endpoint import swarm_routes

    limits = ApiLimits(context=options.context, kept=options.keep_sessions, body_bytes=options.max_body << 20)
    asked = ClientOptions(
        allowed=options.allow or (),
        blocked=options.deny or (),
        trusted=options.chosen_servers(),
        codec=options.codec,
        reopen_timeout=options.reopen_timeout,
    )
    async with (
        open_client(swarm, identified, asked) as client,
        open_batches(options.batch_file, BatchLimits(line_bytes=options.max_body << 20)) as batches,
        traced("api") as traces,
        trio.open_nursery() as nursery,
    ):
        core = Core(client, local, text, models, limits)
        core.drafts, core.draft_model = options.draft != "none", guesser
        delay = LoopDelay()
        pages = [
            MetricsEndpoint(swarm, core, delay).route,
            *swarm_routes(core, peers=peers, verdicts=_verdicts),
            *page_routes(),
        ]
        nursery.start_soon(delay.run)
        nursery.start_soon(core.conversations.run)
        application = create_app(core, admission, pages, batches)
        if batches is not None:
            nursery.start_soon(batches.run, application)
        if traces is not None:
            client.state.on_session, core.tallies.on_answer = traces.session, traces.answered
        nursery.start_soon(serve_http, application if traces is None else traces.application(application), listeners)
        start.done()
        url = url_of(options.host, listeners)
        output.say(f"ready: {', '.join(core.models)} at {url}/v1, and a page for the browser at {url}")
        for other in lan_urls(options.host, url):
            output.say(f"from other machines: {other}/v1")
        output.emit(event="ready", url=url, models=list(core.models))
        on_ready(url)


def lan_urls(host: str, url: str) -> list[str]:
    """Where other machines reach a server that listens on all interfaces."""
    if host not in ("0.0.0.0", "::"):
        return []
    port = url.rpartition(":")[2]
    return [f"http://{address}:{port}" for address in interface_addresses("ip4")]


def _verdicts(model_version: bytes) -> Mapping[str, LastVerdict]:
    """Those of the validator that this person runs, if there is one."""
    from ...validator.history import last_verdicts
    from ...web.swarm_report import LastVerdict

    file = data_folder() / "validator" / "history.sqlite"
    return {peer_id: LastVerdict(*last) for peer_id, last in last_verdicts(file, model_version).items()}


def _load(folder: ModelFolder, adapters: Sequence[str]) -> tuple[ClientModel, Text, list[ServedModel]]:
    """
    Raises:
        ModelError, BadInput: the model or an adapter cannot be used.
    """
    from ...blocks import collector_paused

    with collector_paused():
        from ...api import app  # noqa: F401
        from ...api.engine.core import check_adapters
        from ...api.engine.generation import ServedModel
        from ...blocks.client_part import load_client
        from ...client.session_adapter import choose_adapter, fit_adapter
        from ...models.adapter import Adapter
        from ...web import pages, swarm_endpoint  # noqa: F401

    local = load_client(folder.path)
    models = [ServedModel(folder.name)]
    for given in adapters:
        adapter = choose_adapter(given)
        if isinstance(adapter, Adapter):
            fit_adapter(adapter, local)
        models.append(ServedModel(adapter.name if isinstance(adapter, Adapter) else adapter, adapter))
    check_adapters(models)
    return local, Text(folder), models


async def listeners_of(options: ApiOptions) -> list[trio.SocketListener]:
    """
    Raises:
        MachineError: the port is taken, or this machine has no such address.
    """
    return await listen(options.host, options.http_port, "--http-port")
