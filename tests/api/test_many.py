"""Several models and many conversations in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import openai
import pytest
import torch
import trio

from petalnode.node.api.engine.generation import ServedModel
from petalnode.node.client.session_adapter import choose_adapter
from tests.api.conftest import Served
from tests.api.tokenizer import EOS
from tests.memory_api import MemoryApi, memory_api
from tests.peft_adapters import save_lora

MODEL = "tiny-llama"


def test_an_adapter_is_a_model_of_its_own(served: Served, tmp_path: Path) -> None:
    folder = tmp_path / "poet"
    save_lora(served.folder, folder, ["q_proj", "v_proj"])
    models = [ServedModel("poet", choose_adapter(str(folder))), ServedModel("held-by-nobody", "held-by-nobody")]
    with (
        memory_api(served.swarm, served.folder, models=models) as api,
        openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=None) as client,
        served.python_model(adapter=str(folder)) as tuned,
    ):
        assert [model.id for model in client.models.list()] == [MODEL, "poet", "held-by-nobody"]
        prompt = api.core.text.encode("a poem of an adapter")
        out = tuned.generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False, pad_token_id=0)
        expected = api.core.text.decode([token for token in out[0, len(prompt) :].tolist() if token != EOS])
        texts = {
            name: client.completions.create(model=name, prompt=prompt, max_tokens=12, temperature=0).choices[0].text
            for name in (MODEL, "poet", MODEL, "poet")
        }
        assert texts["poet"] == expected != texts[MODEL]
        with pytest.raises(openai.InternalServerError) as raised:
            client.completions.create(model="held-by-nobody", prompt="a", max_tokens=1)
        assert raised.value.status_code == 503
        assert "held-by-nobody" in raised.value.message


async def test_many_conversations_say_what_each_says_alone(api: MemoryApi, client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "max_tokens": 12, "temperature": 0}
    prompts = [f"conversation {number}: {'abcdefghijkl'[number:]}" for number in range(12)]
    alone = [client.completions.create(prompt=prompt, **asked).choices[0].text for prompt in prompts]
    found: dict[str, str] = {}
    async with (
        openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0, timeout=None) as other,
        trio.open_nursery() as nursery,
    ):

        async def ask(prompt: str) -> None:
            pieces = [piece async for piece in await other.completions.create(prompt=prompt, stream=True, **asked)]
            found[prompt] = "".join(piece.choices[0].text for piece in pieces)

        for prompt in prompts:
            nursery.start_soon(ask, prompt)
    assert [found[prompt] for prompt in prompts] == alone
