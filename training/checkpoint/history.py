"""The history of a run's checkpoints as it lies on the store: what retention decides about."""

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.commit import read_commit
from headrace.errors import DamagedData, NotFound
from headrace.events import read_events
from headrace.storage import Storage
from training.checkpoint.catalog import (
    COMMIT_NAME,
    DAMAGED_NAME,
    Checkpoint,
    folder_of,
    require_same_run,
    verified,
)
from training.checkpoint.retention import History, Leftover, Reference, Saved
from training.checkpoint.verify import inspect
from training.export.spec import COMMIT_KIND as EXPORT_KIND
from training.health.rewind import read_rewind
from training.launch.attempts import chain, is_on_chain, read_attempts
from training.run_spec import RunSpec

logger = logging.getLogger(__name__)

_RUN_ID = re.compile(r"[0-9a-f]{32}")
_FORK = re.compile(r"run:([0-9a-f]{32})@(\d+)")


@dataclass
class Memory:
    """What one process has seen of objects that never change, so that it does not ask for them again."""

    looked_at: dict[str, tuple[dict[str, int], str | None]] = field(default_factory=dict)
    """Sizes of a checkpoint's files when it was looked at, and the damage that was found; by folder."""
    read_whole: dict[str, tuple[dict[str, int], str | None]] = field(default_factory=dict)
    """The same of checkpoints whose content was read."""
    origins: dict[str, str | None] = field(default_factory=dict)
    """`training.init_from` of each run."""
    exports: dict[str, Reference] = field(default_factory=dict)
    """What each finished export was made from, by the key that names it."""


def read_history(
    storage: Storage,
    run: RunSpec,
    *,
    scores: bool,
    memory: Memory | None = None,
    on_bytes: Callable[[int], None] = lambda _: None,
) -> History:
    """Look at everything below the run's `checkpoints/`, and read the newest usable checkpoint back.

    `scores` adds what the evaluations in the loop measured. `on_bytes` is told of the bytes that are read back, and may
    raise to stop. Raises DamagedData when the attempts or another run's document cannot be read, and InputError for a
    checkpoint of another run: then nothing may be decided.
    """
    memory = memory or Memory()
    attempts = read_attempts(storage, run.run_prefix)  # before the listing: a newer attempt's folders are then not ours
    links = chain(attempts)
    newest = max((record.attempt for record in attempts), default=0)
    rewind = read_rewind(storage, run.run_prefix, newest) if newest else None
    history = History(
        newest_attempt=newest,
        restore=next((record.restore for record in attempts if record.attempt == newest), None),
        not_after=rewind.last_good_step if rewind else None,
        rewind_batches=run.stability.rewind_batches,
        references=references_to(storage, run.run_prefix, run.run_id, memory),
    )
    measured = _scores(storage, run, newest) if scores else {}
    saved: list[Saved] = []
    leftovers: list[Leftover] = []
    for (step, attempt, prefix), sizes in folders_of(storage, run.run_prefix).items():
        num_bytes = sum(sizes.values())
        if f"{prefix}/{COMMIT_NAME}" not in sizes:
            leftovers.append(Leftover(step, attempt, prefix, num_bytes))
            continue
        on_chain = is_on_chain(links, attempt=attempt, step=step)
        found = Saved(
            step=step,
            attempt=attempt,
            prefix=prefix,
            on_chain=on_chain,
            damage=_damage(storage, run, (step, attempt, prefix), sizes, memory) if on_chain else None,
            set_aside_by=_set_aside_by(storage, prefix, sizes),
            score=measured.get((attempt, step)),
            num_bytes=num_bytes,
        )
        if history.may_start(found) and not any(newer.whole for newer in saved):
            found = _read_back(storage, found, sizes, memory, on_bytes)
        saved.append(found)
    return replace(history, saved=tuple(saved), leftovers=tuple(leftovers))


def references_to(
    storage: Storage, run_prefix: str, run_id: str, memory: Memory | None = None
) -> tuple[Reference, ...]:
    """Who counts on which checkpoint of a run; raises DamagedData when that cannot be read."""
    memory = memory or Memory()
    return (*_exports(storage, run_prefix, memory), *_forks(storage, run_id, memory))


def folders_of(storage: Storage, run_prefix: str) -> dict[tuple[int, int, str], dict[str, int]]:
    """Sizes of the files of every checkpoint's folder, newest step first; other keys below are not ours."""
    folders: dict[tuple[int, int, str], dict[str, int]] = {}
    for key, size in storage.sizes(f"{run_prefix}/checkpoints").items():
        folder = folder_of(key)
        if folder is not None:
            folders.setdefault(folder, {})[key] = size
    return dict(sorted(folders.items(), reverse=True))


def _damage(
    storage: Storage, run: RunSpec, folder: tuple[int, int, str], sizes: dict[str, int], memory: Memory
) -> str | None:
    prefix = folder[2]
    known = memory.looked_at.get(prefix)
    if known is None or known[0] != sizes:
        known = memory.looked_at[prefix] = (sizes, _look(storage, run, *folder))
    return known[1]


def _look(storage: Storage, run: RunSpec, step: int, attempt: int, prefix: str) -> str | None:
    try:
        checkpoint: Checkpoint = verified(storage, step, attempt, prefix)
    except DamagedData as error:
        return str(error)
    require_same_run(run, checkpoint)
    return None


def _read_back(
    storage: Storage, saved: Saved, sizes: dict[str, int], memory: Memory, on_bytes: Callable[[int], None]
) -> Saved:
    """The checkpoint with every byte looked at."""
    known = memory.read_whole.get(saved.prefix)
    if known is None or known[0] != sizes:
        found = inspect(storage, saved.prefix, step=saved.step, attempt=saved.attempt, content=True, on_bytes=on_bytes)
        damage = f"{found.damage[0].file}: {found.damage[0].reason}" if found.damage else None
        known = memory.read_whole[saved.prefix] = (sizes, damage)
    if known[1] is not None:
        logger.warning("The checkpoint of step %d is damaged (%s); older ones are kept.", saved.step, known[1])
    return replace(saved, damage=known[1], whole=known[1] is None)


def _set_aside_by(storage: Storage, prefix: str, sizes: dict[str, int]) -> int | None:
    if f"{prefix}/{DAMAGED_NAME}" not in sizes:
        return None
    return int(_field(storage, f"{prefix}/{DAMAGED_NAME}", "found_by_attempt"))


def _scores(storage: Storage, run: RunSpec, newest_attempt: int) -> dict[tuple[int, int], float]:
    """Bits per byte in the loop, by attempt and step."""
    scores = {}
    for attempt in range(1, newest_attempt + 1):
        for event in read_events(storage, run.run_prefix, attempt):
            score: Any = event.get("bits_per_byte")
            if event["kind"] == "evaluation" and isinstance(score, float):  # one that is not finite is a text
                scores[attempt, int(event["step"])] = score
    return scores


def _exports(storage: Storage, run_prefix: str, memory: Memory) -> list[Reference]:
    """What exports were made from; registered versions refer to exports, and outlive the run's own checkpoints."""
    found = []
    for name in storage.children(f"{run_prefix}/exports"):
        key = f"{run_prefix}/exports/{name}"
        if key not in memory.exports:
            commit = read_commit(storage, str(_field(storage, key, "prefix")), kind=EXPORT_KIND)
            if commit is None:
                continue  # being made, from the newest checkpoint of a finished run, which stays anyway
            attempt = commit.body.get("attempt")
            memory.exports[key] = Reference(
                step=int(commit.body["step"]),
                attempt=int(attempt) if attempt is not None else None,
                reason=f"exported as model {_field(storage, key, 'model_id')}",
            )
        found.append(memory.exports[key])
    return found


def _forks(storage: Storage, run_id: str, memory: Memory) -> list[Reference]:
    """Runs on this store that start from a checkpoint of this one."""
    found = []
    for other in storage.children("runs"):
        if not _RUN_ID.fullmatch(other):
            continue
        match = _FORK.fullmatch(_origin(storage, other, memory) or "")
        if match and match[1] == run_id:
            found.append(Reference(step=int(match[2]), attempt=None, reason=f"run {other} starts from it"))
    return found


def _origin(storage: Storage, run_id: str, memory: Memory) -> str | None:
    if run_id not in memory.origins:
        try:
            training = _field(storage, f"runs/{run_id}/artifacts/run.json", "training")
        except NotFound:
            return None  # not written yet
        memory.origins[run_id] = training.get("init_from")
    return memory.origins[run_id]


def _field(storage: Storage, key: str, name: str) -> Any:
    """One field of a stored document; raises DamagedData when it has none, as deleting needs to know for sure."""
    document = storage.read_json(key)
    if not isinstance(document, dict) or name not in document:
        raise DamagedData(f"{storage.url(key)} has no field {name!r}; it was changed, or is of another version.")
    return document[name]
