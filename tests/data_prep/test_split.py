import hashlib

import pytest

from data_prep.split import FLOOR_BYTES, Split, choose_split
from headrace.errors import InputError
from tests.data_prep.corpus import piece_of, write_jsonl


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def pieces_of(tmp_path, texts):
    return [piece_of(write_jsonl(tmp_path / "a.jsonl", texts), text_field="text")]


def held_bytes(split: Split, texts) -> int:
    return sum(len(text) for text in texts if split.is_validation(digest(text)))


def test_the_share_is_that_of_the_hash_range():
    assert Split(0.5).is_validation("7fffffffffffffff" + "f" * 48)
    assert not Split(0.5).is_validation("8000000000000000" + "0" * 48)
    held = sum(Split(0.1).is_validation(digest(str(i))) for i in range(10_000))
    assert 900 < held < 1100


def test_a_large_enough_corpus_promotes_nothing(tmp_path):
    texts = [f"{i} " * 500 for i in range(400)]  # about 750 kB, 2% are about 15 documents
    split = choose_split(pieces_of(tmp_path, texts), 0.1, "fail")
    assert split == Split(0.1)
    assert held_bytes(split, texts) > FLOOR_BYTES


@pytest.mark.parametrize("number", [2, 3, 5, 20, 100])
def test_a_small_corpus_has_something_on_both_sides(tmp_path, number):
    texts = [f"document {i} " * (10 + i % 7) for i in range(number)]
    split = choose_split(pieces_of(tmp_path, texts), 0.0001, "fail")
    held = held_bytes(split, texts)
    assert 0 < held < sum(map(len, texts))
    if number >= 20:
        assert 0.1 <= held / sum(map(len, texts)) <= 1 / 3


def test_promoted_are_the_lowest_digests(tmp_path):
    texts = [f"document {i:02d}" for i in range(20)]
    split = choose_split(pieces_of(tmp_path, texts), 1e-9, "fail")
    assert split.promoted == frozenset(sorted(map(digest, texts))[:2])


def test_the_choice_does_not_depend_on_order_or_on_how_documents_lie_in_files(tmp_path):
    texts = [f"document {i:02d}" for i in range(20)]
    split = choose_split(pieces_of(tmp_path, texts), 1e-9, "fail")
    assert choose_split(pieces_of(tmp_path, texts[::-1]), 1e-9, "fail") == split
    for text in texts:
        (tmp_path / f"{text}.txt").write_text(text)
    files = [piece_of(path) for path in tmp_path.glob("*.txt")]
    assert choose_split(files, 1e-9, "fail") == split


def test_one_document_that_is_most_of_the_corpus_stays_in_training(tmp_path):
    texts = ["x" * 1000, "small", "smaller"]
    split = choose_split(pieces_of(tmp_path, texts), 1e-9, "fail")
    assert not split.is_validation(digest("x" * 1000))
    assert held_bytes(split, texts) > 0


def test_of_two_documents_the_smaller_is_held_out(tmp_path):
    split = choose_split(pieces_of(tmp_path, ["long document", "short"]), 1e-9, "fail")
    assert split.promoted == {digest("short")}


def test_only_for_keeps_the_promoted_documents_of_a_unit(tmp_path):
    texts = [f"document {i:02d}" for i in range(20)]
    split = choose_split(pieces_of(tmp_path, texts), 1e-9, "fail")
    first = min(texts, key=digest)
    assert split.only_for(pieces_of(tmp_path, [first, "other"])).promoted == {digest(first)}
    assert split.only_for(pieces_of(tmp_path, ["other"])).promoted == frozenset()


def test_copies_count_together_and_cannot_be_split(tmp_path):
    with pytest.raises(InputError, match=r"one distinct document only .*, so it cannot be split"):
        choose_split(pieces_of(tmp_path, ["same", "same", "same"]), 0.1, "fail")


def test_an_empty_corpus_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"corpus is empty: none of its 1 files .* holds a document with text"):
        choose_split(pieces_of(tmp_path, ["", ""]), 0.1, "fail")


def test_a_fault_is_found_before_anything_is_trained(tmp_path):
    (tmp_path / "bad.txt").write_bytes(b"caf\xe9")
    with pytest.raises(InputError, match=r"bad.txt, byte 3: byte 0xe9 is not UTF-8. Correct the file, or set"):
        choose_split([piece_of(tmp_path / "bad.txt")], 0.1, "fail")
    with pytest.raises(InputError, match="corpus is empty"):
        choose_split([piece_of(tmp_path / "bad.txt")], 0.1, "skip")


def test_a_corpus_with_enough_is_read_no_further(tmp_path):
    texts = [f"{i} " * 500 for i in range(400)]
    pieces = pieces_of(tmp_path, texts)
    (tmp_path / "unread.txt").write_bytes(b"\xff")
    assert choose_split([*pieces, piece_of(tmp_path / "unread.txt")], 0.1, "fail") == Split(0.1)


def test_a_large_corpus_of_few_documents_holds_one_out(tmp_path):
    texts = [f"book {i} " * 40_000 for i in range(12)]  # 4 MB; most likely none of 12 is among 2 in a thousand
    split = choose_split(pieces_of(tmp_path, texts), 0.002, "fail")
    assert split.promoted == {min(map(digest, texts))}
