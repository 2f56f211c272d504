"""Whatever happens to the bytes of a checkpoint: its values are right, or it is refused."""

import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from headrace.errors import DamagedData, InputError, Terminal
from headrace.events import read_events
from headrace.storage import Storage
from tests.training.checkpoint.saved import build, claim, train_saved
from tests.training.toy import run_spec
from training.checkpoint.catalog import DamagedCheckpoint, choose_restore, list_commits
from training.checkpoint.reader import read_tensors
from training.launch.resume import attempts_without_progress, next_attempt

RUN = run_spec(training={"steps": 6, "precision": "float32"}, checkpoint={"save_every": 3})
FILES = ["rank-0000.bin", "rank-0001.bin", "metadata.json", "COMMIT.json"]


@pytest.fixture(scope="module")
def pristine(_warm_ranks, tmp_path_factory):
    """A store with checkpoints of steps 3 and 6, saved by two ranks."""
    folder = tmp_path_factory.mktemp("pristine")
    _warm_ranks.run(2, train_saved, claim(folder, RUN))
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    """A copy of it, free to be damaged."""
    shutil.copytree(pristine / "store", tmp_path / "store")
    return tmp_path


def newest(folder):
    return folder / "store" / RUN.run_prefix / "checkpoints" / "step-00000006" / "attempt-0001"


def load(folder):
    """What a launch would get: the step it starts from, and its tensors. Refusals fall back, as attempts do."""
    storage = Storage.open(folder / "store")
    refused = []
    for checkpoint in list_commits(storage, RUN.run_prefix):
        try:
            return checkpoint.step, read_tensors(storage, checkpoint.prefix, checkpoint.commit)
        except DamagedData as error:
            refused.append(str(error))
    return None, refused


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def flip(path, bit):
    data = bytearray(path.read_bytes())
    data[bit // 8 % len(data)] ^= 1 << bit % 8
    path.write_bytes(data)


@pytest.mark.parametrize("file", FILES)
def test_a_flipped_bit_in_any_file_is_found(folder, file):
    _, expected = load(folder)
    flip(newest(folder) / file, 8 * 100 + 3)
    step, tensors = load(folder)
    assert step == 3
    assert tensors.keys() == expected.keys()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(file=st.sampled_from(FILES), bit=st.integers(min_value=0, max_value=8 * 100_000))
def test_no_flipped_bit_changes_a_value_that_is_loaded(pristine, folder, file, bit):
    path = newest(folder) / file
    original = path.read_bytes()
    flip(path, bit)
    try:
        step, tensors = load(folder)
        # Padding between chunks belongs to no tensor: with it damaged, the values are still right.
        assert step == 3 or (step == 6 and equal(tensors, load(pristine)[1]))
    finally:
        path.write_bytes(original)


@pytest.mark.parametrize("file", FILES[:3])
@pytest.mark.parametrize("keep", [0, 100, -40])
def test_a_truncated_file_is_found(folder, file, keep):
    path = newest(folder) / file
    path.write_bytes(path.read_bytes()[:keep])
    assert load(folder)[0] == 3


@pytest.mark.parametrize("file", FILES[:3])
def test_a_missing_file_is_found(folder, file):
    (newest(folder) / file).unlink()
    assert load(folder)[0] == 3


@pytest.mark.parametrize("file", FILES[:3])
def test_a_file_of_another_step_in_its_place_is_found(folder, file):
    older = newest(folder).parent.parent / "step-00000003" / "attempt-0001"
    data = (older / file).read_bytes()
    if file != "metadata.json":
        assert len(data) == (newest(folder) / file).stat().st_size
    (newest(folder) / file).write_bytes(data)
    assert load(folder)[0] == 3


def test_files_of_two_ranks_exchanged_are_found(folder):
    one, other = newest(folder) / "rank-0000.bin", newest(folder) / "rank-0001.bin"
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)
    assert load(folder)[0] == 3


def test_a_file_that_grew_is_found(folder):
    with (newest(folder) / "rank-0000.bin").open("ab") as file:
        file.write(b"\0" * 64)
    assert load(folder)[0] == 3


def load_damaged(world, spec):
    with pytest.raises(DamagedCheckpoint) as caught:
        build(world, spec)
    return str(caught.value), caught.value.retryable


@pytest.mark.parametrize("file", ["rank-0000.bin", "rank-0001.bin", "metadata.json"])
def test_damage_that_only_loading_finds_is_set_aside_and_the_next_attempt_uses_the_one_before(run_ranks, folder, file):
    storage = Storage.open(folder / "store")
    flip(newest(folder) / file, 8 * 1000)
    second = next_attempt(storage, RUN.model_copy(update={"training": _longer()}), work_root=folder / "work")
    assert second.restore.step == 6
    ends = run_ranks(2, load_damaged, second.model_copy(update={"run": RUN}))
    assert ends[0] == ends[1]
    message, retryable = ends[0]
    assert file in message
    assert retryable
    (event,) = read_events(storage, RUN.run_prefix, 2)
    assert (event["kind"], event["step"]) == ("checkpoint.damaged", 6)
    # An attempt that set a checkpoint aside has made the next one possible.
    assert attempts_without_progress(storage, RUN.run_prefix) == 0

    third = next_attempt(storage, RUN, work_root=folder / "work")
    assert (third.attempt, third.restore.step, third.restore.attempt) == (3, 3, 1)
    run_ranks(2, train_saved, third)
    assert [(c.attempt, c.step) for c in list_commits(storage, RUN.run_prefix)] == [(3, 6), (1, 3)]


def _longer():
    return RUN.training.model_copy(update={"steps": 9})


def test_when_everything_is_damaged_nothing_is_loaded(folder):
    for path in newest(folder).parent.parent.rglob("rank-0000.bin"):
        flip(path, 8 * 1000)
    step, refused = load(folder)
    assert step is None
    assert len(refused) == 2
    for path in newest(folder).parent.parent.rglob("rank-0000.bin"):
        path.unlink()
    with pytest.raises(Terminal, match="All 2 committed checkpoints"):
        choose_restore(Storage.open(folder / "store"), RUN)


def test_a_foreign_checkpoint_among_the_own_is_refused(folder):
    other = run_spec(run_key="other", training={"steps": 9})
    with pytest.raises(InputError, match="run_key"):
        choose_restore(Storage.open(folder / "store"), other)
