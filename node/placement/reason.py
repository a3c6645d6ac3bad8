"""Why a server takes the blocks that it takes, in words for a person. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from ...protocols.ids import Span
from .holder import Holder, coverage, gaps, upper_bound
from .plan import Plan

_NOTABLE: Final = 1.005


def why_join(others: Sequence[Holder], span: Span, num_blocks: int) -> str:
    """Why a newcomer takes `span` where `others` are there already."""
    if not others:
        return "nobody else is there"
    held = coverage(others, num_blocks)
    missing = [gap for gap in gaps(others, num_blocks) if gap.start < span.end and span.start < gap.end]
    if missing:
        return f"nobody holds {_spans(missing)}"
    weakest = float(held[span.start : span.end].min())
    if weakest <= held.min() * _NOTABLE:
        return f"that is where the swarm is slowest, {weakest:.3g} steps/s"
    return f"the swarm has {weakest:.3g} steps/s there, and others will be moved to where it is slower"


def why_move(plan: Plan, holders: Sequence[Holder], num_blocks: int) -> str:
    """What `plan`, made for `holders`, is for."""
    missing = gaps(holders, num_blocks)
    if plan.closes > 0 and missing:  # else others of the plan have closed it already
        return f"nobody holds {_spans(missing)}"
    if plan.after > plan.before * _NOTABLE:
        most = upper_bound(holders, num_blocks)
        return f"the swarm then does {plan.after:.3g} steps/s instead of {plan.before:.3g}, of {most:.3g} at most"
    return f"fewer blocks are then near the least, {plan.after:.3g} steps/s"


def _spans(spans: Sequence[Span]) -> str:
    return "blocks " + ", ".join(str(span) for span in spans)
