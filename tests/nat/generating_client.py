"""A client that generates on one of the lab's machines and tells what it sees.

    python -m tests.nat.generating_client MODEL PEER...

Each line of standard input is a JSON object: {"ids": [...], "tokens": n, "allowed": [peer ids], "until": {"moved": 1,
"rejoined": 0, "direct": true}, "more": m}. It generates n tokens at most, greedily, in a session of its own, and stops
m tokens after all that `until` names has come about. It joins the swarm with the first of these lines. For each it
prints {"event": "first", "seconds"}, from reading the line to the first token; for every token {"event": "token",
"number", "seconds" (since the one before), "wire" (of these, without computing), "direct" (each server's stream)}; and
then {"event": "done", ...}, or "failed".
"""

from __future__ import annotations

import json
import sys
import time
from contextlib import ExitStack
from typing import Any

import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM
from tests.inspection import allow_servers, session_of


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Watch:
    """Tells of every token, as a streamer of transformers, and says when it is enough, as a criterion."""

    def __init__(self, session: Any, until: dict[str, Any], more: int, begun: float) -> None:
        self._session = session
        self._begun = begun
        self._until = until
        self._left: int | None = None if until else -1
        self._more = more
        self._number = -1
        self._before = self._in_step = 0.0
        self._step = session.step
        session.step = self._timed

    def _timed(self, *arguments: Any, **options: Any) -> torch.Tensor:
        begun = time.perf_counter()
        out: torch.Tensor = self._step(*arguments, **options)
        self._in_step = time.perf_counter() - begun
        return out

    def put(self, _: object) -> None:
        self._number += 1
        now = time.perf_counter()
        if self._number == 1:
            say(event="first", seconds=now - self._begun)
        if self._number:  # the prompt comes first
            links = session_of(self._session).links
            say(
                event="token",
                number=self._number,
                seconds=round(now - self._before, 5),
                wire=round(self._in_step - sum(link.server.timing.compute for link in links), 5),
                direct=[link.server.direct for link in links],
            )
        self._before = now

    def end(self) -> None:
        pass

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if self._left is None and self._fulfilled():
            self._left = self._more
        if self._left is not None and self._left >= 0:
            self._left -= 1
        return torch.full((input_ids.shape[0],), bool(self._until) and self._left == -1, dtype=torch.bool)

    def _fulfilled(self) -> bool:
        session = session_of(self._session)
        seen = {
            "moved": session.paths.moved,
            "rejoined": session.paths.rejoined,
            "changed": session.paths.rejoined + session.recoveries,
            "direct": all(link.server.direct for link in session.links),
        }
        return all(seen[name] >= wanted for name, wanted in self._until.items())


def generate(model: Any, order: dict[str, Any], begun: float) -> None:
    allow_servers(model, order.get("allowed", ()))
    ids = torch.tensor([order["ids"]])
    with model.inference_session(max_length=ids.shape[1] + order["tokens"]) as session:
        watch = Watch(session, order.get("until", {}), order.get("more", 0), begun)
        out = model.generate(
            ids,
            max_new_tokens=order["tokens"],
            do_sample=False,
            pad_token_id=0,
            streamer=watch,
            stopping_criteria=[watch],
        )
        inside = session_of(session)
        say(
            event="done",
            ids=out[0].tolist(),
            route=[peer_id for peer_id, _ in session.route],
            direct=[link.server.direct for link in inside.links],
            recoveries=session.recoveries,
            rejoined=inside.paths.rejoined,
            moved=inside.paths.moved,
            pushed=inside.pushed_steps,
        )


def main() -> None:
    torch.set_num_threads(1)
    folder, *peers = sys.argv[1:]
    with ExitStack() as stack:
        model: Any = None
        for line in sys.stdin:
            begun = time.perf_counter()
            try:
                if model is None:
                    opened = AutoDistributedModelForCausalLM.from_pretrained(folder, initial_peers=peers, wait=True)
                    model = stack.enter_context(opened)
                generate(model, json.loads(line), begun)
            except Exception as error:
                say(event="failed", error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
