"""Which checkpoints of a run stay and which go: a decision about a history, without a look at any store.

What is never deleted, whatever the numbers say:
- the newest checkpoint that was read back whole, and everything newer than it;
- what somebody refers to: an export, a fork, the attempt that has just started from it;
- what the newest attempt may be writing.

Without a checkpoint that was read back whole no checkpoint is deleted. So at every instant, also between two deletions,
the next attempt starts from what it would have started from before.
"""

from dataclasses import dataclass, field

from training.checkpoint.config import CheckpointConfig
from training.run_spec import RestorePoint


@dataclass(frozen=True)
class Saved:
    """One committed checkpoint, on the attempt chain or beside it."""

    step: int
    attempt: int
    prefix: str
    """Storage key of its folder."""
    on_chain: bool
    damage: str | None = None
    """Why it cannot be used, as far as it was looked at."""
    whole: bool = False
    """Every byte of it was read back and is what its commit says."""
    set_aside_by: int | None = None
    """The attempt that found it damaged while loading it."""
    score: float | None = None
    """Bits per byte of the evaluation in the loop at this step."""
    num_bytes: int = 0


@dataclass(frozen=True)
class Leftover:
    """A folder that a save or a deletion left without a commit."""

    step: int
    attempt: int
    prefix: str
    num_bytes: int = 0


@dataclass(frozen=True)
class Reference:
    """Somebody counts on the checkpoint of this step; without an attempt, on whichever wrote it."""

    step: int
    attempt: int | None
    reason: str

    def means(self, saved: Saved) -> bool:
        """Whether it is this checkpoint."""
        return saved.step == self.step and self.attempt in (None, saved.attempt)


@dataclass(frozen=True)
class History:
    """What lies on the store below one run's `checkpoints/`, and who refers to it."""

    newest_attempt: int
    restore: RestorePoint | None
    """What the newest attempt started from."""
    not_after: int | None = None
    """The next attempt goes back to this step or before: the newest attempt has asked for that."""
    rewind_batches: int = 0
    """A later rewind may go back so many steps behind the step at hand."""
    saved: tuple[Saved, ...] = ()
    leftovers: tuple[Leftover, ...] = ()
    references: tuple[Reference, ...] = ()

    def may_start(self, saved: Saved) -> bool:
        """Whether the next attempt may start from it, as far as it was looked at."""
        return saved.on_chain and saved.damage is None and (self.not_after is None or saved.step <= self.not_after)


@dataclass(frozen=True)
class Verdict:
    """One folder, and why it stays or goes."""

    step: int
    attempt: int
    prefix: str
    reason: str
    num_bytes: int = 0


@dataclass(frozen=True)
class Plan:
    """What stays and what goes. The order of `delete` and `sweep` is that of the deletions."""

    newest_attempt: int
    """The plan holds as long as no newer attempt was claimed."""
    newest_whole: int | None
    """Step of the checkpoint that was read back."""
    keep: tuple[Verdict, ...] = field(default=())
    delete: tuple[Verdict, ...] = field(default=())
    """Committed checkpoints."""
    sweep: tuple[Verdict, ...] = field(default=())
    """Folders without a commit."""


def plan_retention(history: History, policy: CheckpointConfig) -> Plan:
    """Decide about every folder of the history."""
    usable = sorted((s for s in history.saved if history.may_start(s)), key=lambda s: s.step, reverse=True)
    newest_whole = next((saved for saved in usable if saved.whole), None)
    wanted = _wanted(history, usable, policy)
    keep, delete = [], []
    for saved in sorted(history.saved, key=lambda s: (s.on_chain, s.step, s.attempt)):
        reasons = wanted.get(saved.prefix, [])
        spared = reasons or _spared(saved, newest_whole)
        if spared:
            keep.append(_verdict(saved, "; ".join(spared)))
        else:
            delete.append(_verdict(saved, _why_it_goes(saved, policy)))
    sweep = [_verdict(left, _abandoned(history, left)) for left in history.leftovers if _abandoned(history, left)]
    return Plan(
        newest_attempt=history.newest_attempt,
        newest_whole=newest_whole.step if newest_whole else None,
        keep=tuple(sorted(keep, key=lambda verdict: (-verdict.step, -verdict.attempt))),
        delete=tuple(delete),
        sweep=tuple(sorted(sweep, key=lambda verdict: (verdict.step, verdict.attempt))),
    )


def _wanted(history: History, usable: list[Saved], policy: CheckpointConfig) -> dict[str, list[str]]:
    """Reasons to keep a checkpoint, by its folder."""
    wanted: dict[str, list[str]] = {}

    def want(saved: Saved, reason: str) -> None:
        wanted.setdefault(saved.prefix, []).append(reason)

    for saved in usable[: policy.keep_last]:
        want(saved, f"one of the newest {policy.keep_last}")
    for saved in usable:
        if policy.keep_every is not None and saved.step % policy.keep_every == 0:
            want(saved, f"a multiple of {policy.keep_every}")
    scored = [(saved.score, saved) for saved in usable if saved.score is not None]  # of equal ones the newest first
    for score, saved in sorted(scored, key=lambda pair: pair[0])[: policy.keep_best]:
        want(saved, f"one of the best {policy.keep_best}: {score:.4g} bits per byte")
    behind = [saved for saved in usable if saved.step <= usable[0].step - history.rewind_batches]
    for saved in behind[: 1 if history.rewind_batches else 0]:
        want(saved, f"a rewind of {history.rewind_batches} batches may go back to it")
    for reference in (*history.references, *_start(history, usable)):
        for saved in history.saved:
            if reference.means(saved):
                want(saved, reference.reason)
    return wanted


def _start(history: History, usable: list[Saved]) -> list[Reference]:
    """What the newest attempt started from: its ranks may still be reading it until they have committed themselves."""
    if history.restore is None or any(saved.attempt == history.newest_attempt for saved in usable):
        return []
    reason = f"attempt {history.newest_attempt} starts from it"
    return [Reference(history.restore.step, history.restore.attempt, reason)]


def _spared(saved: Saved, newest_whole: Saved | None) -> list[str]:
    """Why a checkpoint that nobody wants stays all the same."""
    if newest_whole is None:
        return ["no checkpoint of the run could be read back whole"]
    if saved.on_chain and saved.step >= newest_whole.step:
        return ["newer than the newest one that could be read back whole"]
    # The rule of attempts without progress counts back to the attempt that wrote the newest good checkpoint, and goes
    # by what later attempts left: a commit, or a checkpoint that they set aside.
    if max(saved.attempt, saved.set_aside_by or 0) > newest_whole.attempt:
        return [f"shows what an attempt after attempt {newest_whole.attempt} did"]
    return []


def _why_it_goes(saved: Saved, policy: CheckpointConfig) -> str:
    if not saved.on_chain:
        return "a later attempt went back behind it"
    if saved.damage is not None:
        return f"damaged, and there are newer ones: {saved.damage}"
    return f"{policy.keep_last} newer ones are kept"


def _abandoned(history: History, left: Leftover) -> str:
    """Why nobody writes into this folder any more; nothing when somebody may."""
    if left.attempt < history.newest_attempt:
        return f"without a commit, and attempt {left.attempt} has ended"
    newest = max((saved.step for saved in history.saved if saved.attempt == left.attempt), default=-1)
    if left.attempt == history.newest_attempt and left.step < newest:
        return f"without a commit, and its attempt has committed step {newest} since"  # it saves one step at a time
    return ""


def _verdict(folder: Saved | Leftover, reason: str) -> Verdict:
    return Verdict(folder.step, folder.attempt, folder.prefix, reason, folder.num_bytes)
