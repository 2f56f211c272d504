"""A step done again in one process is the step that two ranks made, with what they passed over."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.errors import InputError
from headrace.storage import Storage
from tests.training.checkpoint.saved import plan_faults, use_faults
from tests.training.test_main import attempt_of, free_port, rank_of_attempt, run_of
from training.checkpoint.catalog import list_commits
from training.replay import ReplaySpec, logged_steps, replay

TOLERANCE = 1e-5


def train_two(run_ranks, text_dataset, run, tmp_path):
    spec = attempt_of(text_dataset, run, tmp_path)
    run_ranks(2, rank_of_attempt, spec, free_port(), 100)
    return Storage.open(text_dataset.root)


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize(("precision", "run_id"), [("float32", "5e"), ("bfloat16", "6e")])
def test_a_step_again_is_equal_to_what_was_logged(run_ranks, text_dataset, tmp_path, precision, run_id):
    changes = {"training": {"steps": 6, "precision": precision}, "checkpoint": {"save_every": 2}}
    run = run_of(text_dataset, run_id, **changes)
    storage = train_two(run_ranks, text_dataset, run, tmp_path)
    before = files_of(text_dataset.root / run.run_prefix)
    seen = []
    done = replay(ReplaySpec(storage_root=str(text_dataset.root), run_id=run.run_id, step=5), seen.append)
    start = max(c.step for c in list_commits(storage, run.run_prefix) if c.step < 5)  # a busy save lets the next pass
    assert (done.start, seen) == (start, list(range(start + 1, 6)))
    step = done.steps[-1]
    logged = logged_steps(storage, run.run_prefix)
    assert (step["step"], step["first_sample"]) == (5, 4 * run.training.global_batch_size)
    assert (step["logged_loss"], step["logged_grad_norm"]) == (logged[5]["loss"], logged[5]["grad_norm"])
    assert step["loss"] == pytest.approx(logged[5]["loss"], rel=TOLERANCE)
    assert done.largest_difference <= TOLERANCE
    assert files_of(text_dataset.root / run.run_prefix) == before


def test_it_passes_by_a_damaged_checkpoint_and_starts_from_the_initial_weights(run_ranks, text_dataset, tmp_path):
    run = run_of(text_dataset, "7e", training={"steps": 4}, checkpoint={"save_every": 2})
    storage = train_two(run_ranks, text_dataset, run, tmp_path)
    for checkpoint in list_commits(storage, run.run_prefix):
        data = storage.local_path(f"{checkpoint.prefix}/rank-0001.bin")
        damaged = bytearray(data.read_bytes())
        damaged[100] ^= 1
        data.write_bytes(damaged)
    done = replay(ReplaySpec(storage_root=str(text_dataset.root), run_id=run.run_id, step=3))
    assert (done.start, [step["step"] for step in done.steps]) == (0, [1, 2, 3])
    assert done.largest_difference <= TOLERANCE


def test_what_was_passed_over_is_passed_over_again(run_ranks, text_dataset, tmp_path):
    poison = {"point": "step.loss", "step": 2, "rank": 1, "action": "scale", "factor": "nan"}
    run = run_of(text_dataset, "8e", stability={"on_nonfinite": "skip"})
    plan = plan_faults(tmp_path / "faults", poison)
    spec = attempt_of(text_dataset, run, tmp_path)
    run_ranks(2, with_faults, spec, free_port(), plan)
    done = replay(ReplaySpec(storage_root=str(text_dataset.root), run_id=run.run_id, step=4))
    assert done.steps[-1]["first_sample"] == 4 * run.training.global_batch_size
    assert done.largest_difference <= TOLERANCE


def with_faults(world, spec, port, plan):
    use_faults(plan)
    return rank_of_attempt(world, spec, port, 100)


def test_a_step_that_was_never_made(text_dataset, tmp_path):
    run = run_of(text_dataset, "ae")
    attempt_of(text_dataset, run, tmp_path)
    with pytest.raises(InputError, match="has no step 3: it made none yet"):
        replay(ReplaySpec(storage_root=str(text_dataset.root), run_id=run.run_id, step=3))
    spec = tmp_path / "spec.json"
    spec.write_text(json.dumps({"storage_root": str(text_dataset.root), "run_id": run.run_id, "step": 3}))
    command = [sys.executable, "-m", "training.replay", str(spec)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert json.loads(ended.stdout)["error"].startswith("The run toy (")
