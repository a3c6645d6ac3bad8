"""`petalnode validate`, `verify-evidence` and `verify-receipts`: recompute answers, check evidence and receipts."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import trio
import typer
from rich.live import Live
from rich.table import Table

from ....crypto.identity import Identity, others_can_read
from ...client.chat import Text
from ...client.swarm_model import identify_model
from ...errors import BadInput, ExitCode, ModelError
from ...models import resolve
from ...models.cache_dir import check_writable, data_folder
from ...models.disk_limit import parse_size
from ...models.sources.resolve import DEFAULT_MODEL
from ...network.nat.relay import RelayLimits
from ...swarm.swarm import Swarm
from ...trust.bundle import Bundle
from ..join import JoinOptions, joined, joins_swarm
from ..metrics import MetricsOptions, add_node, metrics_served
from ..model_choice import check_device, check_model, linked_model, model_folder, on_demand_folder, served_model
from ..node_report import say_link
from ..option import JsonFlag, option
from ..output import Output, ProgressBars, whole_figures
from ..process import say_error
from ..terminal import StopSignal

if TYPE_CHECKING:
    from ...credits.issuer import Rewards
    from ...trust.receipt_file import SignedReply
    from ...validator.probe_inputs import ProbeModel
    from ...verification.answer_check import AnswerFindings
    from ...verification.verdicts import Verdict

_Device = Annotated[str, typer.Option(help="Device to recompute on: auto, cpu, cuda, cuda:N or mps.")]
_STYLES = {"ok": "green", "inconclusive": "yellow", "faulty": "bold red"}


@dataclass(frozen=True)
class ValidateOptions:
    """The options of `petalnode validate`."""

    once: bool = option(False, "Probe every server once and exit, with code 1 if any is faulty.")
    interval: float = option(300.0, "Mean seconds between two probes; the times are random.", "S", min=0.1)
    evidence_dir: Path | None = option(None, "Save evidence of faults here, for `petalnode verify-evidence`.", "DIR")
    device: str = option("cpu", "Device to recompute on: auto, cpu, cuda, cuda:N or mps.")
    issue_points: bool = option(False, "Keep a ledger and issue points to servers for verified work.")
    max_disk: str | None = option(
        None, "Size limit of the model cache, such as 5G: blocks come from peers as they are recomputed.", "SIZE"
    )


@joins_swarm
def validate(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder, .gguf file, hub id or alias, with all weights. Default: that of the swarm."),
    ] = None,
    *,
    options: ValidateOptions,
    metrics_options: MetricsOptions,
    join: JoinOptions,
) -> None:
    """Check servers: send requests like those of a client, and recompute the answers block by block."""
    if options.once and options.issue_points:
        raise BadInput("--issue-points needs a validator that keeps running: leave --once out")
    join.check()
    folder = options.evidence_dir
    if folder is not None:
        if folder.is_file():
            raise BadInput(f"--evidence-dir {folder} is a file: give a folder")
        if others_can_read(folder):
            told = "and evidence may hold what somebody wrote to a model"
            say_error(f"others on this machine can look into {folder}, {told}: chmod 700 {folder}", "warning")
        check_writable(folder, f"Saving evidence in {folder}", "Make room there, or give another --evidence-dir.")
    check_device(options.device)
    if options.max_disk is not None:
        parse_size(options.max_disk, "--max-disk")
    model = linked_model(model, join.target)
    check_model(model)
    raise typer.Exit(trio.run(_validate, model, options, join, metrics_options))


async def _cancel_when_stopped(stop: StopSignal, scope: trio.CancelScope) -> None:
    await stop.event.wait()
    scope.cancel()


async def _validate(
    model: str | None, options: ValidateOptions, join: JoinOptions, metrics_options: MetricsOptions
) -> int:
    from ...blocks import collector_paused

    with collector_paused():
        from ...blocks.config import choose_device
        from ...validator.history import History
        from ...validator.service import Validator, ValidatorOptions
        from ...verification.verdicts import Judge

    output = Output(join.json)
    device = str(choose_device(options.device))
    stop = StopSignal()
    data_dir = data_folder()
    table = _VerdictTable(output, options.once)
    found: list[Verdict] = []
    finished = False
    async with trio.open_nursery() as nursery:
        await nursery.start(stop.watch)
        nursery.start_soon(_cancel_when_stopped, stop, nursery.cancel_scope)
        async with (
            AsyncExitStack() as stack,
            metrics_served(metrics_options, output) as metrics,
            joined(join, output, role="validate", listens=not options.once) as (swarm, identity),
        ):
            add_node(metrics, swarm, "validator")
            if metrics is not None:
                from ...monitoring.metrics import VerdictMetrics

                metrics.register(VerdictMetrics(table.verdicts))
            probe_model = await _probe_model(swarm, model, output, options.max_disk)
            folder = probe_model.swarm_model.folder
            rewards: Rewards | None = None
            if options.issue_points:
                rewards = await _issue_points(swarm, identity, data_dir, stack)
                nursery.start_soon(rewards.take_deposits)
            if not options.once:
                _say_ready(output, swarm, audits=not folder.fetches, issue_points=options.issue_points)
                say_link(swarm, join, output, folder.name, probe_model.swarm_model.version)
            # The probes come from nodes that look like clients: each with a key of its own, and without a port.
            config = join.config(Identity.generate(), listens=False, data_dir=data_dir, relay_limits=RelayLimits())
            history = stack.enter_context(History(data_dir / "validator" / "history.sqlite"))
            stack.enter_context(table)
            validator = Validator(
                swarm,
                ValidatorOptions(
                    config=replace(config, listen=(), announce=()),
                    model=probe_model,
                    judge=Judge(folder, device),
                    history=history,
                    on_verdict=table.on_verdict,
                    on_judged=rewards.verified if rewards is not None else None,
                    evidence_dir=options.evidence_dir,
                    accuser=identity,
                ),
            )
            if options.once:
                found = await validator.once()
            else:
                nursery.start_soon(validator.judge_for_others)
                await validator.run(options.interval)
        finished = True
        nursery.cancel_scope.cancel()
    if not finished:
        stop.leave()
    return int(ExitCode.RESULT_SAYS_NO if any(verdict.verdict == "faulty" for verdict in found) else ExitCode.DONE)


async def _probe_model(swarm: Swarm, model: str | None, output: Output, max_disk: str | None) -> ProbeModel:
    from ...blocks.client_part import load_client
    from ...validator.probe_inputs import ProbeModel

    named = model or await served_model(swarm, output)
    if max_disk is None:
        folder = await model_folder(named, output, need="all", swarm=swarm)
    else:
        folder = await on_demand_folder(named, output, swarm, parse_size(max_disk, "--max-disk"))
    # First, as it refuses what cannot be served: to identify a model all of it may have to be read.
    local = await trio.to_thread.run_sync(lambda: load_client(folder.path, device="cpu"), abandon_on_cancel=True)
    with ProgressBars(output.errors) as bars:
        identified = await identify_model(swarm, folder, bars)
    try:
        text = await trio.to_thread.run_sync(Text, folder, abandon_on_cancel=True)
    except ModelError:
        text = None  # no tokenizer: probes then have random tokens
    return ProbeModel(identified, local, text)


async def _issue_points(swarm: Swarm, identity: Identity, data_dir: Path, stack: AsyncExitStack) -> Rewards:
    """Serves the ledger of points until `stack` is closed, and earns servers points there."""
    from ...credits.issuer import CreditsService, Rewards
    from ...credits.ledger import Ledger

    # One ledger per key, which is the issuer of its points.
    file = data_dir / "validator" / f"ledger-{identity.peer_id}.sqlite"
    ledger = stack.enter_context(await trio.to_thread.run_sync(Ledger, file, identity))
    CreditsService(swarm, ledger)
    rewards = Rewards(ledger)
    swarm.evidence.on_proven.append(rewards.proven)
    return rewards


def _say_ready(output: Output, swarm: Swarm, *, audits: bool, issue_points: bool) -> None:
    output.emit(event="ready", peer_id=swarm.peer_id, addrs=list(swarm.addrs))
    for address in swarm.addrs[:1] if audits else ():
        output.say(f"to have your answers audited:  petalnode chat --share-receipts {address}")
    if issue_points:
        output.say(f"to accept the points of this validator:  petalnode serve --trust-validator {swarm.peer_id}")
        for address in swarm.addrs[:1]:
            output.say(f"to see the points of your server:  petalnode credits balance {address}")


_COLUMNS = ("server", "blocks", "verdict", "error", "tolerance", "requests", "when", "why")
_FIGURES = ("error", "tolerance", "requests", "when")
_WIDE = 110
"""Columns of a terminal on which all of them can be read."""


class _VerdictTable:
    """Prints verdicts (as JSON lines, as lines of text, or as a live table on a terminal), and counts them."""

    def __init__(self, output: Output, once: bool) -> None:
        self._output = output
        self._once = once
        self._last: dict[str, tuple[float, Verdict]] = {}
        self._counts: dict[str, int] = {}
        self.verdicts: Counter[str] = Counter()
        self._live = Live(console=output.console, auto_refresh=False) if self._drawn and not once else None

    @property
    def _drawn(self) -> bool:
        return not self._output.as_json and self._output.console.is_terminal

    def __enter__(self) -> _VerdictTable:
        if self._live is not None:
            self._output.say("waiting for the first probe; Ctrl-C stops the validator", style="dim")
            self._live.start()
        elif self._once and not self._output.as_json:
            self._output.note("asking servers, and computing their blocks again here: this can take minutes ...")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
        elif self._once and self._last and not self._output.as_json:
            self._output.table(self._table())

    def on_verdict(self, verdict: Verdict) -> None:
        self.verdicts[verdict.verdict] += 1
        self._last[verdict.peer_id] = (time.time(), verdict)
        self._counts[verdict.peer_id] = self._counts.get(verdict.peer_id, 0) + 1
        if self._output.as_json:
            self._output.emit(event="verdict", **verdict.fields())
        elif self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif not self._once:
            self._output.say(
                f"{verdict.peer_id} (blocks {verdict.blocks}): {verdict.verdict}, {verdict.reason}",
                style=_STYLES[verdict.verdict],
            )

    def _table(self) -> Table:
        return findings_table(self._last, self._counts, narrow=self._output.console.width < _WIDE)


def findings_table(
    last: Mapping[str, tuple[float, Verdict]], counts: Mapping[str, int], *, narrow: bool = False
) -> Table:
    """The last verdict on each server. `last`: (time, verdict) by peer id; `counts`: verdicts so far.

    A `narrow` table leaves the figures out, so that the reason has room.
    """
    table = Table(title="What servers answer, recomputed", title_justify="left")
    columns = [column for column in _COLUMNS if not narrow or column not in _FIGURES]
    for column in columns:
        right = column in ("blocks", "error", "tolerance", "requests")
        table.add_column(column, justify="right" if right else "left", overflow="fold", no_wrap=column == "server")
    for peer_id, (moment, verdict) in sorted(last.items(), key=lambda item: item[1][1].blocks):
        cells = (
            "…" + peer_id[-8:] + (f" ({counts[peer_id]}x)" if counts[peer_id] > 1 else ""),
            str(verdict.blocks),
            verdict.verdict,
            "" if verdict.error is None else f"{verdict.error:.2g}",
            "" if verdict.tolerance is None else f"{verdict.tolerance:.2g}",
            str(verdict.requests),
            time.strftime("%H:%M:%S", time.localtime(moment)),
            verdict.reason,
        )
        shown = dict(zip(_COLUMNS, cells, strict=True))
        table.add_row(*(shown[column] for column in columns), style=_STYLES[verdict.verdict])
    return whole_figures(table)


def verify_evidence(
    file: Annotated[Path, typer.Argument(help="Evidence file, as `petalnode validate --evidence-dir` writes it.")],
    model: Annotated[
        str | None,
        typer.Argument(help="The model of the server: folder, .gguf file, hub id or alias. Default: smollm2."),
    ] = None,
    device: _Device = "cpu",
    json: JsonFlag = False,
) -> None:
    """Check evidence of a server's fault: exit code 0 if it is proved, 1 if it is not, 2 if it cannot be checked.

    Two contradicting signatures need no model. Wrong outputs are recomputed block by block from your own weights.
    """
    output = Output(json)
    check_device(device)
    bundle = Bundle.load(file)
    evidence = bundle.evidence
    output.say(f"{bundle.accuser} says of {bundle.accused}: {evidence.kind}")
    from ...verification.evidence_check import check_evidence, wanted_blocks

    blocks = wanted_blocks(bundle)
    folder = None
    with ProgressBars(output.console) as bars:
        if blocks is not None:
            output.say(f"recomputing blocks {blocks} ...")
            folder = resolve(model or DEFAULT_MODEL, progress=bars)
        outcome = check_evidence(bundle, folder, device=device, progress=bars)
    verdict = "proven" if outcome.proven else "inconclusive" if outcome.inconclusive else "refuted"
    output.say(f"{verdict}: {outcome.reason}")
    output.emit(
        event="evidence",
        verdict=verdict,
        kind=evidence.kind,
        peer_id=bundle.accused,
        accuser=bundle.accuser,
        id=bundle.id.hex(),
        reason=outcome.reason,
        error=outcome.error,
        tolerance=outcome.tolerance,
    )
    raise typer.Exit(ExitCode.DONE if outcome.proven else ExitCode.RESULT_SAYS_NO)


def verify_receipts(
    file: Annotated[Path, typer.Argument(help="What GET /v1/petalnode/receipts/ID of `petalnode api` said.")],
    model: Annotated[
        str | None,
        typer.Argument(
            help="Compute the answer again with this model. The file has to have the tokens (?tokens=true)."
        ),
    ] = None,
    digest: Annotated[
        str | None, typer.Option(metavar="HEX", help="The digest that came with the answer, in `x_petalnode`.")
    ] = None,
    json: JsonFlag = False,
) -> None:
    """Check the receipts of an answer of `petalnode api`: exit code 0 if all are as they should be, 1 if not.

    They show which servers have signed replies for which blocks. That the replies were right is shown with MODEL, of
    servers of the exact kind: exit code 2 if that cannot be told.
    """
    from ...trust.receipt_file import check, load

    output = Output(json)
    stated, replies = load(file)
    if digest is not None and stated.hex() != digest.strip().lower():
        output.error("the file has another digest than the answer")
        raise typer.Exit(ExitCode.RESULT_SAYS_NO)
    found = check(stated, replies)
    for server in found.work:
        start, end = server.blocks
        seconds = (server.last_ms - server.first_ms) / 1000
        output.say(f"{server.peer_id}: blocks {start}:{end}, {server.replies} signed replies in {seconds:.1f} s")
    for problem in found.wrong:
        output.say(problem)
    output.say("wrong" if found.wrong else "all are signed, and follow each other")
    computed = [] if model is None or found.wrong else _computed(output, model, replies)
    verdicts = {answer.verdict for answer in computed}
    output.emit(
        event="receipts",
        ok=not found.wrong and verdicts <= {"yes"},
        digest=stated.hex(),
        servers=[
            {"peer_id": server.peer_id, "blocks": list(server.blocks), "replies": server.replies}
            for server in found.work
        ],
        wrong=list(found.wrong),
        **({"answers": [answer.fields() for answer in computed]} if model is not None else {}),
    )
    if found.wrong or "no" in verdicts:
        raise typer.Exit(ExitCode.RESULT_SAYS_NO)
    raise typer.Exit(ExitCode.BAD_INPUT if "unknown" in verdicts else ExitCode.DONE)


def _computed(output: Output, model: str, replies: Sequence[SignedReply]) -> list[AnswerFindings]:
    """What comes of computing the answers again, which is said as well."""
    from ...verification.answer_check import check_answers

    with ProgressBars(output.console) as bars:
        folder = resolve(model, progress=bars)
        output.say(f"computing the answer again with {folder.path} ...")
        answers = check_answers(folder, replies, bars)
    for answer in answers:
        output.say(f"{answer.verdict}: {answer.reason}")
        output.say(f"{answer.likeliest} of its {answer.tokens} tokens are the most likely ones", style="dim")
    return answers
