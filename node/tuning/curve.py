"""The losses of a training as a picture: an SVG of steps and losses, without a library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

Point = tuple[int, float]
"""A step and its loss."""


@dataclass(frozen=True)
class Canvas:
    """What the picture measures, in pixels; and how many steps a curve has at most."""

    width: int = 640
    height: int = 360
    left: int = 56
    bottom: int = 40
    margin: int = 24
    points: int = 512
    ticks: int = 5


CANVAS: Final = Canvas()


@dataclass
class LossCurve:
    """Losses by steps: of the batches that were trained on, every `stride`th step, and on held-out data."""

    trained: list[Point] = field(default_factory=list)
    held_out: list[Point] = field(default_factory=list)
    stride: int = 1

    def note(self, step: int, loss: float) -> None:
        """Keeps the loss of a batch; of a long training, that of every other step, of every fourth, and so on."""
        if step % self.stride == 0:
            self.trained.append((step, loss))
        if len(self.trained) > CANVAS.points:
            self.stride *= 2
            self.trained = [point for point in self.trained if point[0] % self.stride == 0]

    def to_svg(self) -> str:
        """The picture; a curve of the batches, and points of the held-out data with the first and the last loss."""
        losses = [loss for _, loss in (*self.trained, *self.held_out) if math.isfinite(loss)]
        low, high = (math.floor(min(losses) * 10) / 10, math.ceil(max(losses) * 10) / 10) if losses else (0.0, 1.0)
        scale = _Scale(
            max((step for step, _ in (*self.trained, *self.held_out)), default=1) or 1, low, max(high, low + 0.1)
        )
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {CANVAS.width} {CANVAS.height}" role="img" '
            'font-family="sans-serif" font-size="12">',
            f"<title>{_told(self.held_out) or 'Loss of the batches'}</title>",
            f'<rect width="{CANVAS.width}" height="{CANVAS.height}" fill="#fff"/>',
            *scale.axes(),
            _line(scale, self.trained, "#c9a6bd", 1),
            _line(scale, self.held_out, "#9a2f74", 2),
        ]
        parts += [
            f'<circle cx="{scale.x(step):.1f}" cy="{scale.y(loss):.1f}" r="3.5" fill="#9a2f74"/>'
            for step, loss in self.held_out
        ]
        parts.append(f'<text x="{CANVAS.left}" y="15" fill="#9a2f74">{_told(self.held_out)}</text>')
        if self.trained:
            right = CANVAS.width - CANVAS.margin
            parts.append(f'<text x="{right}" y="15" text-anchor="end" fill="#8a6a80">each batch</text>')
        return "\n".join([*filter(None, parts), "</svg>", ""])


def _told(held_out: Sequence[Point]) -> str:
    if not held_out:
        return ""
    return f"held-out loss {held_out[0][1]:.3f} -&gt; {min(loss for _, loss in held_out):.3f}"


@dataclass(frozen=True)
class _Scale:
    """Where steps from 0 to `steps` and losses from `low` to `high` are drawn."""

    steps: int
    low: float
    high: float

    def x(self, step: int) -> float:
        return CANVAS.left + (CANVAS.width - CANVAS.left - CANVAS.margin) * step / self.steps

    def y(self, loss: float) -> float:
        share = (min(max(loss, self.low), self.high) - self.low) / (self.high - self.low)
        return CANVAS.height - CANVAS.bottom - (CANVAS.height - CANVAS.bottom - CANVAS.margin) * share

    def axes(self) -> list[str]:
        parts = []
        for tick in range(CANVAS.ticks):
            share = tick / (CANVAS.ticks - 1)
            step, loss = round(self.steps * share), self.low + (self.high - self.low) * share
            x, y = self.x(step), self.y(loss)
            right, below = CANVAS.width - CANVAS.margin, CANVAS.height - CANVAS.bottom
            parts += [
                f'<path d="M{CANVAS.left} {y:.1f}H{right}" stroke="#e2dae4"/>',
                f'<text x="{CANVAS.left - 8}" y="{y + 4:.1f}" text-anchor="end" fill="#675a6e">{loss:.2f}</text>',
                f'<text x="{x:.1f}" y="{below + 18}" text-anchor="middle" fill="#675a6e">{step}</text>',
            ]
        middle = (CANVAS.left + CANVAS.width - CANVAS.margin) / 2
        return [*parts, f'<text x="{middle}" y="{CANVAS.height - 6}" text-anchor="middle" fill="#675a6e">step</text>']


def _line(scale: _Scale, points: Sequence[Point], colour: str, width: int) -> str:
    if len(points) < 2:
        return ""
    path = " ".join(f"{scale.x(step):.1f},{scale.y(loss):.1f}" for step, loss in points if math.isfinite(loss))
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>'
