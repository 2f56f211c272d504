"""How many bytes of text each token stands for: what turns nats per token into bits per byte."""

import json
import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import InputError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE_MARK = "▁"
_NEVER_IN_UTF8 = frozenset({0xC0, 0xC1, *range(0xF5, 0x100)})


def _byte_characters() -> dict[int, str]:
    """Byte-level tokenizers spell a byte as one character: itself if it is printable, else the next from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + n) for n, byte in enumerate(others)}


_CHARACTERS = _byte_characters()
_ALPHABET = frozenset(_CHARACTERS.values())


def vocabulary(document: dict[str, Any]) -> dict[str, int]:
    """Return every token of a parsed tokenizer.json with its id, added tokens included."""
    return dict(document["model"]["vocab"]) | {token["content"]: token["id"] for token in document["added_tokens"]}


def token_bytes(tokenizer_json: bytes, control_ids: Iterable[int]) -> npt.NDArray[np.int32]:
    """Return int32[vocab_size]: UTF-8 bytes of text that each id stands for.

    Special tokens, `control_ids` and unused ids stand for 0. Over the ids of one document the numbers add up to the
    bytes of its text (for tokenizers that put a blank before the text, to one more). Raises InputError for a tokenizer
    that cannot spell every text.
    """
    document = json.loads(tokenizer_json)
    length = _length_rule(document)
    tokens = vocabulary(document)
    table = np.zeros(max(tokens.values()) + 1, dtype=np.int32)
    for token, index in document["model"]["vocab"].items():
        table[index] = length(token)
    for added in document["added_tokens"]:
        table[added["id"]] = 0 if added["special"] else len(added["content"].encode("utf-8"))
    table[list(control_ids)] = 0
    return table


def _length_rule(document: dict[str, Any]) -> Callable[[str], int]:
    model = document["model"]
    if model["type"] == "BPE":
        steps = _step_types(document.get("pre_tokenizer"))
        if "ByteLevel" in steps and _spells_all(model["vocab"], _CHARACTERS.__getitem__):
            return _byte_level_length
        if model.get("byte_fallback") and _spells_all(model["vocab"], "<0x{:02X}>".format):
            return _byte_fallback_length
    raise InputError(
        f"The tokenizer (model {model['type']}) cannot spell every text: it is neither a byte-level BPE with all bytes "
        "nor a BPE with a byte fallback. Give another one, or leave tokenizer.path out to train one."
    )


def _step_types(part: dict[str, Any] | None) -> list[str]:
    if part is None:
        return []
    return [part["type"], *(name for step in part.get("pretokenizers", []) for name in _step_types(step))]


def _spells_all(vocab: dict[str, int], spell: Callable[[int], str]) -> bool:
    """Whether there is a token for every byte that occurs in UTF-8."""
    return all(spell(byte) in vocab for byte in range(0x100) if byte not in _NEVER_IN_UTF8)


def _byte_level_length(token: str) -> int:
    """Each character of a byte-level token stands for one byte; a token with others is an entry for itself."""
    return len(token) if _ALPHABET.issuperset(token) else len(token.encode("utf-8"))


def _byte_fallback_length(token: str) -> int:
    if _BYTE_TOKEN.fullmatch(token):
        return 1
    return len(token.replace(_SPACE_MARK, " ").encode("utf-8"))
