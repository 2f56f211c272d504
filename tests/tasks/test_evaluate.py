"""A score is measured once for what was measured on which weights."""

import pytest

from headrace.errors import DamagedData, InputError, NotFound, Terminal
from headrace.registry import Registry
from tasks.evaluate import evaluate, evaluation_spec, score
from tasks.export import export
from tasks.runs import DatasetRef, resolve_run
from tasks.train import TrainingSession, train
from tests.mlflow_database import NOLOAD
from tests.tasks.stand_ins import DATASET, Killed, die, make_request
from training.evaluation.config import EvaluationConfig

pytestmark = pytest.mark.filterwarnings(NOLOAD)


@pytest.fixture
def run(space):
    return resolve_run(space, make_request(), DATASET)


@pytest.fixture
def exported(space, run, ranks, stages):
    return export.fn(space, run, train.fn(space, run, TrainingSession()), "float32")


def test_the_score_is_measured_and_shown_on_the_model(space, run, exported, stages):
    result = evaluate.fn(space, run, exported)
    assert (result.bits_per_byte, result.scored.reused) == (2.0, False)
    assert result.scored.baselines["bigram_bits_per_byte"] == 3.0
    module, spec = stages.calls[-1]
    assert module == "training.evaluation.main"
    assert (spec["model"], spec["dataset_key"]) == (exported.prefix, DATASET.key)
    assert spec["spec"]["window"] == 32
    assert spec["spec"]["precision"] == "float32"
    metrics = space.tracker.client.get_logged_model(exported.model.model_id).metrics
    assert {m.key: m.value for m in metrics}["bits_per_byte"] == 2.0
    assert {m.dataset_digest for m in metrics} == {result.digest[:36]}


def test_it_is_found_again_and_shown_when_it_was_not(space, run, exported, stages, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(Registry, "log_model_points", die)
        with pytest.raises(Killed):
            evaluate.fn(space, run, exported)
    measured = len(stages.calls)
    again = evaluate.fn(space, run, exported)
    assert again.scored.reused
    assert len(stages.calls) == measured
    assert space.tracker.client.get_logged_model(exported.model.model_id).metrics


def test_another_evaluation_is_measured_and_trains_nothing(space, run, exported, stages, ranks):
    first = evaluate.fn(space, run, exported)
    changed = resolve_run(space, make_request(evaluation=EvaluationConfig(max_tokens=100)), DATASET)
    assert changed.run_id == run.run_id
    second = evaluate.fn(space, changed, exported)
    assert second.digest != first.digest
    assert not second.scored.reused
    assert len(ranks.specs) == 1
    assert len(space.storage.children(f"{run.spec.run_prefix}/evaluations")) == 2


def test_execution_fields_do_not_change_what_is_measured(space, run):
    other = resolve_run(space, make_request(evaluation=EvaluationConfig(every=3, batch_size=2)), DATASET)
    assert evaluation_spec(other).digest == evaluation_spec(run).digest


def test_exports_of_two_types_have_scores_of_their_own(space, run, exported, stages, ranks):
    other = export.fn(space, run, train.fn(space, run, TrainingSession()), "bfloat16")
    stages.scores[other.prefix] = 2.25
    assert evaluate.fn(space, run, exported).bits_per_byte == 2.0
    assert evaluate.fn(space, run, other).bits_per_byte == 2.25


@pytest.mark.parametrize(("loss", "tokens", "refused"), [(3.0, 100, False), (3.2, 100, True), (9.9, 50, False)])
def test_an_export_that_is_not_what_was_trained_is_not_registered(
    space, run, exported, monkeypatch, loss, tokens, refused
):
    """Case A41: chance-level scores without an error. On other tokens the losses say nothing about each other."""
    seen = {"kind": "evaluation", "step": exported.step, "loss": loss, "tokens": tokens}
    monkeypatch.setattr("tasks.evaluate.evaluation_in_training", lambda *_: seen)
    if not refused:
        assert evaluate.fn(space, run, exported).scored.summary["loss"] == 3.0
        return
    with pytest.raises(
        Terminal, match=r"has a validation loss of 3\.0000, but the training ended at step 12 with 3\.2000"
    ):
        evaluate.fn(space, run, exported)


def test_a_model_that_is_not_there_is_named(space, run):
    with pytest.raises(NotFound, match="no exported model"):
        score(space, run, evaluation_spec(run), DATASET, "runs/models/m-0/artifacts", owner=run.run_id)


def test_a_model_with_another_tokenizer_is_not_scored_on_these_tokens(space, run, exported):
    other = DatasetRef("other-1", "a" * 64, "b" * 64)
    spec = evaluation_spec(resolve_run(space, make_request(name="other"), other))
    with pytest.raises(InputError, match="another tokenizer"):
        score(space, run, spec, other, exported.prefix, owner=run.run_id)


def test_a_stage_process_that_leaves_nothing_is_noticed(space, run, exported, monkeypatch):
    monkeypatch.setattr("tasks.evaluate.run_module", lambda *_, **__: {})
    with pytest.raises(DamagedData, match="has no commit"):
        evaluate.fn(space, run, exported)
