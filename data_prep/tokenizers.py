"""The tokenizer of a dataset: trained on a sample of the corpus once and kept, or given as a tokenizer.json.

Either way it is a *pinned artifact* on the store, `tokenizers/<key>/tokenizer.json`, and whatever is tokenised names
its digest. A trained one is found by the dataset's name and its own settings, not by the text: a corpus that grows
keeps its vocabulary until `generation` is raised.

Ids that begin and end a document are added by the caller, never by the tokenizer's own post-processor; special tokens
that are spelled in a text stay plain text.
"""

import json
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from data_prep.config import TokenizerConfig
from data_prep.pre_tokenizers import cuts_are_safe
from data_prep.text import PIECE_BYTES, cut
from data_prep.token_bytes import token_bytes, vocabulary
from headrace.commit import FileEntry, read_commit, write_commit
from headrace.digest import digest_json, sha256_bytes
from headrace.errors import ConfigError, DamagedData, InputError
from headrace.storage import Storage

logger = logging.getLogger(__name__)

TRAINED_BOS_TOKEN = "<|begin_of_text|>"
TRAINER_VERSION = 1
"""Part of a trained tokenizer's key: raise it when the same settings would train another vocabulary."""

UINT16_VOCABULARY = 2**16
FILE_NAME = "tokenizer.json"
KIND = "tokenizer"
Ids = npt.NDArray[np.uint32]
BEGIN_TOKENS = ("<|begin_of_text|>", "<|startoftext|>", "<|begin▁of▁sentence|>", "<|bos|>", "<bos>", "<s>", "[BOS]")


@dataclass(frozen=True)
class PinnedTokenizer:
    """A tokenizer that lies on the store under `key`."""

    key: str
    digest: str
    """SHA-256 of tokenizer.json."""
    vocab_size: int
    """One more than the largest id, added tokens included."""
    eos_id: int
    bos_id: int | None
    """None unless documents begin with it."""

    @property
    def control_ids(self) -> list[int]:
        """The ids that no text turns into: end, and begin where it is used."""
        return [self.eos_id] if self.bos_id is None else [self.eos_id, self.bos_id]

    @property
    def dtype(self) -> str:
        """Little-endian type of stored ids: the smallest that holds every id."""
        return token_dtype(self.vocab_size)


def token_dtype(vocab_size: int) -> str:
    """Return `<u2` for up to 65,536 ids (0 to 65,535), else `<u4`."""
    return "<u2" if vocab_size <= UINT16_VOCABULARY else "<u4"


class Encoder:
    """Documents to ids: begin token if there is one, the text, end token. Nothing is cut off or padded."""

    def __init__(self, tokenizer_json: bytes, eos_id: int, bos_id: int | None) -> None:
        document = _with_special(json.loads(tokenizer_json), {eos_id, bos_id})
        self._tokenizer = parse_tokenizer(json.dumps(document).encode("utf-8"), FILE_NAME)
        self._tokenizer.encode_special_tokens = True
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._cuts = cuts_are_safe(document)
        self._begin = [] if bos_id is None else [np.array([bos_id], dtype=np.uint32)]
        self._end = np.array([eos_id], dtype=np.uint32)

    def encode(self, texts: Sequence[bytes]) -> list[Ids]:
        """Return the ids of each document. Long texts are cut first where that changes nothing: see `text.cut`.

        Raises InputError when the tokenizer makes the end token out of plain text.
        """
        parts: list[list[Ids]] = [list(self._begin) for _ in texts]
        for batch in _batches(self._pieces(texts)):
            encoded = self._tokenizer.encode_batch_fast([text for _, text in batch], add_special_tokens=False)
            for (number, _), encoding in zip(batch, encoded, strict=True):
                ids = np.array(encoding.ids, dtype=np.uint32)
                if np.any(ids == self._end[0]):
                    raise InputError(
                        f"The tokenizer turns plain text into its end token (id {self._end[0]}), so documents could "
                        "not be told apart. Set tokenizer.eos_token to a token that no text spells."
                    )
                parts[number].append(ids)
        return [np.concatenate([*part, self._end]) for part in parts]

    def _pieces(self, texts: Sequence[bytes]) -> Iterator[tuple[int, str]]:
        for number, text in enumerate(texts):
            for piece in cut(text) if self._cuts else (text,):
                yield number, piece.decode("utf-8")


def _with_special(document: dict[str, Any], control_ids: set[int | None]) -> dict[str, Any]:
    """Some files add their end token without calling it special; spelled in a text, it would then become one."""
    added = [token | {"special": token["special"] or token["id"] in control_ids} for token in document["added_tokens"]]
    return document | {"added_tokens": added}


def _batches(pieces: Iterator[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    """Batches of at most about two pieces' length: they bound the memory of the tokenizer."""
    batch: list[tuple[int, str]] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece[1])
        if size >= PIECE_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def parse_tokenizer(tokenizer_json: bytes, where: str) -> tokenizers.Tokenizer:
    """Build the tokenizer of a tokenizer.json. Raises InputError when it is not one, or when it is random."""
    try:
        document = json.loads(tokenizer_json)
        tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    except Exception as error:  # the library raises bare Exception for every fault of the file
        raise InputError(f"{where} is not a tokenizer.json that the tokenizers library reads: {error}") from error
    if document["model"].get("dropout"):
        raise InputError(
            f"{where} has BPE dropout ({document['model']['dropout']}), so one text has many encodings. "
            "Set model.dropout to null in the file."
        )
    return tokenizer


def pin_given(storage: Storage, config: TokenizerConfig) -> PinnedTokenizer:
    """Put the tokenizer.json of `config.path` on the store under its own digest, and describe it; raises as below."""
    pinned, data = read_given(config)
    _publish(storage, pinned, data, {"origin": "given"})
    return pinned


def read_given(config: TokenizerConfig) -> tuple[PinnedTokenizer, bytes]:
    """The tokenizer.json of `config.path`, described, and its bytes.

    Raises InputError when the file cannot be read or is no tokenizer, ConfigError when it has no end or begin token
    as asked.
    """
    assert config.path is not None, "this is for a given tokenizer"
    path = Path(config.path).expanduser()
    path = path / FILE_NAME if path.is_dir() else path
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"The tokenizer {path} cannot be read: {error.strerror}. Correct tokenizer.path.") from error
    return _describe(sha256_bytes(data), data, config, str(path)), data


def trained_key(dataset_name: str, config: TokenizerConfig) -> str:
    """Return the key of a tokenizer that is trained for a dataset: its settings, not its text."""
    settings = config.model_dump(mode="json", exclude={"path"})
    return digest_json({"trainer": TRAINER_VERSION, "dataset": dataset_name, "settings": settings})


def find_trained(storage: Storage, dataset_name: str, config: TokenizerConfig) -> PinnedTokenizer | None:
    """Return the tokenizer that was trained for this dataset and these settings before, if there is one."""
    key = trained_key(dataset_name, config)
    if read_commit(storage, f"tokenizers/{key}", kind=KIND) is None:
        return None
    return _describe(key, load_json(storage, key), config, f"tokenizers/{key}/{FILE_NAME}")


def train(storage: Storage, dataset_name: str, config: TokenizerConfig, sample: Iterable[str]) -> PinnedTokenizer:
    """Train a byte-level BPE on `sample` and pin it. When another process pinned one meanwhile, that one is taken.

    Raises ConfigError when the vocabulary has no room for all bytes.
    """
    key = trained_key(dataset_name, config)
    specials = [config.eos_token, TRAINED_BOS_TOKEN] if config.add_bos else [config.eos_token]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if config.vocab_size < len(alphabet) + len(specials):
        raise ConfigError(
            f"tokenizer.vocab_size must be at least {len(alphabet) + len(specials)} ({len(alphabet)} bytes and "
            f"{len(specials)} control tokens), but is {config.vocab_size}."
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    data = tokenizer.to_str().encode("utf-8")
    pinned = _describe(key, data, config, "the trained tokenizer")
    if pinned.vocab_size < config.vocab_size:
        logger.warning(
            "The corpus has too little text for %s tokens; the trained vocabulary has %s.",
            config.vocab_size,
            pinned.vocab_size,
        )
    kept = _publish(storage, pinned, data, {"origin": "trained", "dataset": dataset_name})
    return _describe(key, kept, config, f"tokenizers/{key}/{FILE_NAME}")


def load_json(storage: Storage, key: str) -> bytes:
    """Return the tokenizer.json that is pinned under `key`. Raises DamagedData when it is not what was committed."""
    prefix = f"tokenizers/{key}"
    commit = read_commit(storage, prefix, kind=KIND)
    if commit is None:
        raise DamagedData(f"{storage.url(prefix)} has no commit, but a dataset names this tokenizer.")
    data = storage.read_bytes(f"{prefix}/{FILE_NAME}")
    if sha256_bytes(data) != commit.files[FILE_NAME].sha256:
        raise DamagedData(
            f"{storage.url(f'{prefix}/{FILE_NAME}')} is not the file that was committed there. "
            f"Bring it back from a copy, or move {storage.url(prefix)} away and run again: the same text gives it."
        )
    return data


def _publish(storage: Storage, pinned: PinnedTokenizer, data: bytes, body: dict[str, Any]) -> bytes:
    """Create tokenizer.json, then its commit; return the bytes that are pinned.

    The file itself is create-only: of two processes that trained on different text at the same time, one wins, and
    the commit of either is about the winner's bytes.
    """
    prefix = f"tokenizers/{pinned.key}"
    if not storage.create(f"{prefix}/{FILE_NAME}", data):
        data = storage.read_bytes(f"{prefix}/{FILE_NAME}")
    write_commit(storage, prefix, kind=KIND, body=body, files={FILE_NAME: FileEntry(len(data), sha256_bytes(data))})
    return data


def _describe(key: str, data: bytes, config: TokenizerConfig, where: str) -> PinnedTokenizer:
    parse_tokenizer(data, where)
    document = json.loads(data)
    tokens = vocabulary(document)
    eos_id = _eos_id(tokens, document, config, where)
    bos_id = _bos_id(tokens, document, where) if config.add_bos else None
    table = token_bytes(data, [])  # refuses a tokenizer that cannot spell every text
    return PinnedTokenizer(key=key, digest=sha256_bytes(data), vocab_size=len(table), eos_id=eos_id, bos_id=bos_id)


def _eos_id(tokens: dict[str, int], document: dict[str, Any], config: TokenizerConfig, where: str) -> int:
    if config.eos_token in tokens:
        return tokens[config.eos_token]
    special = [token["content"] for token in document["added_tokens"] if token["special"]]
    raise ConfigError(
        f"tokenizer.eos_token is {config.eos_token!r}, but {where} has no such token. "
        f"Its special tokens are: {', '.join(special[:12]) or 'none'}."
    )


def _bos_id(tokens: dict[str, int], document: dict[str, Any], where: str) -> int:
    """The begin token: what the file's own template puts first, else the one known name in the vocabulary."""
    template = _template_begin(document.get("post_processor"))
    names = [template] if template else [name for name in BEGIN_TOKENS if name in tokens]
    if len(names) != 1 or names[0] not in tokens:
        found = ", ".join(names) or "none"
        raise ConfigError(
            f"tokenizer.add_bos is set, but the begin token of {where} is not clear (candidates: {found}). "
            "Leave add_bos off, or give a tokenizer.json whose template adds it."
        )
    return tokens[names[0]]


def _template_begin(processor: dict[str, Any] | None) -> str | None:
    if processor is None:
        return None
    if processor["type"] == "Sequence":
        found = [_template_begin(inner) for inner in processor["processors"]]
        return next((name for name in found if name), None)
    if processor["type"] != "TemplateProcessing" or not processor["single"]:
        return None
    first = processor["single"][0].get("SpecialToken")
    return str(first["id"]) if first else None
