"""The official `openai` client against the API, over HTTP on loopback."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
import torch

from petalnode.node.api.engine.core import leaders_of
from tests.api.bodies import PLACE
from tests.api.conftest import CONTEXT, Served
from tests.api.tokenizer import EOS
from tests.import_graph import ROOT
from tests.memory_api import MemoryApi
from tests.tiny_models import load_whole

MODEL = "tiny-llama"
ASKED: list[dict[str, Any]] = [{"role": "user", "content": "say something"}]


@pytest.fixture(scope="module")
def python_model(served: Served) -> Iterator[Any]:
    with served.python_model() as opened:
        yield opened


@pytest.fixture(scope="module")
def whole(served: Served) -> Any:
    return load_whole(served.folder)


def ids_of(api: MemoryApi, text: str) -> list[int]:
    return api.core.text.encode(text)


def greedy(model: Any, prompt: list[int], tokens: int) -> list[int]:
    """What the Python API says, without the token that ends it."""
    out = model.generate(torch.tensor([prompt]), max_new_tokens=tokens, do_sample=False, pad_token_id=0)
    made: list[int] = out[0, len(prompt) :].tolist()
    return made[:-1] if made[-1] == EOS else made


def test_models(client: Any) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "petalnode"
    with pytest.raises(openai.NotFoundError) as raised:
        client.models.retrieve("other")
    assert raised.value.code == "model_not_found"


def test_a_chat_says_what_the_python_api_says(client: Any, api: MemoryApi, python_model: Any) -> None:
    prompt = api.core.text.chat_prompt(ASKED)
    expected = greedy(python_model, prompt, 24)
    answer = client.chat.completions.create(model=MODEL, messages=ASKED, temperature=0, max_tokens=24)
    assert answer.choices[0].message.content == api.core.text.decode(expected)
    assert answer.choices[0].finish_reason == ("length" if len(expected) == 24 else "stop")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), len(expected))
    way = answer.model_extra["x_petalnode"]["choices"][0]
    assert [hop["blocks"] for hop in way["route"]] == [[0, 2], [2, 4], [4, 6]]
    assert way["recoveries"] == 0
    assert all(hop["last_step_ms"] > 0 for hop in way["hops"])
    assert way["hops"][0]["bytes_sent"] > 0


def test_a_stream_is_the_same_answer_in_pieces(client: Any, api: MemoryApi) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 24}
    whole = client.chat.completions.create(**asked)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].model_extra["x_petalnode"]["choices"][0]["route"]
    assert len({chunk.id for chunk in chunks}) == 1


@pytest.mark.parametrize(("library", "end"), [("openai", ""), ("anthropic", "\n")])
def test_the_examples_of_the_page(
    library: str, end: str, api: MemoryApi, python_model: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs/api.md").read_text()
    (program,) = re.findall(rf"^```\n(from {library}.*?)^```", page, re.DOTALL | re.MULTILINE)
    for written, here in {
        "http://127.0.0.1:8000": api.url,
        '"smollm2"': repr(MODEL),
        "max_tokens=40": 'max_tokens=40, extra_body={"temperature": 0}',
    }.items():
        assert written in program
        program = program.replace(written, here)
    names: dict[str, Any] = {}
    exec(compile(program, "docs/api.md", "exec"), names)
    expected = greedy(python_model, api.core.text.chat_prompt(names["messages"]), 40)
    assert capsys.readouterr().out == api.core.text.decode(expected) + end


async def test_the_async_client(api: MemoryApi, client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 12}
    expected = client.chat.completions.create(**asked).choices[0].message.content
    async with openai.AsyncOpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0) as other:
        text = ""
        async for chunk in await other.chat.completions.create(**asked, stream=True):
            text += chunk.choices[0].delta.content or ""
        assert text == expected


def test_the_next_turn_sends_only_what_is_new(client: Any, api: MemoryApi) -> None:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "a conversation of its own, of some length"}]
    asked: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": 8}
    first = client.chat.completions.create(messages=messages, **asked)
    assert first.usage.prompt_tokens_details.cached_tokens == 0
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "go on"},
    ]
    second = client.chat.completions.create(messages=messages, **asked)
    cached = second.usage.prompt_tokens_details.cached_tokens
    assert first.usage.prompt_tokens <= cached < second.usage.prompt_tokens
    # The same without the servers' memory.
    again = client.completions.create(
        model=MODEL, prompt=api.core.text.chat_prompt(messages), temperature=0, max_tokens=8, logprobs=0
    )
    assert again.choices[0].text == second.choices[0].message.content


def test_a_completion_by_text_and_by_tokens(client: Any, api: MemoryApi, python_model: Any) -> None:
    prompt = ids_of(api, "once upon a time")
    expected = api.core.text.decode(greedy(python_model, prompt, 10))
    for given in ("once upon a time", prompt, ["once upon a time"], [prompt, prompt]):
        answer = client.completions.create(model=MODEL, prompt=given, temperature=0, max_tokens=10)
        assert [choice.text for choice in answer.choices] == [expected] * len(answer.choices)
        assert [choice.index for choice in answer.choices] == list(range(len(answer.choices)))
    assert len(answer.choices) == 2
    pieces = client.completions.create(model=MODEL, prompt=prompt, temperature=0, max_tokens=10, stream=True)
    assert "".join(piece.choices[0].text for piece in pieces) == expected


def test_echo_with_likelihood_of_each_token_of_prompt(client: Any, api: MemoryApi, whole: Any) -> None:
    """What evaluation harnesses ask for: a prompt as token ids, scored, with one token behind it."""
    prompt = ids_of(api, "the quick brown fox jumps over the lazy dog " * 4)
    assert len(prompt) > 128  # more than one piece of logits
    with torch.no_grad():
        expected = whole(torch.tensor([prompt])).logits[0].log_softmax(-1)
    for tokens in (0, 1):
        answer = client.completions.create(
            model=MODEL, prompt=[prompt], temperature=0, max_tokens=tokens, echo=True, logprobs=3
        )
        found = answer.choices[0].logprobs
        assert len(found.tokens) == len(found.token_logprobs) == len(prompt) + answer.usage.completion_tokens
        assert found.token_logprobs[0] is None
        assert found.top_logprobs[0] is None
        own = [expected[place - 1, prompt[place]].item() for place in range(1, len(prompt))]
        assert found.token_logprobs[1 : len(prompt)] == pytest.approx(own, abs=1e-4)
        best = [row.max().item() for row in expected[:-1]]
        assert [max(top.values()) for top in found.top_logprobs[1 : len(prompt)]] == pytest.approx(best, abs=1e-4)
        assert answer.choices[0].text.startswith("the quick brown fox")
        assert found.text_offset[1] == 1
    if answer.usage.completion_tokens:
        assert found.token_logprobs[-1] == pytest.approx(expected[-1].max().item(), abs=1e-4)


def test_offsets_of_stream_are_those_of_whole(client: Any) -> None:
    """Also while the beginning of a stop string is held back."""
    asked: dict[str, Any] = {"model": MODEL, "prompt": "once", "temperature": 0, "max_tokens": 8, "logprobs": 0}
    text = client.completions.create(**asked).choices[0].text
    asked["stop"] = text[2:5] + "\0"
    whole = client.completions.create(**asked).choices[0].logprobs.text_offset
    pieces = [piece.choices[0].logprobs for piece in client.completions.create(**asked, stream=True)]
    assert [offset for piece in pieces if piece is not None for offset in piece.text_offset] == whole


def test_likelihoods_of_a_chat(client: Any, api: MemoryApi, whole: Any) -> None:
    prompt = api.core.text.chat_prompt(ASKED)
    asked: dict[str, Any] = {"model": MODEL, "messages": ASKED, "temperature": 0, "max_tokens": 5}
    answer = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    with torch.no_grad():
        expected = whole(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    assert content[0].logprob == pytest.approx(expected.max().item(), abs=1e-4)
    assert [likely.logprob for likely in content[0].top_logprobs] == pytest.approx(
        expected.topk(2)[0].tolist(), abs=1e-4
    )
    assert bytes(content[0].bytes).decode() == content[0].token
    streamed = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2, stream=True)
    found = [entry for chunk in streamed if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert [entry.token for entry in found] == [entry.token for entry in content]


def test_a_seed_gives_the_same_answer_again(client: Any) -> None:
    def ask(seed: int, **more: Any) -> list[str]:
        answer = client.chat.completions.create(
            model=MODEL, messages=ASKED, temperature=1.5, top_p=0.9, max_tokens=16, seed=seed, **more
        )
        return [choice.message.content for choice in answer.choices]

    assert ask(1) == ask(1) != ask(2)
    several = ask(1, n=3)
    assert len(set(several)) == 3
    assert several[0] == ask(1)[0]


def test_several_choices_share_what_their_prompt_computed(client: Any, api: MemoryApi) -> None:
    assert leaders_of([[1] * 40, [2] * 40, [1] * 40, [1] * 20, [1] * 20, [1] * 40]) == [0, 1, 0, 3, 4, 0]
    before = api.core.tallies.tokens["cached"]
    asked = {"model": MODEL, "prompt": "several of this " * 8, "max_tokens": 4, "temperature": 0}
    answered = client.completions.create(**asked, n=3)
    assert len({choice.text for choice in answered.choices}) == 1
    shared = (answered.usage.prompt_tokens - 1) // 32 * 32
    assert shared and api.core.tallies.tokens["cached"] - before == 2 * shared


def test_sampling_options_reach_the_sampler(client: Any, api: MemoryApi) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 12}
    plain = client.completions.create(**asked, temperature=0).choices[0].text
    (only,) = ids_of(api, "Q")
    biased = client.completions.create(**asked, temperature=0, logit_bias={str(only): 100}).choices[0].text
    assert biased == "Q" * 12
    for narrow in ({"top_k": 1}, {"min_p": 1}):
        assert client.completions.create(**asked, temperature=2, extra_body=narrow).choices[0].text == plain
    apart = client.completions.create(**asked, temperature=0, frequency_penalty=2, presence_penalty=2).choices[0].text
    repeated = client.completions.create(**asked, temperature=0, extra_body={"repetition_penalty": 50}).choices[0].text
    assert len(set(repeated)) == len(repeated)
    assert len(set(apart)) >= len(set(plain))


def test_stop_strings_end_answer_and_are_left_out(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "prompt": "abc", "max_tokens": 24, "temperature": 0}
    text = client.completions.create(**asked).choices[0].text
    stop = text[6:9]
    before = text[: text.index(stop)]
    answer = client.completions.create(**asked, stop=[stop, "never"])
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (before, "stop")
    pieces = list(client.completions.create(**asked, stop=stop, stream=True))
    assert "".join(piece.choices[0].text for piece in pieces) == before


REFUSED: dict[str, tuple[dict[str, Any], type[openai.APIStatusError], str | None]] = {
    "no messages": ({"messages": []}, openai.BadRequestError, None),
    "context": ({"max_tokens": CONTEXT}, openai.BadRequestError, "context_length_exceeded"),
    "long prompt": (
        {"messages": [{"role": "user", "content": "x" * 3 * CONTEXT}]},
        openai.BadRequestError,
        "context_length_exceeded",
    ),
    "very long prompt": (
        {"messages": [{"role": "user", "content": "x" * 200 * CONTEXT}]},
        openai.BadRequestError,
        "context_length_exceeded",
    ),
    "another model": ({"model": "gpt-5"}, openai.NotFoundError, "model_not_found"),
    "temperature": ({"temperature": -1}, openai.BadRequestError, "invalid_value"),
    "a number as text": ({"top_p": "much"}, openai.BadRequestError, "invalid_value"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        openai.BadRequestError,
        "unsupported_content",
    ),
    "a schema": (
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "x", "schema": {"type": "nonsense"}, "strict": True},
            }
        },
        openai.BadRequestError,
        "invalid_schema",
    ),
    "tool choice": ({"tool_choice": "required"}, openai.BadRequestError, "invalid_value"),
    "too many log-probabilities": (
        {"n": 16, "max_tokens": 900, "logprobs": True, "top_logprobs": 20},
        openai.BadRequestError,
        "invalid_value",
    ),
    "too many answers": ({"n": 1000}, openai.BadRequestError, "invalid_value"),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_done_is_refused(case: str, stream: bool, client: Any) -> None:
    fields, kind, code = REFUSED[case]
    with pytest.raises(kind) as raised:
        client.chat.completions.create(**{"model": MODEL, "messages": ASKED, "stream": stream, **fields})
    assert raised.value.code == code or code is None
    assert raised.value.type == "invalid_request_error"
    assert raised.value.message


@pytest.mark.parametrize(
    "fields", [{"best_of": 3}, {"suffix": "x"}, {"prompt": [[500]]}, {"prompt": []}, {"max_tokens": 0}]
)
def test_completions_refuse(fields: dict[str, Any], client: Any) -> None:
    with pytest.raises(openai.BadRequestError):
        client.completions.create(**{"model": MODEL, "prompt": "abc", **fields})


def test_embeddings(client: Any, api: MemoryApi, whole: Any) -> None:
    texts = ["first text", "another one"]
    found = client.embeddings.create(model=MODEL, input=texts)  # base64, as the client asks for it
    plain = client.embeddings.create(model=MODEL, input=[ids_of(api, text) for text in texts], encoding_format="float")
    last = client.embeddings.create(
        model=MODEL, input=texts[0], encoding_format="float", extra_body={"pooling": "last"}
    )
    for index, text in enumerate(texts):
        with torch.no_grad():
            states = whole.model(torch.tensor([ids_of(api, text)])).last_hidden_state[0]
        mean = torch.nn.functional.normalize(states.mean(0), dim=0).tolist()
        assert found.data[index].embedding == pytest.approx(mean, abs=1e-4)
        assert plain.data[index].embedding == pytest.approx(mean, abs=1e-4)
        if not index:
            end = torch.nn.functional.normalize(states[-1], dim=0).tolist()
            assert last.data[0].embedding == pytest.approx(end, abs=1e-4)
    assert found.usage.prompt_tokens == sum(len(ids_of(api, text)) for text in texts)


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["yes", "no"]}},
    "required": ["ok", "word"],
    "additionalProperties": False,
}


def test_an_answer_follows_its_schema(client: Any) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model=MODEL,
            messages=ASKED,
            temperature=1.5,
            seed=seed,
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}},
        )
        data = json.loads(answer.choices[0].message.content)
        assert set(data) == {"ok", "word"}
        assert data["word"] in ("yes", "no")
        assert answer.choices[0].finish_reason == "stop"


def test_answer_follows_expression_or_is_one_of_some(client: Any) -> None:
    asked: dict[str, Any] = {"model": MODEL, "messages": ASKED, "temperature": 1.0, "seed": 1}
    number = client.chat.completions.create(**asked, extra_body={"guided_regex": "[0-9]{3}-[ab]"})
    text = number.choices[0].message.content
    assert len(text) == 5 and text[:3].isdecimal() and text[3:] in ("-a", "-b")
    chosen = client.chat.completions.create(**asked, extra_body={"guided_choice": ["red", 'green "one"']})
    assert chosen.choices[0].message.content in ("red", 'green "one"')


TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "look_up", "description": "looks something up", "parameters": PLACE}},
    {"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "additionalProperties": False}}},
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look_up"}}])
def test_tool_is_called_with_arguments_of_its_schema(choice: Any, stream: bool, client: Any) -> None:
    asked: dict[str, Any] = {
        "model": MODEL, "messages": ASKED, "tools": TOOLS, "tool_choice": choice, "temperature": 0,
        "parallel_tool_calls": False, "stream": stream,
    }  # fmt: skip
    if stream:
        calls, reason, text = [], None, ""
        for chunk in client.chat.completions.create(**asked):
            calls += chunk.choices[0].delta.tool_calls or []
            text += chunk.choices[0].delta.content or ""
            reason = chunk.choices[0].finish_reason or reason
    else:
        answer = client.chat.completions.create(**asked).choices[0]
        calls, reason, text = answer.message.tool_calls, answer.finish_reason, answer.message.content or ""
    assert (reason, text) == ("tool_calls", "")
    (call,) = calls
    arguments = json.loads(call.function.arguments)
    assert (call.function.name, set(arguments)) in (("look_up", {"where"}), ("wait", set()))
    if choice != "required":
        assert call.function.name == "look_up"
        assert arguments["where"] in ("here", "there")
    # The answer of the tool goes back, and the conversation goes on.
    messages = [
        *ASKED,
        {
            "role": "assistant",
            "tool_calls": [
                {"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": call.id, "content": "found"},
    ]
    client.chat.completions.create(model=MODEL, messages=messages, tools=TOOLS, temperature=0, max_tokens=4)
