"""From what is asked for to what the core does: tokens of prompts, grammars, calls of tools."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import trio

from ...blocks.images.encoder import ImagePrompt
from ...client.generation.picture_prompts import has_pictures
from ..errors import ApiError
from ..fields import wrong
from .core import Core
from .generation import ChatRequest, CompletionRequest, GenerationRequest, ServedModel, TextRequest
from .tools import ToolForm, call_grammar, grammar_after_mark, tool_form

_TOOL_CHARACTERS: Final = 200_000
_CHARACTERS_PER_TOKEN: Final = 100


@dataclass(frozen=True)
class PreparedChat:
    """What the core does for a chat.

    Attributes:
        form: how calls stand in the answer; None if there are none.
        tools: the names of what may be called.
    """

    generation: GenerationRequest
    form: ToolForm | None = None
    tools: tuple[str, ...] = ()


async def prepare_chat(core: Core, owner: str, asked: ChatRequest) -> PreparedChat:
    """
    Raises:
        ApiError: there is no such model, it cannot call tools, the form cannot be enforced, the text is too long.
    """
    text, with_tools = asked.text, bool(asked.tools) and asked.tool != "none"
    model = core.model(text.model)
    form = tool_form(core.text.template) if with_tools else None
    if with_tools and form is None:
        said = f"the chat template of {core.base.name} has no tools: use response_format, or a model that was trained"
        raise wrong("tools", f"{said} to call tools", "unsupported_parameter")
    if form is not None and text.grammar is not None:
        raise ApiError(400, "response_format does not go with tools", param="response_format")
    tools = asked.tools if form is not None else ()
    prompt, pictures = await _seen_prompt(core, model, asked)
    grammar = await _grammar(core, text) if form is None else await _call_grammar(core, form, asked)
    generation = replace(
        _generation(owner, text, model, [prompt] * text.choices, grammar),
        bound_after=form.mark if form is not None and asked.tool == "auto" else "",
        shows_special=form is not None,
        pictures=pictures,
    )
    return PreparedChat(generation, form, tuple(tool["function"]["name"] for tool in tools))


async def chat_prompt(core: Core, model: ServedModel, asked: ChatRequest) -> tuple[int, ...]:
    """The tokens of a conversation, by the model's chat template. Raises ApiError."""
    return (await _seen_prompt(core, model, asked))[0]


async def _seen_prompt(
    core: Core, model: ServedModel, asked: ChatRequest
) -> tuple[tuple[int, ...], ImagePrompt | None]:
    """The same, and what the pictures among them are to the first block."""
    tools = asked.tools if asked.tool != "none" else ()
    check_size(core, sum(map(_characters, asked.messages)), model)
    check_size(core, len(json.dumps(tools)), model, "tools")
    if not has_pictures(asked.messages):
        return tuple(await trio.to_thread.run_sync(core.text.chat_prompt, asked.messages, tools)), None
    if tools:
        raise wrong("tools", "tools do not go with pictures here", "unsupported_parameter")
    prompt = await core.picture_prompt(asked.messages, model)
    return prompt.tokens, prompt.seen


async def prepare_completion(core: Core, owner: str, asked: CompletionRequest) -> GenerationRequest:
    """
    Raises:
        ApiError: as `prepare_chat`.
    """
    text = asked.text
    model = core.model(text.model)
    prompts: list[tuple[int, ...]] = []
    for prompt in asked.prompts:
        if isinstance(prompt, str):
            prompt = await text_prompt(core, model, prompt)
        prompts.extend([prompt] * text.choices)
    generation = _generation(owner, text, model, prompts, await _grammar(core, text))
    return replace(generation, echo=asked.echo, continues=True)


async def text_prompt(core: Core, model: ServedModel, text: str) -> tuple[int, ...]:
    """The tokens of a text. Raises ApiError if it is too long."""
    check_size(core, len(text), model)
    return tuple(await trio.to_thread.run_sync(core.text.encode, text))


def _characters(message: dict[str, Any]) -> int:
    """Of what a message says and calls."""
    called, content = message.get("tool_calls"), message["content"] or ""
    texts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
    return sum(map(len, texts)) + (len(json.dumps(called)) if called else 0)


def check_size(core: Core, characters: int, model: ServedModel, param: str | None = None) -> None:
    """Refuses what cannot fit, before its tokens are counted, which takes long. Raises ApiError."""
    context = core.context(model)
    if characters > _CHARACTERS_PER_TOKEN * context:
        text = f"the text has {characters:,} characters, and the context {context} tokens"
        raise wrong(param, text, "context_length_exceeded")


async def _grammar(core: Core, text: TextRequest) -> str | None:
    return None if text.grammar is None else await core.compiled(core.grammars.compiled, text.grammar)


async def _call_grammar(core: Core, form: ToolForm, asked: ChatRequest) -> str | None:
    """Of calls of tools. None if nothing but the whole answer tells that it is one, and none has to be."""
    special = core.text.special_token
    if asked.tool != "auto":
        only, many = (asked.tool, False) if asked.named else (None, asked.parallel)
        make = partial(call_grammar, form, asked.tools, special, only=only, many=many)
    elif form.mark:
        make = partial(grammar_after_mark, form, asked.tools, special, many=asked.parallel)
    else:
        return None
    grammar = await trio.to_thread.run_sync(make)
    if len(grammar) > _TOOL_CHARACTERS:
        raise wrong("tools", f"the tools have more than {_TOOL_CHARACTERS:,} characters")
    return await core.compiled(core.grammars.checked, grammar)


def _generation(
    owner: str, text: TextRequest, model: ServedModel, prompts: Sequence[tuple[int, ...]], grammar: str | None
) -> GenerationRequest:
    return GenerationRequest(
        owner=owner,
        model=model,
        prompts=tuple(prompts),
        sampling=text.sampling,
        max_tokens=text.max_tokens,
        stop=text.stop,
        top_logprobs=text.top_logprobs if text.logprobs else None,
        grammar=grammar,
        options=text.options,
        progress=text.include_progress,
    )
