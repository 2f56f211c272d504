import hashlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.digest import canonical_json, digest_json, sha256_bytes, sha256_file, short

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(), children, max_size=4),
    max_leaves=6,
)


def test_known_values(tmp_path: Path):
    empty = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
    assert sha256_bytes(b"") == empty
    assert sha256_bytes(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    (tmp_path / "file").write_bytes(b"abc" * 1_000_000)
    assert sha256_file(tmp_path / "file") == hashlib.sha256(b"abc" * 1_000_000).hexdigest()
    assert short(empty) == "e3b0c44298fc"
    assert short(empty, 4) == "e3b0"


def test_the_canonical_encoding_is_fixed():
    """Run keys and commits rest on these bytes: they may never change."""
    document = {"b": [1, 1.0, -0.5, 1e-7, True, None], "a": {"ä€😀": 'x"\\\n'}, "": ()}
    expected = '{"":[],"a":{"ä€😀":"x\\"\\\\\\n"},"b":[1,1.0,-0.5,1e-07,true,null]}'
    assert canonical_json(document) == expected.encode()
    assert digest_json(document) == sha256_bytes(expected.encode())
    assert digest_json({}) == "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"


@settings(deadline=None)
@given(JSON)
def test_what_is_read_back_has_the_same_digest(value: object):
    assert digest_json(json.loads(json.dumps(value, indent=2))) == digest_json(value)


@settings(deadline=None)
@given(st.dictionaries(st.text("abc"), st.integers(), min_size=2, max_size=5))
def test_the_order_of_keys_does_not_matter(value: dict[str, int]):
    assert digest_json(dict(reversed(value.items()))) == digest_json(value)


@pytest.mark.parametrize(
    "value", [float("nan"), {"a": [float("inf")]}, {1: "a"}, {"a": [{None: 1}]}, {"a": ({2.0: 1},)}, "\ud800"]
)
def test_values_without_an_encoding(value: object):
    with pytest.raises(ValueError):
        digest_json(value)


def test_objects_are_no_json():
    with pytest.raises(TypeError):
        digest_json({"path": Path("x")})
