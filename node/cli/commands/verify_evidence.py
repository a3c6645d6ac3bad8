"""`petalnode verify-evidence`: check with one's own weights what somebody says of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ...errors import ExitCode
from ...models import resolve
from ...trust.bundle import Bundle
from ..output import Output, ProgressBars


def verify_evidence(
    file: Annotated[Path, typer.Argument(help="The evidence, as `petalnode validate --evidence-dir` writes it.")],
    model: Annotated[
        str | None,
        typer.Argument(help="The model that it is about: folder, .gguf file, hub id or alias. Default: smollm2."),
    ] = None,
    device: Annotated[str, typer.Option(help="Where to recompute: auto, cpu, cuda, cuda:1, mps.")] = "cpu",
    json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Check a server's fault alone: exit code 0 if it is proved, 1 if it is not, 2 if that cannot be checked.

    Faults that prove themselves need no model. Others are recomputed block by block from your own weights.
    """
    output = Output(json)
    bundle = Bundle.load(file)
    evidence = bundle.evidence
    output.say(f"{bundle.accuser} says of {bundle.accused}: {evidence.kind}")
    from ...models.sources import DEFAULT_MODEL
    from ...verification.evidence_check import check_evidence, wanted_blocks

    bars = ProgressBars(output.console)
    blocks = wanted_blocks(bundle)
    folder = None
    if blocks is not None:
        output.say(f"recomputing blocks {blocks} ...")
        folder = resolve(model or DEFAULT_MODEL, progress=bars)
    outcome = check_evidence(bundle, folder, device=device, progress=bars)
    bars.stop()
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
