"""How a training looks to a person and to a program."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ...tuning.events import Evaluated, Event, StepDone, StoppedEarly, Waiting
from ..output import Output

_LINES: Final = 20
"""How many steps are told of where there is no terminal to draw a bar on."""


class Report:
    """A bar on a terminal, lines where there is none, objects with --json. A context manager."""

    def __init__(self, output: Output, steps: int) -> None:
        self._output = output
        self._every = max(1, steps // _LINES)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeRemainingColumn(),
            console=output.console,
            disable=not output.console.is_terminal,
        )
        self._task = self._bar.add_task("steps", total=steps, figures="")
        self._waiting = False

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._bar.stop()

    def tell(self, event: Event) -> None:
        if not isinstance(event, Waiting):
            self._waiting = False
        match event:
            case StepDone():
                self._step(event)
            case Evaluated():
                figures = {} if event.accuracy is None else {"accuracy": round(event.accuracy, 6)}
                self._output.emit(event="evaluation", step=event.step, loss=event.loss, best=event.improved, **figures)
                accuracy = "" if event.accuracy is None else f", {event.accuracy:.1%} right"
                best = " (the best)" if event.improved else ""
                self._output.say(f"step {event.step}: loss {event.loss:.4f} on held-out data{accuracy}{best}")
            case StoppedEarly():
                self._output.emit(event="stopped-early", step=event.step)
                self._output.say(f"stopping early: {event.evaluations} evaluations were no better than the best")
            case Waiting():
                if not self._waiting:  # once for each time that servers are missing
                    self._output.emit(event="waiting", reason=event.reason)
                    self._output.say(f"waiting for servers: {event.reason}")
                self._waiting = True

    def _step(self, event: StepDone) -> None:
        self._output.emit(
            event="step",
            step=event.step,
            steps=event.steps,
            loss=event.loss,
            learning_rate=event.learning_rate,
            tokens_per_second=round(event.tokens_per_second, 1),
        )
        figures = f"loss {event.loss:.4f}, {event.tokens_per_second:.0f} tokens/s"
        self._bar.update(self._task, completed=event.step, figures=figures)
        if self._bar.disable and (event.step % self._every == 0 or event.step in (1, event.steps)):
            self._output.say(f"step {event.step} of {event.steps}: {figures}")
