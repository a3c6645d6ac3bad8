"""How far an answer is, while it is made: its hops, a server that is missed, and who took over."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from petalnode.node.api.engine.choice import PROGRESS, is_news
from petalnode.node.api.engine.generation import AnswerProgress, HopReport, WaitingFor
from petalnode.node.testing.memory_servers import memory_swarm
from petalnode.protocols.announcement import Announcement
from tests.api.conftest import Served
from tests.api.tokenizer import EOS
from tests.memory_api import MemoryApi, memory_api

HOP = HopReport("a", (0, 6), 2.0, 10, 10)
NOW = AnswerProgress(0, 4, 0, (HOP,))
MISSED = WaitingFor("a", (0, 6), True, "gone", 30.0)


def asked(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny-llama",
        "prompt": "abc",
        "max_tokens": 8,
        "temperature": 0,
        "logit_bias": {EOS: -100},
        **more,
    }


def chunks(api: MemoryApi, request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    options = {"include_progress": True, "include_usage": True}
    body = {**request, "stream": True, "stream_options": options}
    with httpx.stream("POST", f"{api.url}/v1/completions", json=body, timeout=None) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line[6:])


def test_missed_server_is_told_at_once(api_model: Path) -> None:
    with memory_swarm() as swarm:
        held: list[Announcement] = []

        def silent(node: Any) -> None:
            node.announce = held.append

        first, second = (swarm.start(api_model, blocks, cache_tokens=100_000) for blocks in ("0:3", "3:6"))
        third: Any = swarm.start(api_model, "3:6", cache_tokens=100_000, prepare=silent)
        assert first.ready and second.ready and third.ready

        async def announce() -> None:
            del third.node.announce
            third.node.announce(held[-1])

        with memory_api(swarm, api_model) as api:
            begun = httpx.post(f"{api.url}/v1/completions", json=asked(), timeout=None).json()
            prompt = "abc" + begun["choices"][0]["text"]
            assert api.idle == 1
            second.kill()
            seen, text = [], ""
            for chunk in chunks(api, asked(prompt=prompt)):
                text += "".join(choice["text"] for choice in chunk["choices"])
                progress = chunk.get("x_petalnode", {}).get("progress")
                if progress is None:
                    continue
                assert chunk["choices"] == []
                seen.append(progress)
                if progress["waiting"] is not None and "announce" in vars(third.node):
                    swarm.call(announce)  # it was ready all the time, and nobody knew
            waiting = next(one["waiting"] for one in seen if one["waiting"] is not None)
            assert (waiting["peer_id"], waiting["blocks"], waiting["lost"]) == (second.peer_id, [3, 6], True)
            assert waiting["reason"] and waiting["seconds"] > 0
            way = chunk["x_petalnode"]["choices"][0]
            assert way["recoveries"] == 1
            assert [hop["peer_id"] for hop in way["hops"]] == [first.peer_id, third.peer_id]
            assert chunk["usage"]["completion_tokens"] == 8
            again = httpx.post(f"{api.url}/v1/completions", json=asked(prompt=prompt), timeout=None).json()
            assert again["choices"][0]["text"] == text


def test_who_asks_for_nothing_is_told_last(api: MemoryApi, served: Served) -> None:
    with openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=None) as client:
        told = [chunk.to_dict() for chunk in client.completions.create(**asked(), stream=True)]
        assert [("x_petalnode" in chunk) for chunk in told] == [False] * (len(told) - 1) + [True]
        options: Any = {"include_progress": True}
        text = "".join(
            choice.text
            for chunk in client.completions.create(**asked(), stream=True, stream_options=options)
            for choice in chunk.choices
        )
    assert text == "".join(choice["text"] for chunk in told for choice in chunk["choices"])


def test_uncovered_model_has_its_status_all_the_same(api_model: Path) -> None:
    with memory_swarm() as swarm:
        server = swarm.start(api_model, "0:3", cache_tokens=100_000)
        assert server.ready
        with memory_api(swarm, api_model) as api:
            body = asked(stream=True, stream_options={"include_progress": True})
            refused = httpx.post(f"{api.url}/v1/completions", json=body, timeout=None)
            assert (refused.status_code, refused.json()["error"]["missing_blocks"]) == (503, [3, 4, 5])


@pytest.mark.parametrize(
    ("told", "now", "since", "news"),
    [
        (None, AnswerProgress(0, 0, 0, ()), 9.0, False),
        (None, NOW, 0.1, True),
        (NOW, NOW, 9.0, False),
        (NOW, replace(NOW, tokens=5), 0.1, False),
        (NOW, replace(NOW, tokens=5), PROGRESS.every_seconds, True),
        (NOW, replace(NOW, waiting=MISSED), 0.1, True),
        (replace(NOW, waiting=MISSED), replace(NOW, waiting=MISSED), 9.0, False),
        (replace(NOW, waiting=MISSED), NOW, 0.1, True),
        (NOW, replace(NOW, recoveries=1), 0.1, True),
        (NOW, replace(NOW, hops=(replace(HOP, peer_id="b"),)), 0.1, True),
        (NOW, replace(NOW, hops=(replace(HOP, milliseconds=3.0),)), 9.0, False),
    ],
)
def test_news(told: AnswerProgress | None, now: AnswerProgress, since: float, news: bool) -> None:
    assert is_news(told, now, since) is news
