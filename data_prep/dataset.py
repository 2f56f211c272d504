"""A committed dataset: its manifest, its token streams, its tokenizer."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from data_prep.prepare import KIND, MANIFEST, REQUESTS, PrepareProgress, PrepareResult, prepare
from data_prep.shards import BlockEntry
from data_prep.stream import CACHE_BYTES, ShardFiles, StreamBlock, TokenStream
from data_prep.token_bytes import token_bytes
from data_prep.tokenizers import load_json
from data_prep.units import KIND as UNIT_KIND
from data_prep.units import SPLITS, Counts, DatasetCounts, unit_prefix
from headrace.commit import Commit, read_commit
from headrace.errors import DamagedData, NotFound
from headrace.storage import Storage

__all__ = ["Dataset", "DatasetCounts", "PrepareProgress", "PrepareResult", "open_dataset", "prepare"]


@dataclass(frozen=True)
class Dataset:
    """A committed dataset."""

    storage: Storage
    key: str
    manifest: Commit

    @property
    def digest(self) -> str:
        """Digest of the manifest."""
        return self.manifest.digest

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return int(self.manifest.body["tokenizer"]["vocab_size"])

    @property
    def eos_id(self) -> int:
        """The token that ends every document."""
        return int(self.manifest.body["tokenizer"]["eos_id"])

    @property
    def bos_id(self) -> int | None:
        """The token that begins every document, or None."""
        bos_id: int | None = self.manifest.body["tokenizer"]["bos_id"]
        return bos_id

    @property
    def tokenizer_digest(self) -> str:
        """SHA-256 of the tokenizer.json."""
        return str(self.manifest.body["tokenizer"]["digest"])

    @property
    def counts(self) -> DatasetCounts:
        """What the dataset holds."""
        body = self.manifest.body
        return DatasetCounts({split: Counts(**body["totals"][split]) for split in SPLITS}, body["skipped"])

    def stream(self, split: str, cache_dir: Path, *, cache_bytes: int = CACHE_BYTES) -> TokenStream:
        """Return the tokens of `train` or `validation`.

        `cache_dir` takes copies of tars, up to `cache_bytes`, when the store is not a folder. Raises DamagedData when
        a unit of the manifest is missing or is not the one that was committed.
        """
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        blocks: list[StreamBlock] = []
        files = {}
        prefixes = [unit_prefix(line["key"]) for line in self.manifest.body["units"]]
        digests = [line["digest"] for line in self.manifest.body["units"]]
        with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
            commits = list(pool.map(self._unit, prefixes, digests))
        for prefix, commit in zip(prefixes, commits, strict=True):
            files.update({f"{prefix}/{name}": entry for name, entry in commit.files.items()})
            blocks.extend(StreamBlock(prefix, BlockEntry(**entry)) for entry in commit.body["blocks"][split])
        return TokenStream(ShardFiles(self.storage, files, cache_dir, cache_bytes), blocks, self.manifest.body["dtype"])

    def tokenizer_json(self) -> bytes:
        """Return the tokenizer.json. Raises DamagedData when it is not the one that the dataset was made with."""
        return load_json(self.storage, self.manifest.body["tokenizer"]["key"])

    def token_bytes(self) -> npt.NDArray[np.int32]:
        """Return int32[vocab_size]: UTF-8 bytes of text that each token stands for, 0 for special tokens."""
        control = [self.eos_id] if self.bos_id is None else [self.eos_id, self.bos_id]
        return token_bytes(self.tokenizer_json(), control)

    def _unit(self, prefix: str, digest: str) -> Commit:
        commit = read_commit(self.storage, prefix, kind=UNIT_KIND)
        if commit is None or commit.digest != digest:
            found = "is missing" if commit is None else "is not the one that the dataset was made of"
            raise DamagedData(f"The unit {self.storage.url(prefix)} {found}. Prepare the dataset again.")
        return commit


def open_dataset(storage: Storage, dataset_key: str) -> Dataset:
    """Return the dataset whose manifest lies under `dataset_key`. Raises NotFound, or DamagedData."""
    manifest = read_commit(storage, f"datasets/{dataset_key}", kind=KIND, name=MANIFEST)
    if manifest is None:
        raise NotFound(f"There is no dataset {dataset_key!r} on {storage.url()}.")
    return Dataset(storage, dataset_key, manifest)
