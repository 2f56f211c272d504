"""Which files of a checkpoint are damaged, each by its name; and what a launch does about it."""

import random
import shutil

import pytest

from headrace.commit import read_commit
from headrace.storage import Storage
from tests.training.checkpoint.saved import claim, train_saved
from tests.training.toy import run_spec
from training.checkpoint.catalog import (
    COMMIT_KIND,
    checkpoint_prefix,
    list_commits,
    newest_at,
    quarantine,
)
from training.checkpoint.verify import inspect
from training.launch.resume import next_attempt

RUN = run_spec(training={"steps": 9, "precision": "float32"}, checkpoint={"save_every": 3})
FILES = ["rank-0000.bin", "rank-0001.bin", "metadata.json"]
FLIPS = 100


@pytest.fixture(scope="module")
def pristine(_warm_ranks, tmp_path_factory):
    """A store with checkpoints of steps 3 and 6, saved by two ranks that were killed before step 9 was."""
    folder = tmp_path_factory.mktemp("pristine")
    _warm_ranks.run(2, train_saved, claim(folder, RUN))
    Storage.open(folder / "store").delete_prefix(prefix(step=9))
    return folder


@pytest.fixture
def folder(pristine, tmp_path):
    """A copy of it, free to be damaged."""
    shutil.copytree(pristine / "store", tmp_path / "store")
    return tmp_path


@pytest.fixture
def storage(folder):
    return Storage.open(folder / "store")


def prefix(step=6, attempt=1):
    return checkpoint_prefix(RUN.run_prefix, step=step, attempt=attempt)


def found(storage, *, content=True, step=6, attempt=1):
    """Damaged files and what is told of each."""
    finding = inspect(storage, prefix(step, attempt), step=step, attempt=attempt, content=content)
    return {damage.file: damage.reason for damage in finding.damage}


def path(storage, file, step=6):
    return storage.local_path(f"{prefix(step)}/{file}")


def flip(file, bit):
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_a_whole_checkpoint_and_what_was_read_of_it(storage):
    read = []
    finding = inspect(storage, prefix(), step=6, attempt=1, content=True, on_bytes=read.append)
    assert finding.ok
    commit = read_commit(storage, prefix(), kind=COMMIT_KIND)
    assert sum(read) == finding.num_bytes == sum(entry.size for entry in commit.files.values())
    assert finding.num_files == 3
    inspect(storage, prefix(), step=6, attempt=1, content=False, on_bytes=lambda _: pytest.fail("read something"))


def test_every_damaged_file_is_named_not_only_the_first(storage):
    size, index = (f"{path(storage, file).stat().st_size:,}" for file in FILES[1:])
    flip(path(storage, "rank-0000.bin"), 1000)
    path(storage, "rank-0001.bin").write_bytes(b"short")
    path(storage, "metadata.json").unlink()
    assert found(storage) == {
        "rank-0000.bin": "its content is not that of the commit (SHA-256 differs)",
        "rank-0001.bin": f"it has 5 bytes, but the commit says {size}",
        "metadata.json": f"it is missing; the commit names it with {index} bytes",
    }
    assert found(storage, content=False).keys() == {"rank-0001.bin", "metadata.json"}
    assert found(storage, step=3) == {}


def test_a_hundred_flipped_bits_are_all_found_and_each_in_its_file(storage):
    """Also in the padding between tensors, which no value depends on."""
    generator = random.Random(7)
    for _ in range(FLIPS):
        file = path(storage, generator.choice([*FILES, "COMMIT.json"]))
        original = file.read_bytes()
        flip(file, generator.randrange(8 * len(original)))
        assert found(storage).keys() == {file.name}
        file.write_bytes(original)
    assert found(storage) == {}


def test_files_exchanged_cut_replaced_or_from_another_step_are_found(storage):
    one, other = (path(storage, name) for name in FILES[:2])
    swapped = one.read_bytes(), other.read_bytes()
    one.write_bytes(swapped[1])
    other.write_bytes(swapped[0])
    assert found(storage).keys() == {"rank-0000.bin", "rank-0001.bin"}
    one.write_bytes(swapped[0][:-1])
    other.write_bytes(b"")
    assert found(storage, content=False).keys() == {"rank-0000.bin", "rank-0001.bin"}
    for file in FILES:
        path(storage, file).write_bytes(path(storage, file, step=3).read_bytes())
    assert found(storage).keys() == set(FILES)


def test_a_commit_that_says_nothing_of_this_folder(storage):
    path(storage, "COMMIT.json").write_bytes(path(storage, "COMMIT.json", step=3).read_bytes())
    assert found(storage) == {
        "COMMIT.json": "it is the commit of step 3, attempt 1: copied here from another folder",
    }
    path(storage, "COMMIT.json").unlink()
    assert found(storage) == {"COMMIT.json": "it is missing"}


def test_one_that_was_set_aside_says_who_found_what(storage):
    checkpoint = newest_at(storage, RUN.run_prefix, 6)
    quarantine(storage, checkpoint, reason="a byte was wrong", found_by_attempt=2)
    assert found(storage) == {"DAMAGED.json": "set aside by attempt 2: a byte was wrong"}


# -------------------------------------------------------------------------------------- what the next launch does


def flip_a_bit(storage):
    flip(path(storage, "rank-0001.bin"), 8 * 2000 + 3)


def exchange_the_ranks(storage):
    one, other = (path(storage, name) for name in FILES[:2])
    data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(data)


def cut_a_file(storage):
    file = path(storage, "rank-0000.bin")
    file.write_bytes(file.read_bytes()[:-40])


def remove_a_file(storage):
    path(storage, "rank-0001.bin").unlink()


def metadata_of_another_step(storage):
    path(storage, "metadata.json").write_bytes(path(storage, "metadata.json", step=3).read_bytes())


DAMAGES = [flip_a_bit, exchange_the_ranks, cut_a_file, remove_a_file, metadata_of_another_step]


def train_or_refuse(world, spec):
    from training.checkpoint.catalog import DamagedCheckpoint

    try:
        return train_saved(world, spec)
    except DamagedCheckpoint as error:
        return error


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_refused_and_its_step_is_committed_again(run_ranks, pristine, folder, storage, damage):
    """The run goes on to the same end, bit for bit, whichever attempt has to find the damage out."""
    damage(storage)
    for _ in range(2):
        spec = next_attempt(storage, RUN, work_root=folder / "work")
        ends = run_ranks(2, train_or_refuse, spec)
        if not isinstance(ends[0], Exception):
            break
        assert spec.restore.step == 6
    assert (spec.restore.attempt, spec.restore.step) == (1, 3)
    assert [(c.attempt, c.step) for c in list_commits(storage, RUN.run_prefix)] == [
        (spec.attempt, 9),
        (spec.attempt, 6),
        (1, 3),
    ]
    assert found(storage, attempt=spec.attempt) == {}
    again = read_commit(storage, prefix(6, spec.attempt), kind=COMMIT_KIND)
    before = read_commit(Storage.open(pristine / "store"), prefix(), kind=COMMIT_KIND)
    for file in FILES:
        assert again.files[file] == before.files[file]
