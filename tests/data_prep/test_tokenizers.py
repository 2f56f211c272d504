import json
import random

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors

from data_prep.config import TokenizerConfig
from data_prep.sample import sample_texts
from data_prep.text import cut
from data_prep.token_bytes import token_bytes
from data_prep.tokenizers import (
    BEGIN_TOKENS,
    TRAINED_BOS_TOKEN,
    Encoder,
    find_trained,
    load_json,
    parse_tokenizer,
    pin_given,
    token_dtype,
    train,
    trained_key,
)
from headrace.errors import ConfigError, DamagedData, InputError
from tests.data_prep.corpus import EOS, WORDS, piece_of, train_small, write_files

SAMPLE = [" ".join(random.Random(i).choices(WORDS, k=50)) for i in range(30)]


def save(tokenizer: Tokenizer, path, **changes):
    document = json.loads(tokenizer.to_str()) | changes
    path.write_text(json.dumps(document))
    return TokenizerConfig(path=str(path))


def encoder_of(tokenizer: Tokenizer, bos_id=None) -> Encoder:
    return Encoder(tokenizer.to_str().encode(), tokenizer.token_to_id(EOS), bos_id)


# ---------------------------------------------------------------------------------------------------------- encoding


def test_every_document_ends_with_exactly_one_end_token():
    tokenizer = train_small()
    eos = tokenizer.token_to_id(EOS)
    encoded = encoder_of(tokenizer).encode([b"the river", f"a{EOS}b {EOS}".encode(), b"\0"])
    assert [ids.tolist().count(eos) for ids in encoded] == [1, 1, 1]
    assert [int(ids[-1]) for ids in encoded] == [eos] * 3
    assert [tokenizer.decode(ids[:-1].tolist()) for ids in encoded] == ["the river", f"a{EOS}b {EOS}", "\0"]


def test_a_template_that_adds_begin_and_end_tokens_is_not_used():
    tokenizer = train_small()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"<s> $A {EOS}", special_tokens=[("<s>", tokenizer.token_to_id("<s>")), (EOS, 0)]
    )
    plain = encoder_of(train_small()).encode([b"the old mill"])[0]
    assert np.array_equal(encoder_of(tokenizer).encode([b"the old mill"])[0], plain)
    begun = encoder_of(tokenizer, bos_id=tokenizer.token_to_id("<s>")).encode([b"the old mill"])[0]
    assert begun.tolist() == [tokenizer.token_to_id("<s>"), *plain.tolist()]


def test_truncation_and_padding_of_the_file_are_ignored():
    tokenizer = train_small()
    text = " ".join(WORDS * 30).encode()
    plain = encoder_of(tokenizer).encode([text, b"short"])
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=64)
    for ids, expected in zip(encoder_of(tokenizer).encode([text, b"short"]), plain, strict=True):
        assert np.array_equal(ids, expected)


def test_an_end_token_that_the_file_does_not_call_special_stays_text_all_the_same():
    tokenizer = train_small()
    tokenizer.add_tokens([AddedToken("<end>", special=False)])
    eos = tokenizer.token_to_id("<end>")
    ids = Encoder(tokenizer.to_str().encode(), eos, None).encode([b"a<end>b"])[0].tolist()
    assert ids.count(eos) == 1


def test_an_end_token_that_text_can_spell_is_refused():
    tokenizer = train_small()
    with pytest.raises(InputError, match="turns plain text into its end token"):
        Encoder(tokenizer.to_str().encode(), tokenizer.token_to_id("a"), None).encode([b"banana"])


def test_long_texts_are_cut_and_joined_without_a_trace(monkeypatch):
    tokenizer = train_small()
    texts = [" ".join(WORDS * 200).encode(), b"short", ("x" * 900 + " y").encode() * 3]
    monkeypatch.setattr("data_prep.tokenizers.PIECE_BYTES", 500)
    monkeypatch.setattr("data_prep.tokenizers.cut", lambda text: cut(text, 500))
    for text, ids in zip(texts, encoder_of(tokenizer).encode(texts), strict=True):
        assert ids[:-1].tolist() == tokenizer.encode(text.decode(), add_special_tokens=False).ids


# ------------------------------------------------------------------------------------------------------ given files


def test_a_given_tokenizer_is_pinned_under_its_own_digest(store, tmp_path):
    config = save(train_small(), tmp_path / "tokenizer.json")
    pinned = pin_given(store, config)
    assert pinned.key == pinned.digest == store.sha256(f"tokenizers/{pinned.key}/tokenizer.json")
    assert (pinned.vocab_size, pinned.eos_id, pinned.bos_id, pinned.dtype) == (300, 0, None, "<u2")
    assert load_json(store, pinned.key) == (tmp_path / "tokenizer.json").read_bytes()
    assert pin_given(store, config) == pinned
    # a folder that holds the file will do, and another end token is no other artifact
    tokenizer = train_small()
    tokenizer.add_special_tokens(["<s>"])
    save(tokenizer, tmp_path / "tokenizer.json")
    first = pin_given(store, TokenizerConfig(path=str(tmp_path)))
    second = pin_given(store, TokenizerConfig(path=str(tmp_path), eos_token="<s>"))
    assert (first.key, first.eos_id) == (second.key, 0)
    assert second.eos_id == 300


def test_the_vocabulary_counts_added_tokens_and_holes(store, tmp_path):
    tokenizer = train_small()
    tokenizer.add_special_tokens([f"<extra_{i}>" for i in range(10)])
    assert pin_given(store, save(tokenizer, tmp_path / "a.json")).vocab_size == 310
    document = json.loads(tokenizer.to_str())
    document["added_tokens"][-1]["id"] = 400
    (tmp_path / "b.json").write_text(json.dumps(document))
    try:
        expected = Tokenizer.from_file(str(tmp_path / "b.json")).token_to_id("<extra_9>") + 1
    except Exception:  # noqa: BLE001 - a library that refuses holes is as good
        return
    assert pin_given(store, TokenizerConfig(path=str(tmp_path / "b.json"))).vocab_size >= expected


def test_ids_fit_their_type():
    assert token_dtype(65_536) == "<u2"
    assert token_dtype(65_537) == "<u4"


def test_begin_tokens_come_from_the_template_or_a_known_name(store, tmp_path):
    config = save(train_small(), tmp_path / "a.json").model_copy(update={"add_bos": True})
    with pytest.raises(ConfigError, match=r"the begin token of .*a.json is not clear \(candidates: none\)"):
        pin_given(store, config)
    tokenizer = train_small()
    tokenizer.add_special_tokens(["<s>", "[BOS]", "<my-begin>"])
    save(tokenizer, tmp_path / "a.json")
    with pytest.raises(ConfigError, match=r"candidates: <s>, \[BOS\]"):
        pin_given(store, config)
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(),
            processors.TemplateProcessing(
                single="<my-begin> $A", special_tokens=[("<my-begin>", tokenizer.token_to_id("<my-begin>"))]
            ),
        ]
    )
    save(tokenizer, tmp_path / "a.json")
    assert pin_given(store, config).bos_id == tokenizer.token_to_id("<my-begin>")
    tokenizer = train_small()
    tokenizer.add_special_tokens(["<s>"])
    save(tokenizer, tmp_path / "a.json")
    assert pin_given(store, config).bos_id == tokenizer.token_to_id("<s>")
    assert TRAINED_BOS_TOKEN in BEGIN_TOKENS


def test_refused_files_say_why(store, tmp_path):
    with pytest.raises(InputError, match=r"tokenizer .*none.json cannot be read: No such file"):
        pin_given(store, TokenizerConfig(path=str(tmp_path / "none.json")))
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(InputError, match=r"bad.json is not a tokenizer.json that the tokenizers library reads"):
        pin_given(store, TokenizerConfig(path=str(tmp_path / "bad.json")))
    good = save(train_small(), tmp_path / "good.json")
    with pytest.raises(ConfigError, match=r"eos_token is '</s>', but .*good.json has no such token.*are: <\|endoftext"):
        pin_given(store, good.model_copy(update={"eos_token": "</s>"}))
    document = json.loads(train_small().to_str())
    document["model"]["dropout"] = 0.1
    with pytest.raises(InputError, match=r"here has BPE dropout \(0.1\)"):
        parse_tokenizer(json.dumps(document).encode(), "here")
    words = Tokenizer(models.WordLevel({"a": 0, EOS: 1, "[UNK]": 2}, unk_token="[UNK]"))
    with pytest.raises(InputError, match=r"\(model WordLevel\) cannot spell every text"):
        pin_given(store, save(words, tmp_path / "words.json"))


def test_a_changed_artifact_is_noticed(store, tmp_path):
    pinned = pin_given(store, save(train_small(), tmp_path / "a.json"))
    store.write_bytes(f"tokenizers/{pinned.key}/tokenizer.json", train_small(310).to_str().encode())
    with pytest.raises(DamagedData, match="is not the file that was committed"):
        load_json(store, pinned.key)
    with pytest.raises(DamagedData, match="has no commit"):
        load_json(store, "0" * 64)


# --------------------------------------------------------------------------------------------------------- training


def test_training_is_deterministic_and_kept(store, tmp_path):
    config = TokenizerConfig(vocab_size=320)
    assert find_trained(store, "corpus", config) is None
    first = train(store, "corpus", config, SAMPLE)
    assert (first.vocab_size, first.eos_id, first.bos_id) == (320, 0, None)
    assert find_trained(store, "corpus", config) == first
    again = train(type(store).open(tmp_path / "other"), "corpus", config, SAMPLE[::-1])
    assert again == first


def test_another_name_setting_or_generation_is_another_tokenizer():
    config = TokenizerConfig()
    keys = {
        trained_key("a", config),
        trained_key("b", config),
        *(
            trained_key("a", config.model_copy(update=change))
            for change in (
                {"vocab_size": 500},
                {"generation": 2},
                {"sample_bytes": 2**20},
                {"eos_token": "</s>"},
                {"add_bos": True},
            )
        ),
    }
    assert len(keys) == 7


def test_of_two_that_train_on_different_text_the_first_is_kept(store):
    config = TokenizerConfig(vocab_size=320)
    first = train(store, "corpus", config, SAMPLE)
    # the second one read its text before the first had committed
    second = train(store, "corpus", config, ["quite another text " * 50])
    assert second == first


def test_a_file_without_commit_is_taken_over(store, tmp_path):
    config = TokenizerConfig(vocab_size=320)
    other = type(store).open(tmp_path / "other")
    first = train(other, "corpus", config, SAMPLE)
    # killed between the file and its commit
    store.create(f"tokenizers/{first.key}/tokenizer.json", load_json(other, first.key))
    assert find_trained(store, "corpus", config) is None
    assert train(store, "corpus", config, ["other text"]) == first


def test_a_begin_token_is_trained_on_request_and_little_text_gives_less(store, caplog):
    pinned = train(store, "corpus", TokenizerConfig(vocab_size=5000, add_bos=True), SAMPLE)
    assert (pinned.eos_id, pinned.bos_id) == (0, 1)
    assert pinned.vocab_size < 5000
    assert "too little text for 5000 tokens" in caplog.text


def test_a_vocabulary_too_small_for_bytes_and_controls_is_refused(store):
    with pytest.raises(ConfigError, match=r"tokenizer.vocab_size must be at least 258"):
        train(store, "corpus", TokenizerConfig(vocab_size=257, add_bos=True), SAMPLE)
    assert train(store, "corpus", TokenizerConfig(vocab_size=257), SAMPLE).vocab_size == 257


# ----------------------------------------------------------------------------------------------------------- sample


def test_a_small_corpus_is_the_sample(tmp_path):
    texts = write_files(tmp_path, 12)
    pieces = [piece_of(path) for path in sorted(tmp_path.rglob("*.txt"))]
    assert list(sample_texts(pieces, 2**20)) == [texts[name] for name in sorted(texts)]


@pytest.mark.parametrize("text_field", [None, "text"])
def test_a_sample_of_a_large_corpus_is_chunks_of_it_in_order(tmp_path, monkeypatch, text_field):
    monkeypatch.setattr("data_prep.sample.CHUNK_BYTES", 1000)
    lines = [f"line {i:05d}" for i in range(2000)]
    path = tmp_path / "file"
    path.write_text("".join(json.dumps({"text": line}) + "\n" if text_field else line + "\n" for line in lines))
    pieces = [piece_of(path, text_field=text_field)]
    sample = list(sample_texts(pieces, 10_000))
    assert sample == list(sample_texts(pieces, 10_000))
    found = "\n".join(sample).split("\n")
    found = [line for line in found if line]
    assert found == sorted(set(found))
    assert set(found) <= set(lines)
    bytes_of_a_line = 23 if text_field else 11
    assert 9_000 <= len(found) * bytes_of_a_line <= 11_100
    everything = [line for text in sample_texts(pieces, 10**6) for line in text.split("\n") if line]
    assert everything == lines


def test_what_cannot_be_read_is_not_in_the_sample(tmp_path, monkeypatch):
    monkeypatch.setattr("data_prep.sample.CHUNK_BYTES", 15)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n' + b"broken\n" * 5 + b'{"text": "\xff"}\n{"text": "b"}\n')
    assert list(sample_texts([piece_of(path, text_field="text")], 2**20)) == ["a", "b"]
    path.write_bytes(b"line one of it\n\xff\xff\xff this is not\nlast line")
    assert "".join(sample_texts([piece_of(path)], 2**20)) == "line one of it\nlast line"


# ------------------------------------------------------------------------------------------------------ token bytes


def test_token_bytes_add_up_to_the_text():
    tokenizer = train_small()
    table = token_bytes(tokenizer.to_str().encode(), [0])
    assert table.dtype == np.int32
    assert table.shape == (300,)
    for text in ("naïve cafés 水 車", "\0\x7f\x80\xff", "don't;\n\n  x", "🌊"):
        ids = encoder_of(tokenizer).encode([text.encode()])[0]
        assert table[ids].sum() == len(text.encode())
    assert table[0] == 0


def test_token_bytes_of_added_tokens():
    tokenizer = train_small()
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.add_tokens(["<émile>"])
    table = token_bytes(tokenizer.to_str().encode(), [])
    assert table[tokenizer.token_to_id("<s>")] == 0
    assert table[tokenizer.token_to_id("<émile>")] == 8
    assert token_bytes(tokenizer.to_str().encode(), [tokenizer.token_to_id("<émile>")])[-1] == 0


def test_token_bytes_of_a_byte_fallback():
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}, "▁the": 257, "é": 258}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    table = token_bytes(tokenizer.to_str().encode(), [])
    assert table[1:257].tolist() == [1] * 256
    assert table[257:].tolist() == [4, 2]
    del vocab["<0x41>"]
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True, unk_token="<unk>"))
    with pytest.raises(InputError, match="cannot spell every text"):
        token_bytes(tokenizer.to_str().encode(), [])


def test_bytes_that_never_occur_in_text_may_be_missing():
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    without = {character: i for i, character in enumerate(sorted(set(alphabet) - {"\u00ff", "\u00c0"}))}
    tokenizer = Tokenizer(models.BPE(without, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert len(token_bytes(tokenizer.to_str().encode(), [])) == 254
    del without["Ã"]
    tokenizer = Tokenizer(models.BPE(without, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    with pytest.raises(InputError, match="cannot spell every text"):
        token_bytes(tokenizer.to_str().encode(), [])
