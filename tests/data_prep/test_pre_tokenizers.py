"""A long text may be cut before it is encoded only where that changes no id: shown here for every known pattern."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from data_prep.pre_tokenizers import KNOWN_PATTERNS, cuts_are_safe
from data_prep.text import cut
from tests.data_prep.corpus import train_small

BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
WORD_PATTERNS = sorted(pattern for pattern in KNOWN_PATTERNS if r"\s+(?!\S)" in pattern)
DEEPSEEK = [
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    next(pattern for pattern in WORD_PATTERNS if r"[!\"#" in pattern),
]


def splits(*patterns):
    return [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]


CASES = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "deepseek": pre_tokenizers.Sequence([*splits(*DEEPSEEK), BYTES]),
    "digits": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    **{f"pattern {n}": pre_tokenizers.Sequence([*splits(p), BYTES]) for n, p in enumerate(WORD_PATTERNS)},
}


def document(pre_tokenizer, **parts) -> dict:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    return json.loads(tokenizer.to_str()) | parts


# Everything that has ever been glued together by a pattern: white space of all kinds, punctuation before line breaks,
# contractions, combining marks, digits, letters with and without case, ideographs, emoji, a surrogate-free astral.
FRAGMENTS = [
    *" \n\r\t.;,'/-_!?aB1",
    *("\r\n", "\n\n", "  ", " \n", "'s", "'ll", "don't", "a\u0301", "\u0301", "\u00a0", "\u3000", "\u2028", "\x85"),
    *("é", "Ж", "ǅ", "水車", "ひ", "カ", "123", "٣", "²", "🌊", "\x00", "\x1c", "foo", "Bar", "{", "}", "//", "—"),
]
texts = st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join)


@pytest.mark.parametrize("name", sorted(CASES))
def test_cutting_first_gives_the_same_parts(name):
    pre_tokenizer = CASES[name]
    assert cuts_are_safe(document(pre_tokenizer))

    def parts(text: str) -> list[str]:
        return [part for part, _ in pre_tokenizer.pre_tokenize_str(text)]

    @settings(deadline=None, max_examples=400)
    @given(texts, st.integers(1, 30))
    def check(text, piece_bytes):
        pieces = [piece.decode() for piece in cut(text.encode(), piece_bytes)]
        assert [part for piece in pieces for part in parts(piece)] == parts(text)

    check()


def test_ids_of_a_cut_text_are_those_of_the_whole():
    tokenizer = train_small()
    text = "The river turns;\n\n  the old\tmill's wheel.\r\nWater under  the bridge 1984\n\n\nnaïve 水 車 " * 200
    whole = tokenizer.encode(text, add_special_tokens=False).ids
    for piece_bytes in (1, 7, 100, 4096):
        pieces = list(cut(text.encode(), piece_bytes))
        assert len(pieces) > len(text) // (piece_bytes + 100)
        assert [i for piece in pieces for i in tokenizer.encode(piece.decode(), add_special_tokens=False).ids] == whole


def test_the_known_patterns_are_the_ones_in_use():
    # as tiktoken and the published files spell them
    cl100k = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    o200k = (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
        r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    assert {cl100k, o200k} <= KNOWN_PATTERNS


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("no pre-tokenizer", {"pre_tokenizer": None}),
        ("a prefix space", document(pre_tokenizers.ByteLevel(add_prefix_space=True))),
        ("bytes without words", document(BYTES)),
        ("digits only", document(pre_tokenizers.Digits())),
        ("an unknown pattern", document(pre_tokenizers.Split(Regex(r"\n+"), "isolated"))),
        ("a text pattern", document(pre_tokenizers.Split(WORD_PATTERNS[0], "isolated"))),
        ("another behaviour", document(pre_tokenizers.Split(Regex(WORD_PATTERNS[0]), "merged_with_next"))),
        ("inverted", document(pre_tokenizers.Split(Regex(WORD_PATTERNS[0]), "isolated", invert=True))),
        ("an unknown step", document(pre_tokenizers.Sequence([CASES["gpt2"], pre_tokenizers.Metaspace()]))),
        ("lower case", {"normalizer": {"type": "Lowercase"}}),
        ("a prepended mark", {"normalizer": {"type": "Prepend", "prepend": "▁"}}),
        ("one of two", {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "NFKC"}]}}),
        ("another model", {"model": {"type": "WordPiece"}}),
    ],
)
def test_what_is_not_known_to_be_safe_is_encoded_whole(name, parts):
    assert not cuts_are_safe(document(CASES["gpt2"]) | parts)


def test_harmless_normalizers_are_accepted():
    nfc = json.loads(normalizers.NFC().__getstate__())
    assert cuts_are_safe(document(CASES["gpt2"], normalizer=nfc))
    assert cuts_are_safe(document(CASES["gpt2"], normalizer={"type": "Sequence", "normalizers": [nfc, nfc]}))


@pytest.mark.parametrize(
    ("content", "options", "safe"),
    [
        ("<think>", {}, True),
        ("<pad>", {"special": True, "rstrip": True}, True),  # special ones are plain text to us
        ("<think>", {"rstrip": True}, False),
        ("<think>", {"lstrip": True}, False),
        ("two words", {}, False),
        ("    ", {}, False),
        ("a\u3000b", {}, False),
    ],
)
def test_added_tokens_must_not_reach_over_white_space(content, options, safe):
    token = {"id": 9, "content": content, "special": False, "lstrip": False, "rstrip": False} | options
    assert cuts_are_safe(document(CASES["gpt2"], added_tokens=[token])) is safe


def test_patterns_hold_white_space_only_where_the_rule_of_cut_says():
    # The argument of text.cut, checked on the patterns' text: apart from the rules for white space itself, a blank is
    # only ever optional at the beginning of a part, and line breaks only follow punctuation.
    for pattern in WORD_PATTERNS:
        rest = pattern.removesuffix(r"|\s+(?!\S)|\s+").removesuffix(r"|\s*[\r\n]+")
        for alternative in re.split(r"\|(?![^(]*\))", rest):
            body = re.sub(r"\[\^[^\]]*\]", "", alternative).removeprefix(" ?")
            body = re.sub(r"\[\\r\\n/?\]\*$", "", body)
            assert " " not in body, alternative
            assert r"\s" not in body, alternative
            assert r"\n" not in body, alternative
