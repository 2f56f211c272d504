import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep.text import Document, Rejected, cut, parse_line, read_documents, utf8_fault
from headrace.errors import InputError
from tests.data_prep.corpus import piece_of


def read(path, data: bytes, text_field=None):
    path.write_bytes(data)
    return list(read_documents(piece_of(path, text_field=text_field)))


@pytest.fixture
def file(tmp_path):
    return tmp_path / "file"


def test_a_file_is_one_document_as_it_is(file):
    text = "First\r\n\0 line\u00e9\u0301 \U0001f30a\n".encode()
    assert read(file, text) == [Document(text, 0)]


def test_a_byte_order_mark_at_the_start_is_not_text(file):
    assert read(file, b"\xef\xbb\xbfabc") == [Document(b"abc", 3)]
    assert read(file, b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}', "text") == [Document(b"a", 3), Document(b"b", 17)]
    assert read(file, b"a\xef\xbb\xbfb") == [Document(b"a\xef\xbb\xbfb", 0)]


def test_an_empty_file_is_an_empty_document(file):
    assert [found.reason for found in read(file, b"")] == ["empty"]
    assert [found.reason for found in read(file, b"\xef\xbb\xbf")] == ["empty"]


def test_bytes_that_are_not_utf8_are_rejected_at_their_place(file):
    assert read(file, b"caf\xe9 noir") == [Rejected("invalid_utf8", "byte 0xe9 is not UTF-8", 3)]
    assert read(file, b"abc\xe6\xb0") == [Rejected("invalid_utf8", "byte 0xe6 is not UTF-8", 3)]
    # surrogates and overlong forms are not UTF-8 either
    assert read(file, b"a\xed\xa0\x80")[0].offset == 1
    assert read(file, b"\xc0\x80")[0].offset == 0
    line = b'{"text": "ok"}\n{"text": "caf\xe9"}\n'
    assert read(file, line, "text") == [Document(b"ok", 0), Rejected("invalid_utf8", "byte 0xe9 is not UTF-8", 28)]


def test_a_fault_far_into_a_large_text_has_the_right_place():
    good = ("é" * (2**20 - 1)).encode() + b"x"  # characters across the borders of the steps
    assert utf8_fault(b"y" + good, 0) is None
    assert utf8_fault(b"y" + good + b"\xff", 10).offset == 10 + 1 + len(good)
    assert utf8_fault(b"y" + good[:-2], 0).offset == len(good) - 2


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"{", "invalid_json"),
        (b'{"text": "a"} {"text": "b"}', "invalid_json"),
        (b"\x00\x00\x00{", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b'{"text": ' + b"9" * 5000 + b"}", "invalid_json"),
        (b'["a"]', "not_an_object"),
        (b"null", "not_an_object"),
        (b'{"body": "a"}', "missing_text"),
        (b'{"text": null}', "not_text"),
        (b'{"text": ["a"]}', "not_text"),
        (b'{"text": ""}', "empty"),
        (b'{"text": "\\ud800"}', "lone_surrogate"),
    ],
)
def test_lines_that_hold_no_document(line, reason):
    found = parse_line(line, 7, "text")
    assert isinstance(found, Rejected)
    assert (found.reason, found.offset) == (reason, 7)


def test_a_message_names_what_is_there():
    assert parse_line(b'{"b": 1, "a": 2}', 0, "text").detail == "the line has no field 'text'; it has: a, b"
    assert parse_line(b'{"text": "x\\udfff"}', 0, "text").detail.endswith("(\\udfff)")


def test_escapes_become_the_characters_they_stand_for():
    line = b'{"text": "a\\u0000\\ud83c\\udf0a\\n\\u00e9", "other": 1}'
    assert parse_line(line, 0, "text") == Document("a\0\U0001f30a\né".encode(), 0)


def test_blank_lines_are_no_documents_and_the_last_line_needs_no_break(file):
    data = b'\n{"text": "a"}\r\n  \n{"text": "b"}'
    assert read(file, data, "text") == [Document(b"a", 1), Document(b"b", 19)]


def test_a_piece_of_a_file_is_read_with_offsets_of_the_file(file):
    file.write_bytes(b'{"text": "a"}\n{"text": "b"}\n{"text": "c"}\n')
    piece = piece_of(file, text_field="text", start=14, stop=28)
    assert list(read_documents(piece)) == [Document(b"b", 14)]


def test_a_file_that_changed_since_the_plan_is_refused_after_reading(file):
    file.write_bytes(b'{"text": "a"}\n')
    piece = piece_of(file, text_field="text")
    file.write_bytes(b'{"text": "b"}\n')
    with pytest.raises(InputError, match="was changed while it was being prepared"):
        list(read_documents(piece))
    file.unlink()
    with pytest.raises(InputError, match="cannot be read: No such file"):
        list(read_documents(piece))


def test_digest_is_that_of_the_text():
    import hashlib

    assert Document(b"abc", 9).digest() == hashlib.sha256(b"abc").hexdigest()


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet="ab.1\n\r \t水é;", max_size=300), st.integers(1, 40))
def test_pieces_join_to_the_text_and_break_before_white_space(text, limit):
    pieces = list(cut(text.encode(), limit))
    assert b"".join(pieces).decode() == text
    assert all(piece[:1] in (b" ", b"\n", b"\r") for piece in pieces[1:])
    assert not any(piece[-1:].isspace() for piece in pieces[:-1])


def test_pieces_are_as_long_as_allowed_and_longer_only_without_a_break():
    text = ("word " * 1000).encode()
    pieces = list(cut(text, 100))
    assert [len(piece) for piece in pieces[:3]] == [99, 100, 100]  # the blank before a word goes with it
    unbroken = b"x" * 500 + b" y" + b"z" * 50
    assert list(cut(unbroken, 100)) == [b"x" * 500, b" y" + b"z" * 50]
    assert list(cut(b"x" * 500, 100)) == [b"x" * 500]
    assert list(cut(b"short", 100)) == [b"short"]


def test_a_long_search_for_a_break_is_not_slow():
    # A break at the very beginning of a long piece: the windows grow until they reach it.
    text = b"a b" + b"x" * 3_000_000
    assert [len(piece) for piece in cut(text, 2**20)] == [1, len(text) - 1]


def test_jsonl_written_by_json_is_read_back(file):
    texts = ["a", "line\nbreak", "\u2028", "tab\t", "{}", "\0"]
    data = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts).encode()
    assert [found.text.decode() for found in read(file, data, "text")] == texts
