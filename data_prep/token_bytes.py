"""How many bytes of text each token stands for: what turns nats per token into bits per byte."""

import json
import re
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import pre_tokenizers

from headrace.errors import InputError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE_MARK = "▁"


def token_bytes(tokenizer_json: bytes) -> npt.NDArray[np.int32]:
    """Return int32[vocab_size]: UTF-8 bytes of text that each id stands for, 0 for special tokens and unused ids.

    Over the ids of one document these add up to the bytes of its text (for tokenizers that put a blank before the
    text, to one more). Raises InputError for a tokenizer whose tokens do not stand for bytes.
    """
    document = json.loads(tokenizer_json)
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    table = np.zeros(max(vocabulary.values()) + 1, dtype=np.int32)
    added = tokenizer.get_added_tokens_decoder()
    length = _length_rule(document)
    for token, index in vocabulary.items():
        if index in added:
            table[index] = 0 if added[index].special else len(added[index].content.encode("utf-8"))
        else:
            table[index] = length(token)
    return table


def _length_rule(document: dict[str, Any]) -> Any:
    types = set(_types(document.get("pre_tokenizer"))) | set(_types(document.get("decoder")))
    if "ByteLevel" in types:
        return _byte_level_length
    if "ByteFallback" in types and document["model"].get("byte_fallback"):
        return _byte_fallback_length
    raise InputError(
        "The tokenizer is neither byte-level nor has a byte fallback, so it cannot spell every text. "
        "Give a byte-level BPE, or leave tokenizer.path out to train one."
    )


def _types(part: dict[str, Any] | None) -> list[str]:
    if part is None:
        return []
    inner = part.get("pretokenizers", []) + part.get("decoders", [])
    return [part["type"], *(name for step in inner for name in _types(step))]


_ALPHABET = frozenset(pre_tokenizers.ByteLevel.alphabet())


def _byte_level_length(token: str) -> int:
    """Each character of a byte-level token stands for one byte; a token with others is an entry for itself."""
    return len(token) if all(character in _ALPHABET for character in token) else len(token.encode("utf-8"))


def _byte_fallback_length(token: str) -> int:
    if _BYTE_TOKEN.fullmatch(token):
        return 1
    return len(token.replace(_SPACE_MARK, " ").encode("utf-8"))
