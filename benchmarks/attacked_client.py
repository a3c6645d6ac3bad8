"""The honest client of under_attack.py: generates without end, and compares each answer with what it should be.

    python -m benchmarks.attacked_client FILE PEER...

`FILE` is a JSON object: `model`, and `answers`, a list of [prompt ids, expected ids of prompt and answer]. It prints
{"event": "token", "at"} (seconds since 1970) for every token, and {"event": "answer", "at", "wrong"} for every answer:
"" or what was wrong with it. Ends at the end of its input.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from petalnode.node.client.api.causal_lm import AutoDistributedModelForCausalLM


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)


class Tokens:
    """A streamer of transformers; the prompt comes first."""

    def __init__(self) -> None:
        self._begun = False

    def put(self, _: object) -> None:
        if self._begun:
            say(event="token", at=time.time())
        self._begun = True

    def end(self) -> None:
        pass


def answer(model: Any, prompt: list[int], expected: list[int]) -> str:
    """What is wrong with the answer to this prompt; nothing if it is as expected."""
    try:
        made = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=len(expected) - len(prompt),
            eos_token_id=None,
            do_sample=False,
            pad_token_id=0,
            streamer=Tokens(),
        )
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    found = made[0].tolist()
    return "" if found == expected else f"wrong tokens: {found}"


def main() -> None:
    torch.set_num_threads(1)
    given = json.loads(Path(sys.argv[1]).read_text())
    stopped = threading.Event()
    threading.Thread(target=lambda: (sys.stdin.read(), stopped.set()), daemon=True).start()
    opened = AutoDistributedModelForCausalLM.from_pretrained(given["model"], initial_peers=sys.argv[2:], wait=True)
    with opened as model:
        say(event="ready")
        for prompt, expected in itertools.cycle(given["answers"]):
            if stopped.is_set():
                return
            wrong = answer(model, prompt, expected)
            say(event="answer", at=time.time(), wrong=wrong)


if __name__ == "__main__":
    with suppress(PermissionError):  # a session of its own, as in light_node.py
        os.setsid()
    main()
