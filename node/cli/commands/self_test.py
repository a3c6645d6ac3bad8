"""`petalnode self-test`: whether this machine computes what plain transformers computes, alone and through a swarm.

A small model with random weights, made on the spot, runs on every device, and through two servers on loopback. Nothing
is downloaded; only how fast a block was, to the bit and otherwise, is kept for servers.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import re
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import trio
import typer
from safetensors import SafetensorError

from ....crypto.identity import Identity
from ....protocols.ids import Span
from ...blocks.kernels.library import TO_HAVE, WITHOUT, library
from ...credits.payment_verifier import PaymentVerifier
from ...errors import ExitCode, MachineError, PetalnodeError, reason_of
from ...models.progress import no_progress
from ...models.quantisation import EXACT, Numerics
from ...server.lifecycle.exactness import RULE, cost_of, keep_cost, measured
from ...server.lifecycle.options import ServerOptions, ServerParts
from ...server.lifecycle.server import run_server
from ...server.lifecycle.speed import BlockSpeed, cpu_name
from ...swarm.config import SwarmConfig
from ...swarm.swarm import open_swarm
from ..join import JoinOptions, joins_swarm
from ..output import Output
from ..process import leaves
from .doctor import Finding, Verdict, check_network, machine_findings

if TYPE_CHECKING:
    from ...blocks.machine_check import GreedyAnswer, ProductSpeed
    from ...swarm.swarm import Swarm

T = TypeVar("T")
_TIME: Final = 120.0
_SWARM_SHARE, _STEP_SHARE = 2, 6
"""The swarm has a half of the time, a step or the search for a peer a sixth."""
_LOOPBACK: Final = "/ip4/127.0.0.1/tcp/0"
CACHE_VARIABLE: Final = "PETALNODE_CACHE"
_MARKS: Final = {"ok": "ok", "warning": "!", "problem": "NO"}


@joins_swarm
def self_test(
    timeout: Annotated[
        float, typer.Option(min=1, metavar="S", help="Give up after S seconds; what was not tested is told.")
    ] = _TIME,
    *,
    join: JoinOptions,
) -> None:
    """Test this machine: speed of the devices, exactness against plain transformers, a swarm on loopback, reachability.

    Takes up to two minutes, downloads nothing, and prints a report to paste. Exit code 1 if something computes wrong.
    """
    join.check()
    trio.run(_self_test, join, timeout)


async def _self_test(join: JoinOptions, timeout: float) -> None:
    output = Output(join.json)
    report = SelfTestReport(output)
    with trio.move_on_after(timeout) as scope, _scratch() as scratch:
        folder = scratch / "model"
        output.note("looking at the machine ...")
        report.machine(await _in_thread(lambda: list(machine_findings())))
        output.note("multiplying ...")
        report.add(*await _in_thread(lambda: list(compute_findings())))
        with _cache_in(scratch / "cache"):
            output.note("comparing blocks with plain transformers ...")
            plain, findings = await _in_thread(partial(exactness_findings, folder))
            report.add(*findings)
            speeds, finding = await _in_thread(partial(exact_cost_finding, scratch / "wide"))
            report.add(finding)
            if plain is not None:
                output.note("starting two servers on loopback ...")
                report.add(await _swarm_finding(folder, plain, timeout))
        await _in_thread(partial(keep_cost, speeds))
        output.note("joining the swarm, and asking others to dial back ...")
        report.machine(await check_network(join, output))
    if scope.cancelled_caught:
        report.add(Finding("time", "warning", f"not done within {timeout:.0f} s; what is missing above was not tested"))
    report.end()
    raise typer.Exit(ExitCode.RESULT_SAYS_NO if report.faults else ExitCode.DONE)


class SelfTestReport:
    """What has been found, without what names the user or the network: it is pasted where others read it."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._started = time.monotonic()
        self.findings: list[Finding] = []

    @property
    def faults(self) -> int:
        return sum(finding.verdict == "problem" for finding in self.findings)

    def add(self, *findings: Finding) -> None:
        for finding in findings:
            shown = Finding(finding.check, finding.verdict, anonymous(finding.text), anonymous(finding.advice))
            self.findings.append(shown)
            self._output.emit(event="check", **asdict(shown))

    def machine(self, findings: list[Finding]) -> None:
        """What the machine or its network lacks is no fault of what is computed."""
        for finding in findings:
            verdict: Verdict = "warning" if finding.verdict == "problem" else finding.verdict
            self.add(Finding(finding.check, verdict, finding.text, finding.advice))

    def end(self) -> None:
        seconds = time.monotonic() - self._started
        cut_short = any(finding.check == "time" for finding in self.findings)
        told = f"{self.faults} faults" if self.faults else "not finished" if cut_short else "all exact"
        where = f"{platform.system()} {platform.release()} {platform.machine()}, {cpu_name()}"
        self._output.say("```")
        self._output.say(f"petalnode self-test: {told} ({seconds:.0f} s)")
        self._output.say(f"{'':<4}{'platform':<14}{where}")
        for finding in self.findings:
            self._output.say(f"{_MARKS[finding.verdict]:<4}{finding.check:<14}{finding.text}")
            if finding.advice:
                self._output.say(f"{'':<18}-> {finding.advice}")
        self._output.say("```")
        self._output.emit(event="report", exact=not self.faults, faults=self.faults, seconds=seconds, platform=where)


def anonymous(text: str) -> str:
    """Without the user's folder, peer ids and the addresses of machines."""
    home = str(Path.home())
    text = text.replace(home, "~") if len(home) > 1 else text
    text = re.sub(r"\b12D3KooW\w+", "12D3KooW...", text)
    return re.sub(r"(?<![\w.:])[0-9a-fA-F:.]*[0-9a-fA-F:](?![\w:])", _without_address, text)


def _without_address(found: re.Match[str]) -> str:
    try:
        address = ipaddress.ip_address(found[0])
    except ValueError:
        return found[0]
    return found[0] if address.is_loopback or address.is_unspecified else "ADDRESS"


async def _in_thread(work: Callable[[], Any]) -> Any:
    return await trio.to_thread.run_sync(work, abandon_on_cancel=True)


@contextmanager
def _scratch() -> Iterator[Path]:
    """A folder that is removed afterwards. On Windows a mapped file of a thread that was left behind stays."""
    with tempfile.TemporaryDirectory(prefix="petalnode-self-test-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def _cache_in(folder: Path) -> Iterator[None]:
    """Has what is kept of models, here of one that nobody will see again, in `folder`."""
    before = os.environ.get(CACHE_VARIABLE)
    os.environ[CACHE_VARIABLE] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[CACHE_VARIABLE]
        else:
            os.environ[CACHE_VARIABLE] = before


def compute_findings() -> Iterator[Finding]:
    """How fast and how exactly each device multiplies: a line for a device and dtype, one for quantised weights."""
    import torch  # 2 s

    from ...blocks import machine_check

    capability = torch.backends.cpu.get_cpu_capability()
    for device in machine_check.devices():
        name = f"{device} ({capability})" if device == "cpu" else device
        for dtype in (torch.float32, torch.bfloat16):
            yield product_finding(f"{name} has no {dtype}", name, _outcome(machine_check.products, device, dtype))
        for quantisation in ("int8", "nf4"):
            found = _outcome(machine_check.quantised_error, device, quantisation)
            yield quantised_finding(f"{name}, {quantisation}", quantisation, found)


def _outcome(function: Callable[..., T], *given: Any) -> T | Exception:
    try:
        return function(*given)
    except (PetalnodeError, RuntimeError, ImportError) as error:
        return error


def product_finding(lacks: str, device: str, found: ProductSpeed | Exception) -> Finding:
    """What products of a dtype were on `device`; `lacks` says that it has not got them."""
    if isinstance(found, Exception):
        return Finding("compute", "warning", f"{lacks}: {reason_of(found)}")
    rates = f"{found.flops / 1e9:.0f} GFLOP/s, weights at {found.bytes_per_second / 1e9:.1f} GB/s"
    text = f"{device}, {found.dtype}: {rates}, error {found.error:.1e}"
    advice = "" if found.right else "check the driver and the memory; do not serve with this device"
    return Finding("compute", "ok" if found.right else "problem", text, advice)


def quantised_finding(what: str, quantisation: str, found: tuple[float, bool] | Exception) -> Finding:
    """How wrong products with quantised weights were, and whether they are right. A server notices a wrong kernel when
    it starts, and has torch multiply instead."""
    if isinstance(found, Exception):
        return Finding("compute", "warning", f"{what}: not here: {reason_of(found)}")
    error, right = found
    advice = "" if right else f"torch will multiply {quantisation} weights instead, more slowly"
    return Finding("compute", "ok" if right else "warning", f"{what}: error {error:.1e}", advice)


def exactness_findings(folder: Path) -> tuple[GreedyAnswer | None, list[Finding]]:
    """Makes the model, and compares its blocks on every device with plain transformers on that device.

    Returns:
        Plain transformers' answer on the CPU, None if it gives none; a finding for each device.
    """
    from ...blocks import machine_check

    plain: GreedyAnswer | None = None
    findings = []
    try:
        machine_check.make_model(folder)
    except (OSError, RuntimeError, SafetensorError) as error:
        text = f"not tested: the model cannot be written to a temporary folder: {reason_of(error)}"
        return None, [Finding("exactness", "warning", text, "make room, or set TMPDIR to another folder")]
    for device in machine_check.devices():
        try:
            expected = machine_check.plain_answer(folder, device)
            plain = plain or expected
            found = machine_check.span_answer(folder, device)
            findings.append(compared("exactness", f"blocks on {device}", found, expected))
            if device == "cpu":
                findings.append(_compiled_finding(folder, expected))
        except (PetalnodeError, RuntimeError, OSError) as error:
            findings.append(Finding("exactness", "problem", f"blocks on {device} failed: {reason_of(error)}"))
    return plain, findings


def _compiled_finding(folder: Path, expected: GreedyAnswer) -> Finding:
    from ...blocks import machine_check

    kernels = library()
    if kernels is None:
        return Finding("exactness", "warning", f"not tested: {WITHOUT}", TO_HAVE)
    if not kernels.is_exact and kernels.isa != "plain":  # which rounds otherwise
        text = f"compiled kernels ({kernels.isa}) compute other bits than {EXACT} has"
        return Finding("exactness", "problem", text, "build them with another compiler; do not serve with --exact")
    try:
        found = machine_check.span_answer(folder, "cpu", "native")
    except MachineError as error:
        return Finding("exactness", "warning", f"compiled kernels not tested: {reason_of(error)}")
    bits = f"the bits of {EXACT}" if kernels.is_exact else "without fused products"
    return compared("exactness", f"blocks on cpu with compiled kernels ({kernels.isa}, {bits})", found, expected)


def exact_cost_finding(folder: Path) -> tuple[dict[Numerics, BlockSpeed], Finding]:
    """How fast a wider block is to the bit and otherwise, by which servers choose."""
    from ...blocks import machine_check

    try:
        machine_check.make_model(folder, blocks=1, width=768)
        speeds = measured(folder)
    except (PetalnodeError, RuntimeError, OSError, SafetensorError) as error:
        return {}, Finding("exactness", "warning", f"what {EXACT} costs was not measured: {reason_of(error)}")
    cost = cost_of(speeds)
    assert cost is not None
    told = f"{EXACT} takes {cost.step:.2f} of the time of a step, {cost.prompt:.2f} of that of a prompt"
    does = "serve computes so" if cost.is_small else f"more than {RULE.most} for one, so serve does not compute so"
    return speeds, Finding("exactness", "ok", f"{told}: {does} unless it is told otherwise")


def compared(check: str, what: str, answer: GreedyAnswer, expected: GreedyAnswer) -> Finding:
    """Exact is: the same greedy tokens."""
    difference = f"largest difference of a logit {answer.difference(expected):.1e}"
    if answer.tokens == expected.tokens:
        return Finding(check, "ok", f"{what}: {len(expected.tokens)} tokens as plain transformers, {difference}")
    same = next(at for at, pair in enumerate(zip(answer.tokens, expected.tokens, strict=True)) if pair[0] != pair[1])
    advice = "report this with the lines above; do not serve with this device"
    text = f"{what}: other tokens than plain transformers from {same} on, {difference}"
    return Finding(check, "problem", text, advice)


async def _swarm_finding(folder: Path, plain: GreedyAnswer, timeout: float) -> Finding:
    limit, step = timeout / _SWARM_SHARE, timeout / _STEP_SHARE
    try:
        with trio.fail_after(limit):
            async with _servers(folder, step) as address:
                found: Finding = await _in_thread(partial(_asked, folder, address, plain, step))
                return found
    except trio.TooSlowError:
        return Finding("swarm", "problem", f"no answer within {limit:.0f} s from two servers on loopback")
    except Exception as raised:
        causes = list(leaves(raised))
        if not all(isinstance(cause, (PetalnodeError, OSError, RuntimeError)) for cause in causes):
            raise
        advice = "does a firewall or a sandbox keep this program from 127.0.0.1?"
        return Finding("swarm", "problem", f"two servers on loopback failed: {reason_of(causes[0])}", advice)


@asynccontextmanager
async def _servers(folder: Path, patience: float) -> AsyncIterator[str]:
    """Two servers of half of the model each, in this process; gives the address of one."""
    from ...blocks.machine_check import HALVES

    async with trio.open_nursery() as nursery:
        peers: tuple[str, ...] = ()
        for span in HALVES:
            address: str = await nursery.start(_serve, folder, span, peers, patience)
            peers = (address,)
        yield address
        nursery.cancel_scope.cancel()


async def _serve(
    folder: Path,
    span: Span,
    peers: tuple[str, ...],
    patience: float,
    *,
    task_status: trio.TaskStatus[str] = trio.TASK_STATUS_IGNORED,
) -> None:
    identity = Identity.generate()
    config = SwarmConfig(identity=identity, listen=(_LOOPBACK,), peers=peers, relay="off", bootstrap_deadline=patience)
    # A given throughput: that of this model is not to be kept as this machine's.
    options = ServerOptions(
        str(folder), blocks=span, devices=("cpu",), dtype="float32", throughput=1.0, drain_timeout=0.0
    )
    async with open_swarm(config) as swarm:
        on_event = partial(_tell_ready, task_status, swarm)
        payments = partial(PaymentVerifier, identity.peer_id)
        await run_server(swarm, options, ServerParts(on_event, no_progress, payments), trio.Event())


def _tell_ready(task_status: trio.TaskStatus[str], swarm: Swarm, event: str, **fields: Any) -> None:
    if event == "ready":
        task_status.started(swarm.addrs[0])


def _asked(folder: Path, address: str, plain: GreedyAnswer, step: float) -> Finding:
    import torch

    from ...blocks.machine_check import NEW, PROMPT, GreedyAnswer, question
    from ...client.api.causal_lm import AutoDistributedModelForCausalLM

    with AutoDistributedModelForCausalLM.from_pretrained(
        folder, initial_peers=[address], dtype="float32", request_timeout=step, wait=True
    ) as model:
        began = time.perf_counter()
        found = model.generate(
            question(),
            attention_mask=torch.ones(1, PROMPT, dtype=torch.int64),
            max_new_tokens=NEW,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
        seconds = time.perf_counter() - began
    answer = GreedyAnswer(tuple(found.sequences[0, PROMPT:].tolist()), found.logits[-1][0].float().cpu())
    return compared("swarm", f"two servers on loopback, {seconds / NEW * 1000:.0f} ms a token", answer, plain)
