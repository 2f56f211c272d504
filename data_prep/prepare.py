"""Prepare a dataset: from inputs to a committed manifest.

    discover -> group and hash -> choose the split -> pin the tokenizer -> plan units -> build the missing -> manifest

Every step is a function of content and config, so `prepare` can be stopped anywhere and called again: what is
committed is found and kept. Two calls for the same dataset at the same time share the work by a lease; without it they
would only do the same work twice.
"""

import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from data_prep.config import DataConfig, TokenizerConfig
from data_prep.plan import Group, Layout, UnitPlan, group, plan_units
from data_prep.sample import sample_texts
from data_prep.sources import discover
from data_prep.split import choose_split, empty_corpus
from data_prep.token_bytes import token_bytes
from data_prep.tokenizers import (
    PinnedTokenizer,
    find_trained,
    load_json,
    pin_given,
    train,
)
from data_prep.units import KIND as UNIT_KIND
from data_prep.units import SPLITS, Counts, DatasetCounts, UnitProgress, unit_prefix
from data_prep.workers import build_units
from headrace.commit import Commit, check_files, read_commit, write_commit
from headrace.digest import digest_json, sha256_bytes, short
from headrace.errors import DamagedData, InputError
from headrace.lease import LeaseHolder, hold
from headrace.process import machine_id, pid_alive
from headrace.storage import Storage

logger = logging.getLogger(__name__)

KIND = "dataset"
MANIFEST = "manifest.json"
REQUESTS = 16
"""Requests to the store at the same time: each unit needs two or three, and object stores answer slowly."""


@dataclass(frozen=True)
class PrepareProgress:
    """What `prepare` is doing; counts are of this call, without reused units."""

    stage: str
    """`hash`, `tokenizer`, `units` or `done`."""
    units_done: int = 0
    units_total: int = 0
    """Units that this call builds."""
    units_reused: int = 0
    documents: int = 0
    tokens: int = 0
    text_bytes: int = 0
    bytes_total: int = 0
    """Bytes of input of the units that this call builds."""
    note: str = ""
    """A sentence for people when something is worth saying."""


@dataclass(frozen=True)
class PrepareResult:
    """The dataset that now lies on the store, and what it took."""

    dataset_key: str
    digest: str
    """Digest of the manifest: what a run depends on."""
    tokenizer_key: str
    tokenizer_digest: str
    vocab_size: int
    counts: DatasetCounts
    units_built: int
    units_reused: int
    tokenizer_trained: bool


Progress = Callable[[PrepareProgress], None]


def prepare(
    storage: Storage,
    data: DataConfig,
    tokenizer: TokenizerConfig,
    *,
    work_dir: Path,
    progress: Progress | None = None,
    layout: Layout | None = None,
) -> PrepareResult:
    """Turn the inputs of `data` into a committed dataset, or find the one that is there.

    `work_dir` holds scratch files. Raises InputError for refused input, ConfigError for a tokenizer without the asked
    end token, StorageFull, StorageUnavailable, and Retryable when a process was killed.
    """
    return _Preparation(storage, data, tokenizer, work_dir, progress or _ignore, layout or Layout()).run()


def _ignore(progress: PrepareProgress) -> None:
    """Stand in for a caller that does not watch."""


@dataclass
class _Preparation:
    storage: Storage
    data: DataConfig
    tokenizer: TokenizerConfig
    work_dir: Path
    progress: Progress
    layout: Layout
    built: int = 0
    trained: bool = False
    commits: dict[str, Commit] = field(default_factory=dict)
    """Units known to be complete, by key."""

    def run(self) -> PrepareResult:
        self.progress(PrepareProgress("hash"))
        groups = group(discover(self.data.inputs), self.data)
        pieces = [piece for entry in groups for piece in entry.pieces]
        split = choose_split(pieces, self.data.validation_fraction, self.data.on_error)
        pinned = self._pinned()
        if pinned is not None:
            units = plan_units(groups, self.data, pinned, split, self.layout)
            if not self._missing(units):
                return self._finish(units, pinned)
        with hold(self.storage, self._lease_key(), on_wait=self._say_wait):
            pinned = self._pinned() or self._train(groups)
            units = plan_units(groups, self.data, pinned, split, self.layout)
            missing = self._missing(units)
            self._remove_abandoned(missing)
            self._build(missing, pinned)
            return self._finish(units, pinned)

    def _pinned(self) -> PinnedTokenizer | None:
        if self.tokenizer.path is not None:
            return pin_given(self.storage, self.tokenizer)
        return find_trained(self.storage, self.data.name, self.tokenizer)

    def _train(self, groups: Iterable[Group]) -> PinnedTokenizer:
        self.progress(PrepareProgress("tokenizer"))
        pieces = [piece for entry in groups for piece in entry.pieces]
        self.trained = True
        sample = sample_texts(pieces, self.tokenizer.sample_bytes)
        return train(self.storage, self.data.name, self.tokenizer, sample)

    def _missing(self, units: list[UnitPlan]) -> list[UnitPlan]:
        """The units that are not complete on the store, each once."""
        unknown = {unit.key: unit for unit in units if unit.key not in self.commits}
        with ThreadPoolExecutor(max_workers=REQUESTS) as pool:
            found = pool.map(self._find, unknown.values())
            return [unit for unit, there in zip(unknown.values(), found, strict=True) if not there]

    def _find(self, unit: UnitPlan) -> bool:
        prefix = unit_prefix(unit.key)
        commit = read_commit(self.storage, prefix, kind=UNIT_KIND)
        if commit is None:
            return False
        try:
            check_files(self.storage, prefix, commit, content=False)
        except DamagedData as error:
            logger.warning("%s The unit is built again.", error)
            return False
        self.commits[unit.key] = commit
        return True

    def _remove_abandoned(self, missing: list[UnitPlan]) -> None:
        """Free what killed processes of this machine left where this call writes."""
        for prefix in ("datasets", "leases", "tokenizers", *(unit_prefix(unit.key) for unit in missing)):
            self.storage.remove_abandoned(prefix)

    def _build(self, missing: list[UnitPlan], pinned: PinnedTokenizer) -> None:
        scratch = _scratch_folder(self.work_dir)
        tracker = _Tracker(self.progress, missing, reused=len(self.commits))
        try:
            build_units(
                self.storage,
                missing,
                pinned,
                scratch=scratch,
                processes=self.data.processes,
                report=tracker.report,
            )
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        self.built = len(missing)

    def _finish(self, units: list[UnitPlan], pinned: PinnedTokenizer) -> PrepareResult:
        if self._missing(units):
            raise DamagedData("Units that were committed are gone again. Is another program changing the store?")
        counts = _total([self.commits[unit.key] for unit in units])
        _check_splits(counts, units, self.data)
        body = self._manifest(units, pinned, counts)
        dataset_key = f"{self.data.name}-{body['fingerprint'][:16]}"
        commit = write_commit(self.storage, f"datasets/{dataset_key}", kind=KIND, body=body, files={}, name=MANIFEST)
        result = PrepareResult(
            dataset_key=dataset_key,
            digest=commit.digest,
            tokenizer_key=pinned.key,
            tokenizer_digest=pinned.digest,
            vocab_size=pinned.vocab_size,
            counts=counts,
            units_built=self.built,
            units_reused=len(units) - self.built,
            tokenizer_trained=self.trained,
        )
        self.progress(PrepareProgress("done", units_total=self.built, units_done=self.built))
        return result

    def _manifest(self, units: list[UnitPlan], pinned: PinnedTokenizer, counts: DatasetCounts) -> dict[str, Any]:
        plan = {"num_buckets": self.data.num_buckets, "range_bytes": self.data.range_bytes}
        table = token_bytes(load_json(self.storage, pinned.key), pinned.control_ids)
        decisive = {"units": [unit.key for unit in units], "plan": plan, "tokenizer": pinned.key}
        return {
            "name": self.data.name,
            "fingerprint": digest_json(decisive),
            "tokenizer": {
                "key": pinned.key,
                "digest": pinned.digest,
                "vocab_size": pinned.vocab_size,
                "eos_id": pinned.eos_id,
                "bos_id": pinned.bos_id,
            },
            "dtype": pinned.dtype,
            "units": [self._unit_line(unit) for unit in units],
            "totals": {split: asdict(entry) for split, entry in counts.splits.items()},
            "skipped": counts.skipped,
            "plan": plan,
            "validation_fraction": self.data.validation_fraction,
            "token_bytes_digest": sha256_bytes(table.astype("<i4").tobytes()),
        }

    def _unit_line(self, unit: UnitPlan) -> dict[str, Any]:
        commit = self.commits[unit.key]
        return {"key": unit.key, "digest": commit.digest, **commit.body["counts"]}

    def _lease_key(self) -> str:
        document = {
            "data": self.data.model_dump(mode="json", exclude={"processes"}),
            "tokenizer": self.tokenizer.model_dump(mode="json"),
        }
        return f"leases/prepare-{short(digest_json(document), 32)}"

    def _say_wait(self, holder: LeaseHolder) -> None:
        note = f"Process {holder.pid} on {holder.host} is preparing this dataset; waiting for it."
        self.progress(PrepareProgress("units", note=note))


class _Tracker:
    """Adds up what the units report."""

    def __init__(self, progress: Progress, units: list[UnitPlan], reused: int) -> None:
        self._progress = progress
        self._reused = reused
        self._total = len(units)
        self._bytes = sum(piece.size for unit in units for piece in unit.pieces)
        self._done = 0
        self._latest: dict[str, UnitProgress] = {}
        self._sum = UnitProgress()
        self._tell()

    def report(self, unit: UnitPlan, progress: UnitProgress, done: bool) -> None:
        if done:
            self._done += 1
        else:
            before = self._latest.get(unit.key, UnitProgress())
            self._latest[unit.key] = replace(progress)
            self._sum.documents += progress.documents - before.documents
            self._sum.tokens += progress.tokens - before.tokens
            self._sum.text_bytes += progress.text_bytes - before.text_bytes
        self._tell()

    def _tell(self) -> None:
        self._progress(
            PrepareProgress(
                "units",
                units_done=self._done,
                units_total=self._total,
                units_reused=self._reused,
                documents=self._sum.documents,
                tokens=self._sum.tokens,
                text_bytes=self._sum.text_bytes,
                bytes_total=self._bytes,
            )
        )


def _total(commits: Iterable[Commit]) -> DatasetCounts:
    splits = {split: Counts() for split in SPLITS}
    skipped: Counter[str] = Counter()
    for commit in commits:
        for split in SPLITS:
            splits[split].add(Counts(**commit.body["counts"][split]))
        skipped.update(commit.body["skipped"])
    return DatasetCounts(splits, dict(sorted(skipped.items())))


def _check_splits(counts: DatasetCounts, units: list[UnitPlan], data: DataConfig) -> None:
    if counts.documents == 0:
        raise InputError(empty_corpus(piece for unit in units for piece in unit.pieces))
    for split in SPLITS:
        if counts.splits[split].documents == 0:
            direction = "larger" if split == "validation" else "smaller"
            raise InputError(
                f"None of the {counts.documents:,} documents fell into the {split} split with "
                f"data.validation_fraction={data.validation_fraction}. Give a {direction} fraction or more documents."
            )


def _scratch_folder(work_dir: Path) -> Path:
    """Make a scratch folder of this call, and remove those of processes of this machine that were killed."""
    # Process ids mean something only to the machine (or container) that gave them.
    own = f"prepare-{short(sha256_bytes(machine_id().encode()))}"
    work_dir.mkdir(parents=True, exist_ok=True)
    for old in work_dir.glob(f"{own}-*"):
        pid = int(old.name.split("-")[2])
        if not pid_alive(pid):
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"{own}-{os.getpid()}-", dir=work_dir))
