"""Clients that generate until they are told to stop, each answer compared with that of plain transformers."""

from __future__ import annotations

import random
import threading
import traceback
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

import torch

from petalnode.node.client.api.causal_lm import DistributedModelForCausalLM
from petalnode.node.client.deadlines import Waits
from tests.greedy import generate, prompt
from tests.inspection import session_of


@dataclass(frozen=True)
class Task:
    """Something to generate, and what plain transformers makes of it."""

    ids: torch.Tensor
    options: dict[str, Any]
    expected: torch.Tensor


def tasks(whole: Any) -> list[Task]:
    padded = torch.tensor([[1] * 12, [0] * 5 + [1] * 7, [0] * 9 + [1] * 3])
    made: list[tuple[torch.Tensor, dict[str, Any]]] = [
        (prompt(1, 9, 0), {"max_new_tokens": 60}),
        (prompt(1, 9, 1), {"max_new_tokens": 120}),
        (prompt(1, 400, 2), {"max_new_tokens": 20}),
        (prompt(3, 12, 3), {"max_new_tokens": 30, "attention_mask": padded}),
        (prompt(1, 15, 4), {"max_new_tokens": 25, "num_beams": 4}),
        (prompt(2, 300, 5), {"max_new_tokens": 15}),
    ]
    return [Task(ids, options, generate(whole, ids, **options)) for ids, options in made]


@dataclass
class Generating:
    """One client that generates until it is told to stop. What went wrong is in `failures`."""

    model: DistributedModelForCausalLM
    tasks: list[Task]
    random: random.Random
    stop: threading.Event
    answers: int = 0
    recoveries: int = 0
    slowest: float = 0.0
    begun: float = 0.0
    waits: Waits = field(default_factory=Waits)
    failures: list[str] = field(default_factory=list)
    _session: Any = None
    _seen: tuple[int, float] = (0, 0.0)

    @property
    def stands_still(self) -> float:
        """Seconds since the last step of the answer that is being made; 0 if there is none."""
        session, begun = self._session, self.begun
        if not begun:
            return 0.0
        inner = None if session is None else session_of(session)
        steps = 0 if inner is None else sum(wait.count for wait in list(inner.waits.by_cause.values()))
        if steps != self._seen[0] or self._seen[1] < begun:
            self._seen = (steps, monotonic())
        return monotonic() - self._seen[1]

    def run(self) -> None:
        while not self.stop.is_set() and not self.failures:
            task = self.random.choice(self.tasks)
            self.begun = monotonic()
            try:
                self.answer(task)
            except BaseException as error:
                self.failures.append("".join(traceback.format_exception(error)))
            self.slowest = max(self.slowest, monotonic() - self.begun)
            self.begun = 0.0
            self.answers += 1

    def answer(self, task: Task) -> None:
        rows = task.ids.shape[0] * task.options.get("num_beams", 1)
        with self.model.inference_session(max_length=task.expected.shape[1]) as session:
            self._session = session
            self._compare(task, session, task.ids)
            if rows == 1 and self.random.random() < 0.5:
                # From the middle of what is held: the first half of the answer is kept, the rest rolled back.
                kept = (task.ids.shape[1] + task.expected.shape[1]) // 2
                shorter = dict(task.options, max_new_tokens=task.expected.shape[1] - kept)
                self._compare(Task(task.ids, shorter, task.expected), session, task.expected[:, :kept])
            self.recoveries += session.recoveries
            self.waits = Waits.of(self.waits, session_of(session).waits)

    def _compare(self, task: Task, session: Any, ids: torch.Tensor) -> None:
        out = generate(self.model, ids, session=session, **task.options)
        if not torch.equal(out, task.expected):
            self.failures.append(f"wrong tokens: {out.tolist()} instead of {task.expected.tolist()}")
