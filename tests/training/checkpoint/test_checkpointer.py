"""Saves beside the training and loads under any number of ranks, with real process groups on a real folder."""

import math
import os
import signal
import subprocess
import time

import boto3
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from headrace.commit import read_commit
from headrace.errors import AttemptFailed, DamagedData, InputError
from headrace.events import read_events
from headrace.process import pid_alive
from headrace.storage import Storage
from tests.headrace.killed import killed_while_writing
from tests.headrace.s3_proxy import BUCKET
from tests.training.checkpoint.saved import (
    attempt_spec,
    build,
    claim,
    contents,
    events_of,
    load_contents,
    perturb,
    plan_faults,
    train_impatiently,
    train_saved,
    use_faults,
)
from tests.training.toy import alone, run_spec
from training.checkpoint.catalog import list_commits
from training.checkpoint.checkpointer import AsyncCheckpointer, Superseded
from training.checkpoint.reader import read_tensors
from training.launch.attempts import claim_attempt, make_record
from training.loop import train
from training.run_spec import RestorePoint

SHORT = {"training": {"steps": 4}, "checkpoint": {"save_every": 2}}


def steps_of(events, kind):
    return [event["step"] for event in events if event["kind"] == kind]


def reader_of(folder, run, work_dir):
    """An attempt that loads step 4 of the store in `folder`, and writes its own files elsewhere."""
    spec = attempt_spec(folder, run, RestorePoint(attempt=1, step=4), attempt=2)
    return spec.model_copy(update={"work_dir": str(work_dir / "work")})


def committed_steps(folder, run):
    return [checkpoint.step for checkpoint in list_commits(Storage.open(folder / "store"), run.run_prefix)]


@pytest.fixture(scope="module")
def saved_by_two(_warm_ranks, tmp_path_factory):
    """A store on which two ranks committed steps 2 and 4, and the state of both at the end. Only read from it."""
    folder = tmp_path_factory.mktemp("two")
    run = run_spec(model={"vocab_size": 101}, **SHORT)
    return folder, run, _warm_ranks.run(2, train_saved, claim(folder, run))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_what_two_ranks_saved_any_number_of_ranks_loads_bit_for_bit(run_ranks, saved_by_two, tmp_path, world_size):
    folder, run, saved = saved_by_two
    assert committed_steps(folder, run) == [4, 2]
    spec = reader_of(folder, run, tmp_path)
    loaded = run_ranks(world_size, load_contents, spec)
    shared = [name for name in saved[0]["tensors"] if not name.startswith("rng.")]
    assert len(shared) == 4 * len([name for name in shared if name.startswith("model.")]) > 0
    for rank in loaded:
        assert rank["values"] == saved[0]["values"]
        assert {name: rank["tensors"][name] for name in shared} == {name: saved[0]["tensors"][name] for name in shared}
    for rank in range(min(world_size, 2)):
        name = f"rng.rank{rank:04d}"
        assert loaded[rank]["tensors"][name] == saved[rank]["tensors"][name]
    (event,) = events_of(spec)
    assert (event["kind"], event["step"], event["from_attempt"]) == ("checkpoint.loaded", 4, 1)


@pytest.mark.parametrize("world_size", [1, 4])
def test_what_other_numbers_of_ranks_saved_two_ranks_load(run_ranks, tmp_path, world_size):
    run = run_spec(training={"steps": 1})
    saved = run_ranks(world_size, train_saved, claim(tmp_path, run))
    second = claim(tmp_path, run, RestorePoint(attempt=1, step=1), attempt=2)
    for rank in run_ranks(2, load_contents, second):
        for name, data in rank["tensors"].items():
            if not name.startswith("rng."):
                assert data == saved[0]["tensors"][name], name


def test_a_resumed_run_ends_with_the_bits_of_an_unbroken_one(run_ranks, tmp_path):
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run = run_spec(training={"steps": 6, "precision": "float32"}, checkpoint={"save_every": 2})
    expected = run_ranks(2, train_saved, claim(whole, run))
    # The save of step 4 waits for that of step 2, so step 2 is committed by then; that of step 4 may be or not.
    faults = plan_faults(broken / "faults", {"point": "step.middle", "step": 5, "rank": 1, "action": "kill"})
    with pytest.raises(AssertionError, match="rank 1 of 2 left with -9"):
        run_ranks(2, train_saved, claim(broken, run), faults)
    resumed = run_ranks(2, train_saved, claim(broken, run, RestorePoint(attempt=1, step=2), attempt=2))
    assert resumed == expected


def test_what_a_killed_writer_left_goes_with_the_first_commit(run_ranks, tmp_path):
    run = run_spec(training={"steps": 1})
    spec = claim(tmp_path, run)
    folder = tmp_path / "store" / run.run_prefix / "checkpoints" / "step-00000001" / "attempt-0000"
    left = folder / killed_while_writing(folder / "shard")
    run_ranks(1, train_saved, spec)
    assert committed_steps(tmp_path, run) == [1]
    assert not left.exists()


def save_then_change(world, spec, faults):
    use_faults(faults)
    training = build(world, spec)
    before = contents(training)
    assert training.checkpoints.save_async(training.state)
    perturb(training)
    assert training.checkpoints.wait() == 0
    return before, contents(training)


def test_what_changes_after_the_call_is_not_saved(run_ranks, tmp_path):
    run = run_spec()
    faults = plan_faults(tmp_path / "f", {"point": "storage.write", "action": "sleep", "seconds": 0.3, "always": True})
    before, after = run_ranks(2, save_then_change, claim(tmp_path, run), faults)[0]
    assert before != after
    loaded = run_ranks(2, load_contents, claim(tmp_path, run, RestorePoint(attempt=1, step=0), attempt=2))
    assert loaded[0] == before


@pytest.mark.parametrize("seconds", [0.6, pytest.param(5.0, marks=pytest.mark.slow)])
def test_training_goes_on_while_a_slow_store_takes_the_save(run_ranks, tmp_path, seconds):
    run = run_spec(training={"steps": 9}, checkpoint={"save_every": 3})
    spec = claim(tmp_path, run)
    slow = {"point": "storage.write", "action": "sleep", "seconds": seconds, "always": True}
    run_ranks(2, train_impatiently, spec, plan_faults(tmp_path / "f", slow))
    events = events_of(spec)
    begun = next(i for i, e in enumerate(events) if e["kind"] == "save.begun")
    committed = next(i for i, e in enumerate(events) if e["kind"] == "save.committed")
    between = events[begun:committed]
    assert len(steps_of(between, "step")) >= 1
    # A save that is due meanwhile is skipped and noted, except the last, which waits.
    assert steps_of(events, "save.skipped") == [6]
    assert committed_steps(tmp_path, run) == [9, 3]
    staged = next(e for e in events if e["kind"] == "save.staged")
    assert staged["blocking_seconds"] < 4 * seconds <= events[committed]["seconds"]


def test_the_log_on_the_store_is_never_behind_a_commit(saved_by_two):
    folder, run, _ = saved_by_two
    stored = read_events(Storage.open(folder / "store"), run.run_prefix, 1)
    assert steps_of(stored, "step") == [1, 2, 3, 4]


def test_a_commit_names_all_that_is_needed_to_judge_it(saved_by_two):
    folder, run, _ = saved_by_two
    newest = list_commits(Storage.open(folder / "store"), run.run_prefix)[0]
    assert sorted(newest.commit.files) == ["metadata.json", "rank-0000.bin", "rank-0001.bin"]
    body = newest.commit.body
    assert (body["run_id"], body["run_key"], body["step"], body["attempt"]) == (run.run_id, run.run_key, 4, 1)
    assert body["layout"]["world_size"] == 2
    assert body["model"] == run.model.model_dump(mode="json")
    assert body["state"]["position"] == 32
    assert sorted(p.name for p in (folder / "store" / newest.prefix).iterdir()) == [
        "COMMIT.json",
        *sorted(newest.commit.files),
    ]


# ------------------------------------------------------------------------------------------------- failing saves


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failed_save_is_told_and_training_goes_on(run_ranks, tmp_path, rank):
    run = run_spec(training={"steps": 6}, checkpoint={"save_every": 2})
    spec = claim(tmp_path, run)
    fault = {"point": "storage.write", "rank": rank, "action": "raise", "error": "StorageUnavailable"}
    run_ranks(2, train_saved, spec, plan_faults(tmp_path / "f", fault))
    events = events_of(spec)
    failed = [event for event in events if event["kind"] == "save.failed"]
    assert [(event["step"], event["error"]) for event in failed] == [(2, "StorageUnavailable")]
    assert committed_steps(tmp_path, run) == [6, 4]
    assert steps_of(events, "step") == [1, 2, 3, 4, 5, 6]


def spoil_a_weight_before_step_three(world, spec):
    training = build(world, spec)
    save = training.checkpoints.save_async

    def spoil_and_save(state, *, required=False):
        if state.step == 2 and world.rank == 1:
            shard = state.parameters["norm.weight"].detach().to_local()
            kept, shard[0] = shard[0].clone(), math.inf
            save(state, required=required)  # the copy is made when this returns
            shard[0] = kept
            return True
        return save(state, required=required)

    training.checkpoints.save_async = spoil_and_save
    train(training)


def test_a_state_that_is_not_finite_is_never_committed(run_ranks, tmp_path):
    run = run_spec(training={"steps": 4}, checkpoint={"save_every": 2})
    spec = claim(tmp_path, run)
    run_ranks(2, spoil_a_weight_before_step_three, spec)
    failed = [event for event in events_of(spec) if event["kind"] == "save.failed"]
    assert [(event["step"], event["error"]) for event in failed] == [(2, "NotFinite")]
    assert "norm.weight holds values that are not finite (" in failed[0]["message"]
    assert committed_steps(tmp_path, run) == [4]


def train_until_it_fails(world, spec, faults):
    use_faults(faults)
    training = build(world, spec)
    with pytest.raises(AttemptFailed) as caught:
        train(training)
    return training.state.step, str(caught.value)


def test_too_many_failed_saves_in_a_row_end_the_attempt_on_every_rank(run_ranks, tmp_path):
    run = run_spec(training={"steps": 20}, checkpoint={"save_every": 2, "max_failed_saves": 2})
    fault = {"point": "storage.write", "rank": 1, "action": "raise", "error": "StorageUnavailable", "always": True}
    ends = run_ranks(2, train_until_it_fails, claim(tmp_path, run), plan_faults(tmp_path / "f", fault))
    assert [step for step, _ in ends] == [6, 6]
    assert all(message.startswith("2 saves in a row failed at file://") for _, message in ends)
    assert "Injected fault at storage.write." in ends[0][1]


def test_a_last_save_that_fails_is_no_finished_run(run_ranks, tmp_path):
    run = run_spec(training={"steps": 2}, checkpoint={"save_every": 2})
    fault = {"point": "storage.write", "rank": 1, "action": "raise", "error": "StorageUnavailable", "always": True}
    ends = run_ranks(2, train_until_it_fails, claim(tmp_path, run), plan_faults(tmp_path / "f", fault))
    assert ends[0] == (2, "The state of step 2 could not be saved: step 2: Injected fault at storage.write.")


def until_committed(checkpoints):
    while (step := checkpoints.poll()) is None:
        time.sleep(0.01)
    return step


def save_over_time(world, spec, faults):
    use_faults(faults)
    training = build(world, spec, AsyncCheckpointer)
    checkpoints, state = training.checkpoints, training.state
    results = []
    for state.step in (1, 2):
        results.append(checkpoints.save_async(state))
        results.append(checkpoints.wait())  # no longer than the save's time
    results.append(until_committed(checkpoints))
    state.step = 3
    results.append(checkpoints.save_async(state))
    results.append(until_committed(checkpoints))
    return results


def test_a_save_beyond_its_time_counts_as_failed_but_may_still_commit(run_ranks, tmp_path):
    run = run_spec(checkpoint={"save_timeout_seconds": 0.3, "max_failed_saves": 9}, training={"steps": 9})
    spec = claim(tmp_path, run)
    slow = {"point": "storage.write", "key": "*COMMIT.json", "action": "sleep", "seconds": 2.0}
    results = run_ranks(1, save_over_time, spec, plan_faults(tmp_path / "f", slow))
    assert results == [[True, None, False, None, 1, True, 3]]
    events = events_of(spec)
    kinds = [(event["kind"], event["step"]) for event in events if event["kind"] != "save.staged"]
    assert kinds[:5] == [
        ("save.begun", 1),
        ("save.failed", 1),
        ("save.skipped", 2),
        ("save.committed", 1),
        ("save.begun", 3),
    ]
    assert "save_timeout_seconds (0.3)" in next(e["message"] for e in events if e["kind"] == "save.failed")


@pytest.fixture
def small_disk(tmp_path):
    """A full disk: 512 KiB, where the state of the toy run does not fit twice; or, without root, writes that say so."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
    if os.geteuid() == 0 and subprocess.run(mount, check=False, capture_output=True).returncode == 0:
        yield folder, None
        subprocess.run(["umount", str(folder)], check=True)
    else:
        full = {"point": "storage.write", "key": "*.bin", "action": "raise", "error": "StorageFull", "always": True}
        yield folder, plan_faults(tmp_path / "f", full)


def test_a_full_disk_stops_no_training_and_leaves_nothing_half_written(run_ranks, tmp_path, small_disk):
    disk, faults = small_disk
    run = run_spec(training={"steps": 6}, checkpoint={"save_every": 2})
    first = claim(disk, run)
    spec = first.model_copy(update={"work_dir": str(tmp_path / "work")})
    step, message = run_ranks(2, train_until_it_fails, spec, faults)[0]
    assert step == 6
    assert "No space left on device" in message or faults
    failed = [event for event in events_of(spec) if event["kind"] == "save.failed"]
    assert {event["error"] for event in failed} == {"StorageFull"}
    committed = committed_steps(disk, run)
    assert committed == sorted(set(range(2, 7, 2)) - {event["step"] for event in failed}, reverse=True)
    hidden = [path.name for path in (disk / "store").rglob(".headrace-tmp-*")]
    assert hidden == []


# ------------------------------------------------------------------------------------------------- refused loads


def load_and_fail(world, spec):
    with pytest.raises(InputError) as caught:
        build(world, spec)
    return str(caught.value)


def test_a_checkpoint_of_another_model_is_refused_by_field(run_ranks, saved_by_two, tmp_path):
    folder = saved_by_two[0]
    other = run_spec(model={"vocab_size": 101, "dim": 16, "num_layers": 3}, **SHORT)
    messages = run_ranks(2, load_and_fail, reader_of(folder, other, tmp_path))
    assert messages[0] == messages[1]
    assert "model.dim is 32 there and 16 here; model.num_layers is 2 there and 3 here" in messages[0]


def test_a_checkpoint_of_another_run_is_refused_by_field(run_ranks, saved_by_two, tmp_path):
    folder = saved_by_two[0]
    other = run_spec(model={"vocab_size": 101}, run_key="another", **SHORT)
    message = run_ranks(1, load_and_fail, reader_of(folder, other, tmp_path))[0]
    assert "run_key is 'key' there and 'another' here" in message


def save_and_commit(world, spec):
    training = build(world, spec)
    training.state.step = 1
    training.checkpoints.save_async(training.state)
    with pytest.raises(Superseded) as caught:
        training.checkpoints.wait()
    return str(caught.value)


def test_an_attempt_that_was_fenced_off_commits_nothing_and_ends(run_ranks, tmp_path):
    run = run_spec(training={"steps": 9})
    old = claim(tmp_path, run)
    claim(tmp_path, run, attempt=2)
    messages = run_ranks(2, save_and_commit, old)
    assert messages[0].startswith("Attempt 2 of run 0000")
    assert not list((tmp_path / "store").rglob("COMMIT.json"))


# ----------------------------------------------------------------------------------------------------- odd states


class OddState:
    """Tensors that do not divide: three rows over four ranks leave one rank with nothing; scalars; many types."""

    def __init__(self, world, fill):
        mesh = init_device_mesh("cpu", (world.world_size,))
        self.random_state_name = f"rng.rank{world.rank:04d}"
        self.step = 1
        self.whole = {
            "model.rows": torch.arange(15, dtype=torch.float32).reshape(3, 5),
            "model.columns": torch.arange(14, dtype=torch.bfloat16).reshape(2, 7),
            "model.empty": torch.empty(0, 4),
            "optim.scalar": torch.tensor(7.5, dtype=torch.float64),
            "optim.flags": torch.tensor([True, False, True]),
        }
        if not fill:
            self.whole = {name: torch.zeros_like(tensor) for name, tensor in self.whole.items()}
        placed = {"model.rows": Shard(0), "model.columns": Shard(1)}
        self.own = {
            name: distribute_tensor(tensor, mesh, [placed[name]]) if name in placed else tensor
            for name, tensor in self.whole.items()
        }

    def tensors(self):
        return self.own

    def values(self):
        return {"step": 1}

    def load_state_dict(self, state):
        assert state["values"] == {"step": 1}


def save_odd(world, spec):
    checkpoints = AsyncCheckpointer(Storage.open(spec.storage_root), spec)
    checkpoints.save_async(OddState(world, fill=True))
    return checkpoints.wait()


def load_odd(world, spec):
    state = OddState(world, fill=False)
    AsyncCheckpointer(Storage.open(spec.storage_root), spec).load(state, spec.restore)
    full = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in state.tensors().items()}
    expected = OddState(world, fill=True).whole
    return [name for name, tensor in full.items() if not torch.equal(tensor, expected[name])]


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(4, 2), (2, 4), (4, 1)])
def test_shards_of_any_shape_are_put_together_again(run_ranks, tmp_path, saved_by, loaded_by):
    run = run_spec(training={"steps": 9})
    assert run_ranks(saved_by, save_odd, claim(tmp_path, run)) == [1] * saved_by
    spec = claim(tmp_path, run, RestorePoint(attempt=1, step=1), attempt=2)
    assert run_ranks(loaded_by, load_odd, spec) == [[]] * loaded_by
    storage = Storage.open(tmp_path / "store")
    newest = f"{run.run_prefix}/checkpoints/step-00000001/attempt-0001"
    commit = read_commit(storage, newest, kind="checkpoint")
    whole = read_tensors(storage, newest, commit)
    assert whole["model.rows"].tolist() == [[5 * row + column for column in range(5)] for row in range(3)]
    assert whole["optim.scalar"].item() == 7.5


def save_without_a_group(world, spec):
    dist.destroy_process_group()
    training = build(alone(), spec)
    training.checkpoints.save_async(training.state)
    saved = training.checkpoints.wait()
    training.checkpoints.close()
    return saved, dist.is_initialized()


def test_a_single_process_saves_like_many(run_ranks, tmp_path):
    run = run_spec(training={"steps": 9})
    assert run_ranks(1, save_without_a_group, claim(tmp_path, run)) == [(0, False)]
    assert run_ranks(2, load_contents, claim(tmp_path, run, RestorePoint(attempt=1, step=0), attempt=2))


def save_and_load_elsewhere(world, spec, root):
    spec = spec.model_copy(update={"storage_root": root})
    storage = Storage.open(root)
    claim_attempt(storage, spec.run.run_prefix, make_record(spec.run, 1, None))
    training = build(world, spec)
    training.checkpoints.save_async(training.state)
    saved = training.checkpoints.wait()
    before = contents(training)
    perturb(training)
    training.checkpoints.load(training.state, RestorePoint(attempt=1, step=0))
    staged = [path.name for path in spec.work_path.rglob("*.bin")]
    return saved, contents(training) == before, staged


def test_a_store_that_is_no_folder_gets_files_through_a_local_one(run_ranks, tmp_path):
    spec = attempt_spec(tmp_path, run_spec(training={"steps": 9}))
    assert run_ranks(1, save_and_load_elsewhere, spec, "memory://elsewhere") == [(0, True, [])]


@pytest.mark.slow
def test_checkpoints_on_s3(run_ranks, tmp_path, s3_root):
    spec = attempt_spec(tmp_path, run_spec(training={"steps": 9}))
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    assert run_ranks(2, save_and_load_on_s3, spec, s3_root, environment) == [(0, True, [])] * 2
    storage = Storage.open(s3_root)
    checkpoint = list_commits(storage, spec.run.run_prefix)[0]
    data = bytearray(storage.read_bytes(f"{checkpoint.prefix}/rank-0001.bin"))
    data[100] ^= 1
    storage.write_bytes(f"{checkpoint.prefix}/rank-0001.bin", bytes(data))
    with pytest.raises(DamagedData, match=r"rank-0001\.bin is damaged"):
        read_tensors(storage, checkpoint.prefix, checkpoint.commit)


def save_and_load_on_s3(world, spec, root, environment):
    os.environ |= environment
    return save_and_load_elsewhere(world, spec, root)


def lose_the_upload_process(world, spec, root, environment, faults):
    os.environ |= environment
    use_faults(faults)
    spec = spec.model_copy(update={"storage_root": root})
    claim_attempt(Storage.open(root), spec.run.run_prefix, make_record(spec.run, 1, None))
    training = build(world, spec, AsyncCheckpointer)
    checkpoints, state = training.checkpoints, training.state
    first = checkpoints._uploader.pid
    results = [checkpoints.save_async(state)]
    os.kill(first, signal.SIGKILL)
    results.append(checkpoints.wait())
    state.step = 1
    results += [checkpoints.save_async(state), checkpoints.wait()]
    second = checkpoints._uploader.pid
    checkpoints.close()
    return results, second not in (None, first), pid_alive(second)


@pytest.mark.slow
def test_an_upload_process_that_dies_costs_one_save(run_ranks, tmp_path, s3_root):
    spec = attempt_spec(tmp_path, run_spec(training={"steps": 9}))
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    slow = {"point": "storage.write", "key": "*step-00000000*", "action": "sleep", "seconds": 1.0, "always": True}
    faults = plan_faults(tmp_path / "f", slow)
    storage = Storage.open(s3_root)
    prefix = storage.root_url.split("/", 3)[3]
    orphan = f"{prefix}/{spec.run.run_prefix}/checkpoints/step-00000000/attempt-0001/rank-0000.bin"
    client = boto3.client("s3")
    client.create_multipart_upload(Bucket=BUCKET, Key=orphan)

    ends = run_ranks(1, lose_the_upload_process, spec, s3_root, environment, faults)
    assert ends == [([True, None, True, 1], True, False)]
    failed = [event for event in events_of(spec) if event["kind"] == "save.failed"]
    assert [(event["step"], event["error"]) for event in failed] == [(0, "StorageUnavailable")]
    assert "upload process ended with code -9" in failed[0]["message"]
    assert [checkpoint.step for checkpoint in list_commits(storage, spec.run.run_prefix)] == [1]
    assert "Uploads" not in client.list_multipart_uploads(Bucket=BUCKET, Prefix=prefix)


def save_twice(world, spec):
    training = build(world, spec)
    saves = [training.checkpoints.save_async(training.state), training.checkpoints.wait()]
    return [*saves, training.checkpoints.save_async(training.state, required=True), training.checkpoints.wait()]


def test_a_step_is_written_once(run_ranks, tmp_path):
    spec = attempt_spec(tmp_path, run_spec(training={"steps": 9}))
    claim(tmp_path, spec.run)
    assert run_ranks(2, save_twice, spec) == [[True, 0, True, None]] * 2
    assert steps_of(events_of(spec), "save.begun") == [0]
