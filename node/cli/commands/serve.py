"""`petalnode serve`: host blocks of a model until told to stop. `pause`, `resume`, `stop`: servers that run here."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, get_args

import trio
import typer

from ....protocols.announcement import ANNOUNCEMENT
from ....protocols.ids import Span
from ...blocks.kernels.library import NOT_HERE, TO_HAVE, WITHOUT, library
from ...credits.payment_verifier import PaymentVerifier
from ...credits.wallet import Wallet
from ...errors import BadInput, ExitCode, MachineError
from ...models.adapter import check_adapter_files
from ...models.disk_limit import parse_size
from ...models.quantisation import (
    ACTIVATIONS,
    CACHE_DTYPES,
    KERNELS,
    QUANTISATIONS,
    Activations,
    CacheDtype,
    Kernels,
    Quantisation,
)
from ...models.sources.resolve import DEFAULT_MODEL
from ...monitoring.traces import traced
from ...network.addresses import parse_peer
from ...network.nat.relay import RelayLimits
from ...server.lifecycle.memory import has_accelerator
from ...server.lifecycle.options import (
    ServerOptions,
    ServerParts,
    check_adapters,
    check_blocks,
)
from ...server.lifecycle.pausing import Pause, PausePolicy
from ...server.lifecycle.server import run_server
from ...server.requests.admission import PrefixCache
from ...server.tallies import ServerTallies
from ...weights.holder import Share
from ..control import DonorOptions, controlled, number_given, obey_signals, send_wish
from ..join import JoinOptions, RelayOptions, check_peer_id, joined, joins_swarm
from ..metrics import MetricsOptions, add_server, metrics_served
from ..model_choice import check_devices, check_model, linked_model
from ..option import JsonFlag, option
from ..output import Output, ProgressBars
from ..server_report import ServerPanel, ServerReport
from ..terminal import StopSignal, written

_DTYPES = ("auto", "float32", "bfloat16", "float16")
_MOST = 10**15
"""Of what is announced as a number."""
STOP_GRACE = 10.0
"""Seconds after --drain-timeout in which a server that was ready retracts its announcement."""


@dataclass(frozen=True)
class ComputeOptions:
    """How much of this machine serves."""

    num_blocks: str = option("auto", "How many blocks to host; auto: as many as fit in memory.", "auto|N")
    device: list[str] | None = option(
        None,
        "Device to compute on: auto (default), cpu, cuda, cuda:N or mps; repeatable: each gets a part of the blocks.",
        "DEVICE",
    )

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices, in the order of their blocks."""
        return tuple(self.device or ("auto",))

    @property
    def count(self) -> int | None:
        """How many blocks; None: as many as fit.

        Raises:
            BadInput: it is no number.
        """
        if self.num_blocks == "auto":
            return None
        if not self.num_blocks.isdecimal() or int(self.num_blocks) < 1:
            raise BadInput(f"--num-blocks {self.num_blocks}: give a number of blocks, or auto")
        return int(self.num_blocks)


@dataclass(frozen=True)
class HostingOptions(ComputeOptions):
    """The options of `petalnode serve` alone."""

    blocks: str | None = option(None, "Host blocks A to B-1. Default: choose them by what the swarm lacks.", "A:B")
    dtype: str = option("auto", "Type to compute in; auto: that of the checkpoint.", among=_DTYPES)
    quant: Quantisation = option("none", "Quantisation of the weights, to save memory.", among=QUANTISATIONS)
    activations: Activations = option(
        "float32", "What weights are multiplied with: int8 is quicker on a CPU, and announced.", among=ACTIVATIONS
    )
    cache_dtype: CacheDtype = option(
        "auto",
        "What the attention cache holds; auto: the type computed in. Fewer bits hold more tokens; announced.",
        among=CACHE_DTYPES,
    )
    kernels: Kernels = option(
        "auto",
        "What multiplies a few rows on a CPU in float32: torch, the compiled kernels, or the quicker one.",
        among=KERNELS,
    )
    exact: bool | None = option(
        None,
        "Compute the same bits as all exact servers, by the compiled kernels; announced. Default: where "
        "`petalnode self-test` has measured that it costs at most 5 %.",
        names=("--exact/--no-exact",),
    )
    cache_tokens: int | None = option(
        None, "Size of the attention cache, in tokens through all blocks held here.", min=1
    )
    prefix_cache: PrefixCache = option(
        "own",
        "For whom to keep what was computed: its client, all clients that know its salt, or nobody.",
        among=get_args(PrefixCache),
    )
    throughput: str = option("auto", "Decode steps per second to announce; auto: measure.", "auto|F")
    name: str = option("", "Name of this server in `petalnode status`.")
    drain_timeout: float = option(
        30.0, "On Ctrl-C or SIGTERM, wait up to S seconds for sessions to move to other servers.", "S", min=0
    )
    rebalance: str = option(
        "20%", "Change blocks when a plan raises the throughput of the swarm by P percent; off: never.", "P%|off"
    )
    pledge: int = option(0, "Pledge POINTS, which are lost if a fault is proved.", "POINTS", min=0)
    deposit_at: str | None = option(
        None, "Validator that holds the points of --pledge as a deposit, so that clients count them.", "MULTIADDR"
    )
    max_disk: str | None = option(
        None, "Size limit of the model cache, such as 50G; least recently used models go first.", "SIZE"
    )
    allow_client: list[str] | None = option(
        None, "Serve only this client (`chat --identity FILE` prints its id); repeatable.", "PEER"
    )
    adapter: list[Path] | None = option(
        None, "Offer this LoRA adapter (a peft folder) under its name; repeatable.", "PATH"
    )
    share_weights: Share = option(
        "auto",
        "Hand the weights on to peers that lack them; auto: unless the hub gates the model, or may.",
        among=get_args(Share),
    )
    until_eof: bool = option(False, "Stop when standard input is closed: for programs that start servers.")
    plain: bool = option(False, "At a terminal, print lines only, and no panel that is kept up to date.")

    def checked(self, model: str) -> ServerOptions:
        """What the server is told, once all of it can be done here."""
        for peer in self.allow_client or ():
            check_peer_id(peer, "--allow-client", client=True)
        _check_numbers({"--cache-tokens": self.cache_tokens, "--pledge": self.pledge})
        dtype = self.dtype
        options = ServerOptions(
            model=model,
            blocks=_span(self.blocks),
            num_blocks=self.count,
            devices=("cpu",) * len(self.devices) if self.exact else self.devices,
            dtype="float32" if self.exact else dtype,
            quant=self.quant,
            activations=self.activations,
            cache_dtype=self.cache_dtype,
            kernels="native" if self.exact else self.kernels,
            exact=bool(self.exact),
            exact_if_cheap=self.exact is None,
            cache_tokens=self.cache_tokens,
            prefix_cache=self.prefix_cache,
            throughput=_throughput(self.throughput),
            name=_name(self.name),
            drain_timeout=self.drain_timeout,
            allow_clients=tuple(self.allow_client or ()),
            gain=_gain(self.rebalance),
            pledge=self.pledge,
            max_disk=None if self.max_disk is None else parse_size(self.max_disk, "--max-disk"),
            adapters=tuple(self.adapter or ()),
            share_weights=self.share_weights,
        )
        if self.activations != "float32" and dtype not in ("auto", "float32"):
            raise BadInput(
                f"--activations {self.activations} computes in float32: --dtype {dtype} cannot be had with it"
            )
        if self.cache_dtype != "auto" and dtype not in ("auto", "float32"):
            raise BadInput(f"--cache-dtype {self.cache_dtype} computes in float32: leave it out with --dtype {dtype}")
        if self.blocks is not None and options.num_blocks is not None:
            raise BadInput("--blocks and --num-blocks both choose the blocks: give one of them")
        if self.exact:
            _check_exact(dtype, self.devices, self.kernels)
        if self.kernels == "native" and library() is None:
            raise MachineError(NOT_HERE)
        found = check_model(model)
        if found is not None:
            check_blocks(options, found)
        for folder in options.adapters:
            check_adapter_files(folder)
        if options.adapters:
            check_adapters(options.adapters, found)
        return options


@joins_swarm
def serve(
    model: Annotated[
        str | None,
        typer.Argument(help=f"Folder, .gguf file, hub id or alias. Default: the link's, else {DEFAULT_MODEL}."),
    ] = None,
    *,
    hosting: HostingOptions,
    donor_options: DonorOptions,
    relay_options: RelayOptions,
    metrics_options: MetricsOptions,
    join: JoinOptions,
) -> None:
    """Host blocks of a model for the swarm."""
    join.check()
    model = linked_model(model, join.target) or DEFAULT_MODEL
    check_devices(hosting.devices)
    policy = donor_options.policy()
    options = hosting.checked(model)
    limits, deposit = relay_options.limits(), _deposit_at(hosting.deposit_at, hosting.pledge)
    trio.run(run_serve, ServeOptions(options, join, limits, metrics_options, policy, deposit, hosting))


@dataclass(frozen=True)
class ServeOptions:
    """What a person asked for, checked."""

    server: ServerOptions
    join: JoinOptions
    relay: RelayLimits
    metrics: MetricsOptions
    policy: PausePolicy
    deposit_at: str | None = None
    hosting: HostingOptions = HostingOptions()


async def _enforce_stop(
    stop: StopSignal, report: ServerReport, drain_timeout: float, serving: trio.CancelScope
) -> None:
    await stop.event.wait()
    if report.is_ready:
        await trio.sleep(drain_timeout + STOP_GRACE)
    serving.cancel()


async def run_serve(asked: ServeOptions) -> None:
    """Serves until told to stop, and ends the process."""
    output, stop = Output(asked.join.json), StopSignal()
    with ProgressBars(output.console) as bars:
        report = await _serve(asked, output, bars, stop)
    if stop.event.is_set() and not report.is_ready:
        with suppress(typer.Exit):
            stop.leave()
        # A thread that still loads is left behind, and torch aborts a process that ends in order meanwhile.
        written()
        os._exit(stop.exit_code)
    if report.is_drained and stop.event.is_set():
        output.note("done: nobody was served any more")
        raise typer.Exit(ExitCode.DONE)
    stop.leave()


async def _serve(asked: ServeOptions, output: Output, bars: ProgressBars, stop: StopSignal) -> ServerReport:
    """Serves until told to stop; returns what came of it."""
    options, join = asked.server, asked.join
    pause, tallies = Pause(), ServerTallies()
    async with trio.open_nursery() as nursery:
        await nursery.start(stop.watch)
        await nursery.start(obey_signals, pause)
        if options.kernels != "torch" and library() is None and not any(map(has_accelerator, options.devices)):
            output.note(f"{WITHOUT}; {TO_HAVE}")
        report = ServerReport(output, join, bars, nursery)
        cancelled = trio.CancelScope()
        nursery.start_soon(_enforce_stop, stop, report, options.drain_timeout, cancelled)
        if asked.hosting.until_eof:
            nursery.start_soon(stop.watch_stdin)
        with cancelled:
            async with (
                metrics_served(asked.metrics, output) as metrics,
                traced("server") as traces,
                joined(join, output, role="serve", listens=True, relay_limits=asked.relay) as (swarm, identity),
                controlled(pause, asked.policy, swarm.peer_id, options.name) as control,
            ):
                if join.psk is None and swarm.addrs:
                    control.found_at(swarm.addrs[0])
                payments = partial(PaymentVerifier, identity.peer_id)
                wallet = None if asked.deposit_at is None else Wallet(swarm, identity, asked.deposit_at)
                panel = None
                if output.console.is_terminal and not join.json and not asked.hosting.plain:
                    panel = ServerPanel(output.console, swarm, tallies, pause, wallet)
                report.begin(swarm, control, panel)
                add_server(metrics, swarm, tallies)
                tallies.on_session = None if traces is None else traces.served
                parts = ServerParts(report.on_event, bars, payments, wallet, tallies, pause)
                await run_server(swarm, options, parts, stop.event)
        nursery.cancel_scope.cancel()
    return report


_Server = Annotated[
    str | None,
    typer.Argument(help="Name, process id, or end of the peer id of a server. Default: all of yours that run."),
]


def pause(server: _Server = None, json: JsonFlag = False) -> None:
    """Pause servers on this machine: they take no new sessions, and leave the swarm when theirs have moved or ended."""
    send_wish(server, "pause", Output(json))


def resume(server: _Server = None, json: JsonFlag = False) -> None:
    """Let paused servers on this machine serve again."""
    send_wish(server, "resume", Output(json))


def stop(server: _Server = None, json: JsonFlag = False) -> None:
    """Stop servers on this machine, once their sessions have moved or ended."""
    send_wish(server, "stop", Output(json))


def _check_exact(dtype: str, devices: Sequence[str], kernels: str) -> None:
    if dtype not in ("auto", "float32") or kernels == "torch" or not {"auto", "cpu"}.issuperset(devices):
        raise BadInput("--exact computes in float32 by the compiled kernels on a CPU: leave these options out")
    if library() is None:
        raise MachineError(f"--exact needs the compiled kernels, which are not here: {TO_HAVE}")


def _span(text: str | None) -> Span | None:
    if text is None:
        return None
    try:
        return Span.parse(text)
    except ValueError as error:
        raise BadInput(f"--blocks {text}: {error}") from None


def _deposit_at(address: str | None, pledge: int) -> str | None:
    if address is not None:
        if not pledge:
            raise BadInput("--deposit-at needs --pledge POINTS: give that, too")
        parse_peer(address)
    return address


def _check_numbers(given: Mapping[str, int | None]) -> None:
    for name, number in given.items():
        if number is not None and number > _MOST:
            raise BadInput(f"{name} {number}: other nodes take at most {_MOST}")


def _name(text: str) -> str:
    if not text.isprintable() or len(text) > ANNOUNCEMENT.max_text:
        raise BadInput(f"--name: other nodes take at most {ANNOUNCEMENT.max_text} characters that can be printed")
    return text


def _gain(text: str) -> float | None:
    return None if text == "off" else number_given("--rebalance", text, 0, 1000, "percent, such as 20%, or off") / 100


def _throughput(text: str) -> float | None:
    what = "decode steps per second, such as 12.5, or auto"
    return None if text == "auto" else number_given("--throughput", text, 1e-6, 1e6, what)
