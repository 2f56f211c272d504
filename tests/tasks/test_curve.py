"""The loss of a run as a short table."""

import pytest

from tasks.curve import loss_curve, markdown
from tasks.runs import resolve_run
from tasks.train import TrainingSession, train
from tests.mlflow_database import NOLOAD
from tests.tasks.stand_ins import DATASET, make_request

pytestmark = pytest.mark.filterwarnings(NOLOAD)


def test_every_covered_step_of_a_short_run_and_what_was_measured(space, ranks):
    run = resolve_run(space, make_request(), DATASET)
    assert loss_curve(space.storage, run.spec.run_prefix) == []
    train.fn(space, run, TrainingSession())
    rows = loss_curve(space.storage, run.spec.run_prefix)
    assert [row["step"] for row in rows] == list(range(13))
    assert rows[0] == {"step": 0, "training loss": "", "validation bits per byte": "4.5000"}
    assert rows[12] == {"step": 12, "training loss": "0.5000", "validation bits per byte": ""}


def test_a_long_one_is_thinned_out_between_its_ends(space, ranks):
    run = resolve_run(space, make_request(), DATASET)
    train.fn(space, run, TrainingSession())
    rows = loss_curve(space.storage, run.spec.run_prefix, rows=5)
    assert [row["step"] for row in rows] == [0, 1, 5, 8, 12]


def test_in_markdown():
    rows = [{"step": 3, "training loss": "2.0000"}]
    assert markdown(rows) == "| step | training loss |\n|---:|---:|\n| 3 | 2.0000 |"
    assert markdown([]) == ""
