"""Kill the command while it deletes old checkpoints: the run comes out the same, and only what should be is left."""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.chaos.harness import Lab, final_tensors
from tests.chaos.test_kills import SLOW_STEPS
from tests.mlflow_database import NOLOAD
from training.checkpoint.catalog import list_commits

pytestmark = [pytest.mark.chaos, pytest.mark.filterwarnings(NOLOAD)]

STEPS = 18
SAVE_EVERY = 3
POINTS = ("retention.before", "retention.commit_deleted", "retention.after")


def commits(lab: Lab, result: dict[str, Any]) -> list[int]:
    return [c.step for c in list_commits(lab.storage, f"runs/{result['run_id']}/artifacts")]


def answer(lab: Lab, *arguments: str) -> dict[str, Any]:
    done = lab.command("checkpoints", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def test_the_command_killed_while_it_deletes(new_lab: Callable[[str], Lab]) -> None:
    broken, clean = new_lab("broken"), new_lab("clean")
    for lab, last in ((broken, 2), (clean, 100)):
        lab.config["training"]["steps"] = STEPS
        lab.config["checkpoint"] = {"save_every": SAVE_EVERY, "keep_last": last}
        lab.config["stability"] = {"rewind_batches": 1}
        lab.config["evaluation"]["every"] = STEPS
    broken.plan(*({"point": point, "action": "kill", "target": "flow"} for point in POINTS), SLOW_STEPS)
    result, times = broken.run_until_done(most=len(POINTS) + 1)

    assert broken.fired() == len(POINTS)
    assert times == len(POINTS) + 1
    broken.assert_no_orphans()
    clean.plan(SLOW_STEPS)  # else saves that are due are left out, while the one before is being written
    expected = clean.run_to_the_end()
    assert final_tensors(broken.storage, result["run_id"]) == final_tensors(clean.storage, expected["run_id"])
    assert result["evaluation"] == expected["evaluation"]
    kept = commits(broken, result)
    assert len(kept) == 2, "what ranks save when their flow is gone may lie between two due saves"
    assert kept[0] == STEPS
    assert commits(clean, expected) == list(range(STEPS, 0, -SAVE_EVERY))

    broken.plan()
    assert answer(broken, "verify", "chaos", "--content")["damaged"] == 0
    [left] = answer(broken, "gc", "--all", "--dry-run")["runs"]
    assert (left["delete"], left["sweep"]) == ([], [])
    assert not answer(clean, "diff", f"chaos@{SAVE_EVERY}", f"chaos@{STEPS}")["equal"]
    folder = clean.folder / "model-6"
    document = answer(clean, "export", "chaos", "--step", "6", str(folder))
    assert (document["step"], document["target"]) == (6, str(folder))
    done = clean.command("generate", str(folder), "--prompt", "def ", "--json")
    assert done.returncode == 0, done.stderr
