"""A tokenizer for the tiny model of the API: a token for each printable character, one that ends answers, and a chat
template that teaches calls of tools."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import VOCABULARY

EOS = VOCABULARY - 1
TEMPLATE = (
    "{% if tools %}tools:{% for t in tools %}{{ t['function']['name'] }} {% endfor %}"
    "calls are <tool_call>JSON</tool_call>\n{% endif %}"
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}"
    "{% for c in m['tool_calls'] or [] %}<tool_call>{{ c['function'] | tojson }}</tool_call>{% endfor %}\n"
    "{% endfor %}a:"
)


def save_api_tokenizer(folder: Path, special: Sequence[str] = ()) -> None:
    """`special` are tokens that stand in the place of some letters."""
    texts = ["<pad>", "<unk>", "\n", *map(chr, range(32, 127))]
    texts += [chr(0x410 + index) for index in range(EOS - len(texts) - len(special))]
    texts += [*special, "<eos>"]
    tokenizer = Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        eos_token="<eos>",
        additional_special_tokens=list(special),
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
