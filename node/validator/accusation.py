"""Evidence of what a validator found: a file by which anyone with the weights can check it alone."""

from __future__ import annotations

from pathlib import Path

from ...crypto.identity import Identity
from ..trust.bundle import Bundle, Found, batch_bundle, session_bundle
from ..trust.receipt_log import SessionLog
from ..verification.verdicts import Compared, Verdict


def bundle_of(compared: Compared, verdict: Verdict, accuser: Identity) -> Bundle | None:
    """Evidence of a fault, from the receipts of what was compared; None if they are not enough.

    Of a session it shows the answer that is farthest from the truth, and what led to it.
    """
    source = compared.observed.source
    found = Found(verdict.error or 0.0, verdict.tolerance or 0.0, compared.observed.device)
    try:
        if isinstance(source, SessionLog):
            worst = max(range(len(compared.steps)), key=lambda index: compared.steps[index].worst)
            return session_bundle(accuser, source, worst, found)
        return None if source is None else batch_bundle(accuser, source, found)
    except ValueError:
        return None


def save_evidence(folder: Path, bundle: Bundle) -> Path:
    """Writes it to a file of its own.

    Raises:
        OSError: the folder cannot be written.
    """
    file = folder / f"{bundle.accused[-8:]}-{bundle.id.hex()[:16]}.safetensors"
    bundle.save(file)
    return file
