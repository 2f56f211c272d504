"""Deleting checkpoints: over any history, and wherever the process is killed, nothing that counts is lost."""

import itertools
import random
import shutil
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.commit import FileEntry, write_commit
from headrace.errors import DamagedData, InputError, StorageUnavailable, Terminal
from headrace.events import EventWriter
from headrace.storage import Storage
from tests.headrace.conftest import s3_root, s3_server  # noqa: F401 - fixtures
from tests.training.checkpoint.saved import plan_faults
from tests.training.checkpoint.test_catalog import commit
from tests.training.launch.test_attempts import record
from tests.training.toy import run_spec
from training.checkpoint.catalog import (
    checkpoint_prefix,
    choose_restore,
    committed_on_chain,
    list_commits,
    quarantine,
)
from training.checkpoint.garbage import carry_out, look
from training.checkpoint.history import Memory
from training.checkpoint.keeper import Keeper
from training.checkpoint.verify import inspect
from training.health.rewind import RewindRequest, write_rewind
from training.launch.attempts import claim_attempt, newest_attempt
from training.launch.resume import attempts_without_progress

RUN = run_spec(training={"steps": 10_000}, checkpoint={"keep_last": 2}, stability={"rewind_batches": 1})
POLICY = RUN.checkpoint
COUNTER = itertools.count()


def claim(storage, attempt, restore=None):
    assert claim_attempt(storage, RUN.run_prefix, record(attempt, restore))


def folder(attempt, step):
    return checkpoint_prefix(RUN.run_prefix, step=step, attempt=attempt)


def short(prefix):
    """attempt/step of a folder."""
    step, attempt = prefix.split("/")[-2:]
    return f"{int(attempt.removeprefix('attempt-'))}/{int(step.removeprefix('step-'))}"


def export(storage, attempt, step, model="m-1"):
    """A finished export of a checkpoint."""
    prefix = f"runs/models/{model}/artifacts"
    body = {"run_id": RUN.run_id, "step": step, "attempt": attempt}
    storage.write_bytes(f"{prefix}/w", b"w")
    write_commit(storage, prefix, kind="export", body=body, files={"w": FileEntry.of_bytes(b"w")})
    storage.write_json(f"{RUN.run_prefix}/exports/{model}.json", {"model_id": model, "prefix": prefix})


def fork(storage, step, run_id="f" * 32):
    """Another run that starts from a checkpoint of this one."""
    other = run_spec(run_id=run_id, training={"init_from": f"run:{RUN.run_id}@{step}"})
    storage.write_json(f"{other.run_prefix}/run.json", other.model_dump(mode="json"))


def collect(storage, policy=POLICY, **options):
    return carry_out(storage, RUN, look(storage, RUN, policy), **options)


def steps(storage):
    return [(c.attempt, c.step) for c in list_commits(storage, RUN.run_prefix)]


@pytest.fixture(params=["file", "memory", "s3"])
def storage(request, tmp_path):
    if request.param == "s3":
        return Storage.open(request.getfixturevalue("s3_root"))
    return Storage.open(tmp_path / "store" if request.param == "file" else f"memory://garbage-{next(COUNTER)}")


@pytest.fixture
def five(storage):
    """One attempt with commits of five steps."""
    claim(storage, 1)
    for step in range(10, 60, 10):
        commit(storage, 1, step)
    return storage


def test_old_checkpoints_are_gone_with_all_their_files(five):
    found = look(five, RUN, POLICY)
    assert steps(five) == [(1, 50), (1, 40), (1, 30), (1, 20), (1, 10)], "a look changes nothing"
    done = carry_out(five, RUN, found)
    assert done.complete
    assert [short(prefix) for prefix in done.deleted] == ["1/10", "1/20", "1/30"]
    assert steps(five) == [(1, 50), (1, 40)]
    left = five.list(f"{RUN.run_prefix}/checkpoints")
    assert {key.rpartition("/")[0] for key in left} == {folder(1, 50), folder(1, 40)}
    root = five.local_path(f"{RUN.run_prefix}/checkpoints")
    assert root is None or sorted(path.name for path in root.iterdir()) == ["step-00000040", "step-00000050"]


def test_sizes_are_told(five):
    found = look(five, RUN, POLICY)
    going = [folder(1, step) for step in (10, 20, 30)]
    assert found.num_bytes == sum(five.size(key) for prefix in going for key in five.list(prefix))


def test_exports_forks_and_the_best_stay(five, tmp_path):
    export(five, 1, 10)
    fork(five, 20)
    with EventWriter(tmp_path / "events.jsonl", 1) as events:
        for step, score in ((10, 2.0), (20, float("nan")), (30, 1.5), (40, 3.0)):
            events.append("evaluation", step=step, bits_per_byte=score)
        events.publish(five, RUN.run_prefix)
    plan = look(five, RUN, POLICY.model_copy(update={"keep_best": 1})).plan
    assert {short(v.prefix): v.reason for v in plan.keep if v.step < 40} == {
        "1/10": "exported as model m-1",
        "1/20": f"run {'f' * 32} starts from it",
        "1/30": "one of the best 1: 1.5 bits per byte",
    }
    collect(five)
    assert steps(five) == [(1, 50), (1, 40), (1, 20), (1, 10)]


def test_an_export_that_is_being_made_is_no_reason_yet(five):
    five.write_json(f"{RUN.run_prefix}/exports/k.json", {"model_id": "m-2", "prefix": "runs/models/m-2/artifacts"})
    collect(five)
    assert steps(five) == [(1, 50), (1, 40)]


def test_forks_of_other_runs_and_folders_of_models_are_no_reason(five):
    other = run_spec(run_id="e" * 32, training={"init_from": f"run:{'d' * 32}@10"})
    five.write_json(f"{other.run_prefix}/run.json", other.model_dump(mode="json"))
    five.write_json("runs/models/m-1/artifacts/run.json", {"training": {"init_from": f"run:{RUN.run_id}@10"}})
    five.write_bytes(f"runs/{'c' * 32}/artifacts/attempts/0001.json", b"{}")
    collect(five)
    assert steps(five) == [(1, 50), (1, 40)]


@pytest.mark.parametrize("document", [b"{", b'{"training": {"init_from": "run:'])
def test_a_run_whose_document_cannot_be_read_may_be_a_fork(five, document):
    five.write_bytes(f"runs/{'c' * 32}/artifacts/run.json", document)
    with pytest.raises(DamagedData, match=r"run\.json"):
        look(five, RUN, POLICY)


@pytest.mark.parametrize(
    "key", [f"{RUN.run_prefix}/exports/k.json", f"{folder(1, 20)}/DAMAGED.json", f"runs/{'c' * 32}/artifacts/run.json"]
)
def test_a_document_without_what_it_should_say_stops_everything(five, key):
    five.write_json(key, {"other": 1})
    with pytest.raises(DamagedData, match="has no field"):
        look(five, RUN, POLICY)


def test_a_fork_never_touches_its_source(storage):
    claim(storage, 1)
    for step in (10, 20, 30):
        commit(storage, 1, step)
    origin = {"init_from": f"run:{RUN.run_id}@10"}
    forked = run_spec(run_id="f" * 32, training=origin, stability={"rewind_batches": 1})
    storage.write_json(f"{forked.run_prefix}/run.json", forked.model_dump(mode="json"))
    assert claim_attempt(storage, forked.run_prefix, record(1))
    for step in (10, 20, 30):
        prefix = checkpoint_prefix(forked.run_prefix, step=step, attempt=1)
        commit(storage, 1, step, run=forked, prefix=prefix)
    source = storage.sizes(RUN.run_prefix)
    carry_out(storage, forked, look(storage, forked, POLICY))
    assert [c.step for c in list_commits(storage, forked.run_prefix)] == [30, 20]
    assert storage.sizes(RUN.run_prefix) == source


def test_a_foreign_checkpoint_stops_everything(five):
    commit(five, 1, 60, run=run_spec(run_key="other"))
    with pytest.raises(InputError, match="belongs to another run"):
        look(five, RUN, POLICY)


def test_the_newest_one_is_read_back_and_when_damaged_another_takes_its_place(five):
    five.write_bytes(f"{folder(1, 50)}/rank-0000.bin", b"1/59")  # the size is right
    plan = look(five, RUN, POLICY).plan
    assert plan.newest_whole == 40
    assert [short(v.prefix) for v in plan.keep] == ["1/50", "1/40", "1/30"]
    for step in (10, 20, 30, 40):
        five.write_bytes(f"{folder(1, step)}/rank-0000.bin", b"9/99")
    found = look(five, RUN, POLICY)
    assert (found.plan.newest_whole, found.plan.delete) == (None, ())


def test_what_was_read_back_once_is_not_read_again(five, monkeypatch):
    read = []
    memory = Memory()
    for _ in range(2):
        look(five, RUN, POLICY, memory=memory, on_bytes=read.append)
    assert read == [4]
    commit(five, 1, 60)
    look(five, RUN, POLICY, memory=memory, on_bytes=read.append)
    assert read == [4, 4]


def test_what_a_rewind_goes_back_to_is_read_back_and_counted(five):
    skip = {"start": 320, "stop": 440}
    request = RewindRequest(attempt=1, step=55, reason="a spike", last_good_step=40, skip=skip)
    write_rewind(five, RUN.run_prefix, request)
    plan = look(five, RUN, POLICY).plan
    assert plan.newest_whole == 40
    assert [short(v.prefix) for v in plan.keep] == ["1/50", "1/40", "1/30"]
    claim(five, 2, (1, 40))
    assert [short(v.prefix) for v in look(five, RUN, POLICY).plan.delete] == ["1/50", "1/10", "1/20"]


def test_names_that_are_not_ours_are_left_alone(five):
    notes = [f"{RUN.run_prefix}/checkpoints/{name}" for name in ("notes.txt", "step-00000010/x.txt", "newest/a/b")]
    for key in notes:
        five.write_bytes(key, b"x")
    collect(five)
    assert set(notes) <= set(five.list(f"{RUN.run_prefix}/checkpoints"))


def test_a_newer_attempt_ends_the_deletions(five):
    found = look(five, RUN, POLICY)
    claim(five, 2, (1, 20))
    done = carry_out(five, RUN, found)
    assert (done.complete, done.deleted) == (False, ())
    assert [step for _, step in steps(five)] == [20, 10]


def test_unfinished_uploads_of_fenced_attempts_are_removed(s3_root, tmp_path):  # noqa: F811 - the fixture
    storage = Storage.open(s3_root)
    claim(storage, 1)
    claim(storage, 2)
    client = storage._store._client  # the shortest way to an upload that nobody ends
    bucket, _, prefix = s3_root.removeprefix("s3://").partition("/")
    keys = [f"{folder(attempt, 10)}/rank-0000.bin" for attempt in (1, 2)]
    for key in keys:
        client.run("_call_s3", "create_multipart_upload", size=0, Bucket=bucket, Key=f"{prefix}/{key}")
    found = look(storage, RUN, POLICY)
    assert found.uploads == (keys[0],)
    assert look(storage, RUN, POLICY).uploads == found.uploads, "a look removes nothing"
    carry_out(storage, RUN, found)
    assert look(storage, RUN, POLICY).uploads == ()
    left = []
    storage.abort_uploads(f"{RUN.run_prefix}/checkpoints", lambda key: left.append(key) or False)
    assert left == [keys[1]], "the newest attempt may be writing"


# ------------------------------------------------------------------------------------------------- at named points


@pytest.mark.parametrize(
    ("point", "left"),
    [
        ("retention.before", [50, 40, 30, 20, 10]),
        ("retention.commit_deleted", [50, 40, 30, 20]),
        ("retention.after", [50, 40]),
    ],
)
def test_ended_at_a_named_point_the_next_look_does_the_rest(five, tmp_path, monkeypatch, point, left):
    fault = {"point": point, "action": "raise", "error": "StorageUnavailable"}
    monkeypatch.setenv("HEADRACE_FAULTS", plan_faults(tmp_path / "faults", fault))
    with pytest.raises(StorageUnavailable, match=point):
        collect(five)
    assert [step for _, step in steps(five)] == left
    again = collect(five)
    assert again.complete
    assert steps(five) == [(1, 50), (1, 40)]
    if point == "retention.commit_deleted":
        assert [short(v.prefix) for v in again.plan.sweep] == ["1/10"]


# -------------------------------------------------------------------------------------------------- over any history


@dataclass
class Ended(BaseException):
    """The process is killed here."""


@dataclass
class Story:
    """A random history on a store, and what refers to it."""

    storage: Storage
    seed: int
    references: set[tuple[int, int]] = field(default_factory=set)
    """Attempt and step."""

    def __post_init__(self):
        self.random = random.Random(self.seed)
        self.processes = []

    def tell(self):
        for _ in range(self.random.randrange(1, 30)):
            choices = [self.save] * 6 + [self.launch] * 3 + [self.damage, self.set_aside, self.leave, self.refer]
            (self.random.choice(choices) if self.processes else self.launch)()

    def launch(self):
        """From the newest usable checkpoint, or back to an older one, as after a loss spike."""
        try:
            visible = list_commits(self.storage, RUN.run_prefix)
            choose_restore(self.storage, RUN)
        except Terminal:
            return
        start = self.random.choice([visible[0], visible[0], *visible]) if visible else None
        number = newest_attempt(self.storage, RUN.run_prefix) + 1
        claim(self.storage, number, (start.attempt, start.step) if start else None)
        self.processes.append([number, start.step if start else 0])

    def save(self):
        """By any process that was ever launched: an old one may not know that it was replaced."""
        process = self.random.choice([*self.processes, self.processes[-1], self.processes[-1]])
        process[1] += self.random.randrange(1, 5)
        commit(self.storage, *process)

    def leave(self):
        process = self.random.choice(self.processes)
        process[1] += 1
        self.storage.write_bytes(f"{folder(*process)}/rank-0000.bin", b"half a save")

    def any_commit(self):
        found = list(committed_on_chain(self.storage, RUN.run_prefix))
        return self.random.choice(found) if found else None

    def damage(self):
        if (found := self.any_commit()) is not None:
            file = self.random.choice(["rank-0000.bin", "COMMIT.json"])
            data = bytearray(self.storage.read_bytes(f"{found[2]}/{file}"))
            data[self.random.randrange(len(data))] ^= 1
            self.storage.write_bytes(f"{found[2]}/{file}", bytes(data[: self.random.choice([len(data), -1])]))

    def set_aside(self):
        if usable := list_commits(self.storage, RUN.run_prefix):
            quarantine(self.storage, usable[0], reason="damaged", found_by_attempt=self.processes[-1][0])

    def refer(self):
        if (found := self.any_commit()) is None:
            return
        step, attempt, _ = found
        number = next(COUNTER)
        if self.random.random() < 0.5:
            export(self.storage, attempt, step, model=f"m-{number}")
        else:
            fork(self.storage, step, run_id=f"{number + 1:032x}")
        self.references.add((attempt, step))


def answer(storage):
    """What the next launch would start from, or how it would be refused."""
    try:
        choice = choose_restore(storage, RUN)
    except Terminal as error:
        return str(error)
    return choice.checkpoint.prefix if choice.checkpoint else None, choice.refused if choice.checkpoint is None else {}


def newest_whole(storage):
    """What attempts would come down to, after setting aside all that turns out to be damaged."""
    for step, attempt, prefix in committed_on_chain(storage, RUN.run_prefix):
        if inspect(storage, prefix, step=step, attempt=attempt, content=True).ok:
            return prefix
    return None


def one_by_one(storage, after_each, shuffled):
    """Make every deletion one of a single object, in any order within a folder, and call `after_each` of them."""
    store, single, whole = storage._store, storage._store.delete, storage._store.delete_prefix

    def delete(key):
        single(key)
        after_each()

    def delete_prefix(prefix):
        keys = sorted(store.sizes(prefix))
        shuffled.shuffle(keys)
        for key in keys:
            delete(key)
        whole(prefix)

    store.delete, store.delete_prefix = delete, delete_prefix


def test_a_commit_object_goes_before_everything_else_of_its_folder(five):
    left = [set(five.list(f"{RUN.run_prefix}/checkpoints"))]
    one_by_one(five, lambda: left.append(set(five.list(f"{RUN.run_prefix}/checkpoints"))), random.Random(1))
    collect(five)
    gone = [(before - after).pop() for before, after in itertools.pairwise(left) if before != after]
    assert [short(key.rpartition("/")[0]) for key in gone] == ["1/10", "1/10", "1/20", "1/20", "1/30", "1/30"]
    assert [key.rpartition("/")[2] for key in gone] == ["COMMIT.json", "rank-0000.bin"] * 3


POLICIES = st.builds(
    lambda last, every: POLICY.model_copy(update={"keep_last": last, "keep_every": every}),
    st.integers(2, 4),
    st.sampled_from([None, None, 3, 7]),
)


def check_story(storage, copy_of, seed, policy, kill_at):
    story = Story(storage, seed)
    story.tell()
    before = set(storage.list(f"{RUN.run_prefix}/checkpoints"))
    chosen, whole = answer(storage), newest_whole(storage)
    stuck = attempts_without_progress(storage, RUN.run_prefix)
    twin = copy_of(storage)
    dry = look(storage, RUN, policy)
    assert set(storage.list(f"{RUN.run_prefix}/checkpoints")) == before

    def nothing_is_lost():
        assert answer(storage) == chosen
        assert newest_whole(storage) == whole

    one_by_one(storage, nothing_is_lost, story.random)
    done = carry_out(storage, RUN, look(storage, RUN, policy))

    assert done.complete
    after = set(storage.list(f"{RUN.run_prefix}/checkpoints"))
    planned = {verdict.prefix for verdict in (*dry.plan.delete, *dry.plan.sweep)}
    assert {key for key in before if key.rpartition("/")[0] in planned} == before - after
    assert set(done.deleted) == planned
    kept = {verdict.prefix for verdict in dry.plan.keep}
    assert kept.isdisjoint(planned)
    assert {folder(*reference) for reference in story.references} <= kept
    assert attempts_without_progress(storage, RUN.run_prefix) == stuck
    again = look(storage, RUN, policy).plan
    assert (again.delete, again.sweep) == ((), ())

    # Killed after any one deletion, and done again: the same end.
    counter = itertools.count(1)

    def killed():
        if next(counter) == kill_at:
            raise Ended

    one_by_one(twin, killed, story.random)
    try:
        collect(twin, policy)
    except Ended:
        collect(twin, policy)
    assert set(twin.list(f"{RUN.run_prefix}/checkpoints")) == after


STORIES = {"seed": st.integers(0, 2**32), "policy": POLICIES, "kill_at": st.integers(1, 25)}


@settings(max_examples=80, deadline=None)
@given(**STORIES)
def test_over_any_history_nothing_that_counts_is_lost_in_memory(seed, policy, kill_at):
    def copy_of(storage):
        twin = Storage.open(f"memory://story-{next(COUNTER)}")
        for key in storage.list():
            twin.write_bytes(key, storage.read_bytes(key))
        return twin

    check_story(Storage.open(f"memory://story-{next(COUNTER)}"), copy_of, seed, policy, kill_at)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**STORIES)
def test_over_any_history_nothing_that_counts_is_lost_in_a_folder(tmp_path, seed, policy, kill_at):
    root = tmp_path / str(next(COUNTER))

    def copy_of(storage):
        shutil.copytree(root / "one", root / "other")
        return Storage.open(root / "other")

    check_story(Storage.open(root / "one"), copy_of, seed, policy, kill_at)


# ------------------------------------------------------------------------------------------- beside a running attempt


def committed(step):
    return {"kind": "save.committed", "step": step}


def test_beside_an_attempt_each_commit_is_a_look_and_the_end_waits_for_the_last(five):
    keeper = Keeper(five, RUN)
    keeper({"kind": "step", "step": 51})
    keeper(committed(50))
    keeper.close(60)
    assert steps(five) == [(1, 50), (1, 40)]
    keeper(committed(60))
    commit(five, 1, 60)
    assert steps(five) == [(1, 60), (1, 50), (1, 40)], "closed: nothing is deleted any more"


def test_without_a_commit_nothing_is_looked_at(five, monkeypatch):
    monkeypatch.setattr("training.checkpoint.keeper.look", None)
    keeper = Keeper(five, RUN)
    keeper({"kind": "step", "step": 51})
    keeper.close(60)
    assert len(steps(five)) == 5


def test_a_store_that_is_away_costs_only_room(five, monkeypatch, caplog, tmp_path):
    fault = {"point": "retention.before", "action": "raise", "error": "StorageUnavailable"}
    monkeypatch.setenv("HEADRACE_FAULTS", plan_faults(tmp_path / "faults", fault))
    keeper = Keeper(five, RUN)
    keeper(committed(50))
    keeper.close(60)
    assert "Old checkpoints of run" in caplog.text
    assert len(steps(five)) == 5
    keeper = Keeper(five, RUN)
    keeper(committed(50))
    keeper.close(60)
    assert len(steps(five)) == 2


def test_an_end_without_time_stops_between_two_requests(five, monkeypatch):
    """The attempt ended while the newest checkpoint is being read back."""
    keeper = Keeper(five, RUN)

    def ending(*_, on_bytes, **__):
        keeper._stopped.set()
        on_bytes(4)
        raise AssertionError("went on after it was stopped")

    monkeypatch.setattr("training.checkpoint.keeper.look", ending)
    keeper(committed(50))
    keeper.close(60)
    assert len(steps(five)) == 5
