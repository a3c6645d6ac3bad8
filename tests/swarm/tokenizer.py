"""A tokenizer for the tiny models: a token for each printable character, and a chat template."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.tiny_models import VOCABULARY

_TEMPLATE = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


def save_tokenizer(folder: Path) -> None:
    """Writes it beside the model in `folder`. It has no token that ends an answer."""
    texts = ["<pad>", "<unk>", "\n", *map(chr, range(32, 127))]
    texts += [chr(0x410 + index) for index in range(VOCABULARY - len(texts))]
    tokenizer = Tokenizer(models.WordLevel({text: index for index, text in enumerate(texts)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", unk_token="<unk>")
    fast.chat_template = _TEMPLATE
    fast.save_pretrained(folder)
