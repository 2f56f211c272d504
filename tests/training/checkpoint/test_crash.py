"""Ranks that die at every point of the save protocol: only what was committed is ever chosen, and it is whole."""

import pytest

from headrace.storage import Storage
from tests.training.checkpoint.saved import claim, load_contents, plan_faults, train_saved
from tests.training.toy import run_spec
from training.checkpoint.catalog import choose_restore
from training.launch.resume import next_attempt

RUN = run_spec(training={"steps": 6, "precision": "float32"}, checkpoint={"save_every": 2})

POINTS = [
    ({"point": "save.begun", "step": 4, "rank": 0}, 2),
    ({"point": "storage.write", "key": "*step-00000004*/rank-0001.bin"}, 2),
    ({"point": "save.files_written", "step": 4, "rank": 0}, 2),
    ({"point": "storage.write", "key": "*step-00000004*/metadata.json"}, 2),
    ({"point": "commit.before", "step": 4}, 2),
    ({"point": "commit.after", "step": 4}, 4),
]
MORE_POINTS = [
    ({"point": "save.begun", "step": 4, "rank": 1}, 2),
    ({"point": "storage.write", "key": "*step-00000004*/rank-0000.bin"}, 2),
    ({"point": "save.files_written", "step": 4, "rank": 1}, 2),
    # The first segment only: a step that ends while it is written may make a second one before the same commit.
    ({"point": "storage.write", "key": "*/events/0001-000000.jsonl"}, None),
    ({"point": "storage.write", "key": "*step-00000004*/COMMIT.json"}, 2),
    ({"point": "storage.write", "key": "*step-00000002*/metadata.json"}, None),
    ({"point": "commit.after", "step": 6}, 6),
]
POINTS += [pytest.param(*values, marks=pytest.mark.slow) for values in MORE_POINTS]


@pytest.fixture(scope="module")
def unbroken(_warm_ranks, tmp_path_factory):
    """The whole final state of both ranks without any fault."""
    return _warm_ranks.run(2, train_saved, claim(tmp_path_factory.mktemp("unbroken"), RUN))


@pytest.mark.parametrize(("point", "expected"), POINTS, ids=lambda value: str(value).replace(" ", ""))
def test_a_crash_leaves_the_newest_commit_and_the_run_ends_the_same(run_ranks, tmp_path, unbroken, point, expected):
    storage = Storage.open(tmp_path / "store")
    faults = plan_faults(tmp_path / "f", {**point, "action": "kill"})
    with pytest.raises(AssertionError, match="left with -9"):
        run_ranks(2, train_saved, claim(tmp_path, RUN), faults)

    choice = choose_restore(storage, RUN)
    assert (choice.checkpoint.step if choice.checkpoint else None) == expected
    assert choice.refused == {}
    again = next_attempt(storage, RUN, work_root=tmp_path / "work")
    if expected == RUN.training.steps:
        assert again is None
        return
    assert run_ranks(2, train_saved, again) == unbroken
    assert next_attempt(storage, RUN, work_root=tmp_path / "work") is None


def test_a_finished_run_loads_as_it_ended(run_ranks, tmp_path, unbroken):
    run_ranks(2, train_saved, claim(tmp_path, RUN))
    end = choose_restore(Storage.open(tmp_path / "store"), RUN).checkpoint
    spec = claim(tmp_path, RUN, end.restore_point, attempt=2)
    assert run_ranks(2, load_contents, spec) == unbroken
