"""The pictures of load_balancing.py: throughput over the days, and what each policy pays for how much of the bound."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DAY = 1440
LINES = {"none": "C7", "new_only": "C1", "petals_20": "C0", "full": "C2"}


def plot(
    folder: Path, series: Mapping[str, tuple[Sequence[float], Sequence[float]]], result: Mapping[str, Any]
) -> None:
    """load_balancing.png. `series`: throughput and bound by minute, of one seed; `result` as the benchmark prints."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (over_time, paid) = pyplot.subplots(
        1, 2, figsize=(12, 4.2), layout="constrained", gridspec_kw={"width_ratios": [2, 1]}
    )
    bound = next(iter(series.values()))[1]
    hours = [minute / 60 for minute in range(len(bound))]
    over_time.plot(hours, bound, color="black", linewidth=1, label="upper bound")
    for name, colour in LINES.items():
        if name in series:
            over_time.plot(hours, series[name][0], color=colour, linewidth=1, label=name)
    over_time.set(xlabel="hours", ylabel="tokens/s of the swarm", xlim=(0, hours[-1]), ylim=(0, None))
    over_time.set_xticks(range(0, int(hours[-1]) + 2, 12))
    over_time.legend(loc="upper right", fontsize="small")
    others = iter(("C4", "C5", "C6", "C8", "C9"))
    for name, figures in result.items():
        if name in ("oracle", "one_decision") or "zero_time" not in figures:
            continue
        place = (figures["blocks_per_day"], figures["share_of_upper_bound"])
        paid.plot(*place, "o", color=LINES.get(name) or next(others, "C7"), label=name)
    paid.legend(loc="lower right", fontsize="small")
    if "oracle" in result:
        paid.axhline(result["oracle"]["share_of_upper_bound"], color="black", linewidth=0.7, linestyle=":")
        paid.annotate(
            "oracle",
            (0.99, result["oracle"]["share_of_upper_bound"]),
            (-4, 3),
            textcoords="offset points",
            xycoords=("axes fraction", "data"),
            ha="right",
            fontsize="small",
        )
    paid.set_xscale("symlog", linthresh=300)
    paid.set_xlim(-40, 30_000)
    paid.set(xlabel="blocks reloaded a day", ylabel="share of the upper bound", ylim=(0, 1))
    paid.grid(alpha=0.3)
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / "load_balancing.png", dpi=110)
