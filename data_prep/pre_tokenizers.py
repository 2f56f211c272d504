"""Which tokenizers split text in a way that lets a long document be cut beforehand without changing an id."""

from typing import Any

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_CASED_WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+@|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*@|"
)
_O200K_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_SPACES = r"\s+(?!\S)|\s+"

KNOWN_PATTERNS = frozenset(
    {
        # GPT-2, written out as some files do
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES,
        r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|" + _SPACES,
        # cl100k and Llama 3
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES,
        # Qwen 2 and 3
        _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|" + _SPACES,
        # o200k
        _CASED_WORDS.replace("@", _O200K_SUFFIX) + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES,
        # tekken
        _CASED_WORDS.replace("@", "") + r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|" + _SPACES,
        # DeepSeek V3, in three steps
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|"
        r" ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|" + _SPACES,
    }
)


def cuts_are_safe(tokenizer_json: dict[str, Any]) -> bool:
    """Return whether `text.cut` leaves the ids of every text as they are, for this tokenizer.json.

    Only what has been checked is accepted: no normaliser but NFC, pre-tokenizers out of known patterns, and no added
    token that plain text can form and that reaches over white space.
    """
    return (
        tokenizer_json["model"]["type"] == "BPE"
        and _harmless_normalizer(tokenizer_json.get("normalizer"))
        and _known_pre_tokenizer(tokenizer_json.get("pre_tokenizer"))
        and not any(_reaches_over_space(token) for token in tokenizer_json.get("added_tokens", []))
    )


def _harmless_normalizer(normalizer: dict[str, Any] | None) -> bool:
    if normalizer is None or normalizer["type"] == "NFC":
        return True
    return normalizer["type"] == "Sequence" and all(map(_harmless_normalizer, normalizer["normalizers"]))


def _known_pre_tokenizer(pre_tokenizer: dict[str, Any] | None) -> bool:
    """A tokenizer without any would merge over the whole text, so there has to be one."""
    if pre_tokenizer is None:
        return False
    if pre_tokenizer["type"] == "Sequence":
        steps = pre_tokenizer["pretokenizers"]
        return all(map(_known_step, steps)) and any(map(_splits_words, steps))
    return _known_step(pre_tokenizer) and _splits_words(pre_tokenizer)


def _known_step(step: dict[str, Any]) -> bool:
    if step["type"] == "ByteLevel":
        return step["add_prefix_space"] is False
    if step["type"] == "Split":
        known = step["pattern"].get("Regex") in KNOWN_PATTERNS
        return known and step["behavior"] == "Isolated" and step["invert"] is False
    return bool(step["type"] == "Digits")


def _splits_words(step: dict[str, Any]) -> bool:
    """Whether the step alone splits before white space: the patterns that end with the rule for white space do."""
    if step["type"] == "ByteLevel":
        return bool(step.get("use_regex", True))
    return step["type"] == "Split" and str(step["pattern"].get("Regex", "")).endswith(_SPACES)


def _reaches_over_space(token: dict[str, Any]) -> bool:
    plain = not token["special"]
    return plain and (token["lstrip"] or token["rstrip"] or any(character.isspace() for character in token["content"]))
