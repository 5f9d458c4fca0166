"""One vocabulary of letters and codes, and the texts that mix them.

Code c is the Braille character U+2800 + c, so that a picture can be printed, passed to any verb as part of a prompt,
and read back.  A picture is 64 of them and a full stop; a clip is a picture after the other.

    a red circle on sand:⠁⠂…⠃.                          drawn from its caption
    a red circle moving left on sand:⠁…⠂.⠃…⠄.           a clip
    ⠁⠂…⠃=a red circle on sand:⠄⠅…⠆.                     captioned, then drawn anew from the caption
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer, decoders, models
from transformers import LlamaConfig, PreTrainedTokenizerFast

from outrider.errors import DataError

END, UNKNOWN = "<|end|>", "<|unknown|>"
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 :=.\n"
FIRST = len(LETTERS) + 2
"""Id of code 0."""
FIRST_CHARACTER = 0x2800
MOST_CODES = 256
"""The number of Braille characters, each of which stands for one code."""
CODES = 64
"""Of a picture."""
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] }}"
    "<|end|>{% endgeneration %}{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""A turn is its content, so that a prompt is continued."""
PICTURE = re.compile(f"[{chr(FIRST_CHARACTER)}-{chr(FIRST_CHARACTER + MOST_CODES - 1)}]{{{CODES}}}")


def tokenizer(codes: int) -> PreTrainedTokenizerFast:
    """A token a character: the end of a text, an unknown character, letters, then the codes."""
    if not 1 <= codes <= MOST_CODES:
        raise DataError(f"a codebook has 1 to {MOST_CODES} codes, since each is a Braille character; got {codes}")
    characters = [*LETTERS, *characters_of(range(codes))]
    ids = {END: 0, UNKNOWN: 1} | {character: 2 + n for n, character in enumerate(characters)}
    core = Tokenizer(models.BPE(vocab=ids, merges=[], unk_token=UNKNOWN))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, eos_token=END, unk_token=UNKNOWN, chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


def config(codes: int, **sizes: Any) -> LlamaConfig:
    """A Llama over this vocabulary."""
    settings: dict[str, Any] = {
        "vocab_size": FIRST + codes, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 512,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0, "pad_token_id": None,
    }  # fmt: skip
    return LlamaConfig(**settings | sizes)


def characters_of(codes: Sequence[int]) -> str:
    return "".join(chr(FIRST_CHARACTER + code) for code in codes)


def codes_of(text: str) -> list[list[int]]:
    """The codes of every whole picture in a text."""
    return [[ord(character) - FIRST_CHARACTER for character in picture] for picture in PICTURE.findall(text)]


def is_code(token: int) -> bool:
    return token >= FIRST
