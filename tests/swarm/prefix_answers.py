"""Answers of clients whose prompts begin alike."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing

from petalnode.node.blocks.client_part import ClientModel
from petalnode.node.client.core import SwarmClient
from petalnode.node.client.generation.conversation import Conversation
from petalnode.node.client.generation.sampling import Sampling


async def answer(
    client: SwarmClient,
    local: ClientModel,
    prompt: Sequence[int],
    tokens: int = 5,
    salt: bytes = b"",
    length: int = 200,
) -> tuple[list[int], int]:
    """The next tokens by a conversation of its own, and how many of the prompt were not computed for it."""
    conversation = Conversation(client, local, max_length=length, stop_tokens=())
    conversation.prefix_salt = salt
    async with aclosing(conversation):
        found = await conversation.answer(prompt, Sampling(max_new_tokens=tokens), lambda _: None)
        return found, conversation.reused
