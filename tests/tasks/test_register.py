"""One version for one export, and the alias on the best model by the same evaluation."""

import math
from types import SimpleNamespace

import pytest

from headrace.errors import TrackingUnavailable
from headrace.registry import Registry
from tasks.evaluate import MODEL_TAG, SPEC_TAG, evaluate
from tasks.export import EXPORT_TAG, export
from tasks.register import CHAMPION, register
from tasks.runs import SCORE_TAG, DatasetRef, resolve_run
from tasks.train import TrainingSession, train
from tests.mlflow_database import NOLOAD
from tests.tasks.stand_ins import DATA, DATASET, Killed, die, make_request
from training.evaluation.config import EvaluationConfig

pytestmark = pytest.mark.filterwarnings(NOLOAD)

OTHER_TOKENIZER = DatasetRef("tiny-1111111111111111", "a" * 64, "b" * 64)


@pytest.fixture
def pipeline(space, ranks, stages):
    """`pipeline(seed, score)`: a run with that seed whose model has that many bits per byte, registered as `tiny`."""

    def go(seed=1, score=2.0, dataset=DATASET, max_tokens=None, documents=()):
        identity = {"name": "tiny", "seed": seed}
        evaluation = EvaluationConfig(max_tokens=max_tokens)
        run = resolve_run(space, make_request(seed=seed, identity=identity, evaluation=evaluation), dataset)
        exported = export.fn(space, run, train.fn(space, run, TrainingSession()), "float32")
        stages.scores.setdefault(exported.prefix, score)
        stages.documents.setdefault(exported.prefix, documents)
        evaluated = evaluate.fn(space, run, exported)
        return register.fn(space, run, exported, evaluated, "tiny", DATA)

    return go


def champion(space):
    return Registry(space.tracker).version_by_alias("tiny", CHAMPION)


def versions(space):
    return [v.version for v in Registry(space.tracker).versions("tiny")]


def test_the_first_version_is_the_champion(space, pipeline):
    result = pipeline()
    assert (result.version, result.new_version, result.champion) == ("1", True, True)
    assert result.verdict == "it is the champion, as the first"
    holder = champion(space)
    assert holder.version == "1"
    assert holder.tags[SCORE_TAG] == "2.0"
    assert {EXPORT_TAG, SPEC_TAG, "headrace.run_id", "headrace.dataset_digest", "headrace.checkpoint_digest"} <= set(
        holder.tags
    )


def test_the_run_says_which_version_it_became(space, pipeline, ranks):
    pipeline()
    tags = space.tracker.get_run(ranks.specs[0].run.run_id).tags
    assert (tags["headrace.version"], tags[SCORE_TAG]) == ("tiny/1", "2.0")


def test_the_same_run_again_changes_nothing(space, pipeline):
    pipeline()
    again = pipeline()
    assert (again.version, again.new_version, again.champion, again.reused) == ("1", False, True, True)
    assert again.verdict == "it is the champion"
    assert versions(space) == ["1"]


def test_a_better_model_takes_the_alias(space, pipeline):
    pipeline(seed=1, score=2.0)
    result = pipeline(seed=2, score=1.9)
    assert (result.version, result.champion) == ("2", True)
    assert champion(space).version == "2"
    assert result.verdict == "it replaces version 1 as champion: 1.9000 bits per byte against 2.0000"


@pytest.mark.parametrize("score", [2.0, 2.1])
def test_a_model_that_is_not_better_leaves_the_alias(space, pipeline, score):
    pipeline(seed=1, score=2.0)
    result = pipeline(seed=2, score=score)
    assert (result.version, result.champion) == ("2", False)
    assert champion(space).version == "1"
    assert f"stays version 1: 2.0000 bits per byte, against {score:.4f}" in result.verdict


def test_the_worse_run_again_leaves_the_alias_again(space, pipeline):
    pipeline(seed=1, score=2.0)
    pipeline(seed=2, score=2.1)
    again = pipeline(seed=2)
    assert (again.version, again.new_version, again.champion) == ("2", False, False)
    assert versions(space) == ["1", "2"]


def test_a_champion_of_other_validation_bytes_is_scored_on_these(space, pipeline, stages):
    pipeline(seed=1, score=1.0)
    first_model = next(spec["model"] for module, spec in stages.calls if module.endswith("evaluation.main"))
    # Easier text before, harder text now: the champion's 1.0 must not be compared with these numbers.
    stages.scores[first_model] = 2.5
    other = DatasetRef("tiny-fedcba9876543210", "c" * 64, DATASET.tokenizer_digest)
    result = pipeline(seed=1, score=2.0, dataset=other)
    assert (result.version, result.champion) == ("2", True)
    assert "2.0000 bits per byte against 2.5000 (scored again on this evaluation)" in result.verdict
    rescored = stages.calls[-1][1]
    assert (rescored["model"], rescored["dataset_key"]) == (first_model, other.key)


def test_a_champion_is_scored_again_only_once(space, pipeline, stages):
    pipeline(seed=1, score=1.0)
    other = DatasetRef("tiny-fedcba9876543210", "c" * 64, DATASET.tokenizer_digest)
    pipeline(seed=1, score=2.0, dataset=other)
    before = len(stages.calls)
    again = pipeline(seed=1, dataset=other)
    assert not again.champion
    assert len(stages.calls) == before


@pytest.fixture
def retokenised(monkeypatch):
    """The same text as tokens of the champion's tokenizer, as the preparation would make it."""
    asked = []

    def prepare_dataset(storage, data, tokenizer, *, work_dir):
        asked.append((data, tokenizer))
        return SimpleNamespace(
            dataset_key="tiny-2222222222222222", digest="c" * 64, tokenizer_digest=DATASET.tokenizer_digest
        )

    monkeypatch.setattr("tasks.compare.prepare_dataset", prepare_dataset)
    return asked


# The first document's first token is no target, and the last one may be cut: only those between are compared.
CHAMPION_DOCUMENTS = [(99, 900.0), (1_000, 1_400.0), (2_000, 2_800.0), (7, 900.0)]


@pytest.mark.parametrize(("nats", "wins"), [(1_300.0, True), (1_500.0, False)])
def test_a_champion_with_another_tokenizer_reads_the_same_text(space, pipeline, stages, retokenised, nats, wins):
    pipeline(seed=1, score=9.0, documents=CHAMPION_DOCUMENTS)
    documents = [(98, 1.0), (1_000, nats), (2_000, 2 * nats), (50, 9_999.0), (60, 9_999.0)]
    result = pipeline(seed=1, score=9.5, dataset=OTHER_TOKENIZER, documents=documents)
    assert result.champion is wins
    assert champion(space).version == ("2" if wins else "1")
    mine, theirs = 3 * nats / math.log(2) / 3_000, 4_200 / math.log(2) / 3_000
    assert f"{mine:.4f}" in result.verdict
    assert f"{theirs:.4f} bits per byte" in result.verdict or f"against {theirs:.4f}" in result.verdict
    assert "(scored again with its own tokenizer, over 2 documents)" in result.verdict
    [(data, tokenizer)] = retokenised
    assert data == DATA
    assert tokenizer.eos_token == "<|end|>"
    assert tokenizer.path.endswith("tokenizer.json")
    assert stages.calls[-1][1]["dataset_key"] == "tiny-2222222222222222"


@pytest.mark.parametrize(
    ("documents", "told"),
    [
        ([(99, 1.0), (1_001, 1.0), (2_000, 1.0), (7, 1.0)], "document 1 has 1000 bytes instead of 1001"),
        ([(99, 1.0), (7, 1.0)], "too few documents"),
        ([], "too few documents"),
    ],
    ids=["other bytes", "too few", "none"],
)
def test_texts_that_differ_are_not_compared(space, pipeline, retokenised, documents, told):
    pipeline(seed=1, documents=CHAMPION_DOCUMENTS)
    result = pipeline(seed=1, score=0.1, dataset=OTHER_TOKENIZER, documents=documents)
    assert not result.champion
    assert champion(space).version == "1"
    assert "cannot be compared" in result.verdict
    assert told in result.verdict


def test_a_limited_evaluation_without_a_whole_document_is_done_in_full(space, pipeline, stages, retokenised):
    pipeline(seed=1, documents=CHAMPION_DOCUMENTS)
    short, whole = [(99, 1.0), (7, 1.0)], [(99, 1.0), (1_000, 1.0), (2_000, 1.0), (7, 1.0)]
    stages.limited = short
    result = pipeline(seed=1, score=3.0, max_tokens=100, dataset=OTHER_TOKENIZER, documents=whole)
    assert result.champion
    assert "over 2 documents" in result.verdict
    limits = [spec["spec"]["max_tokens"] for module, spec in stages.calls if module.endswith("evaluation.main")]
    assert limits == [None, 100, 100, None, None]


def test_a_champion_of_somebody_else_is_not_compared(space, pipeline, stages):
    pipeline(seed=1)
    registry = Registry(space.tracker)
    model = registry.get_model(champion(space).tags[MODEL_TAG])
    foreign = registry.create_version("tiny", model, run_id=champion(space).run_id, tags={})
    registry.set_alias("tiny", CHAMPION, foreign.version)
    result = pipeline(seed=2, score=0.1)
    assert not result.champion
    assert "it was not registered by headrace" in result.verdict
    assert champion(space).version == foreign.version


def test_a_changed_evaluation_is_told_on_the_version(space, pipeline):
    first = pipeline()
    before = champion(space).tags[SPEC_TAG]
    second = pipeline(max_tokens=50)
    assert (second.version, second.new_version, second.champion) == (first.version, False, True)
    assert champion(space).tags[SPEC_TAG] != before


@pytest.mark.parametrize("point", ["version.before", "version.after", "alias.before"])
def test_killed_anywhere_there_is_one_version_at_the_end(space, pipeline, monkeypatch, point):
    with monkeypatch.context() as patch:
        patch.setattr("tasks.register.fault_point", lambda name: die() if name == point else None)
        with pytest.raises(Killed):
            pipeline()
    assert champion(space) is None
    result = pipeline()
    assert versions(space) == ["1"]
    assert champion(space).version == result.version
    assert result.new_version == (point == "version.before")


def test_mlflow_that_goes_away_while_the_version_is_made_may_be_tried_again(space, pipeline, monkeypatch):
    real = Registry.create_version

    def lose_the_answer(self, *arguments, **options):
        real(self, *arguments, **options)
        raise TrackingUnavailable("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(Registry, "create_version", lose_the_answer)
        with pytest.raises(TrackingUnavailable):
            pipeline()
    pipeline()
    assert versions(space) == ["1"]


def test_a_champion_whose_files_are_gone_is_not_replaced_silently(space, pipeline, stages):
    pipeline(seed=1, score=2.0)
    first_model = next(spec["model"] for module, spec in stages.calls if module.endswith("evaluation.main"))
    space.storage.delete_prefix(first_model)
    other = DatasetRef("tiny-fedcba9876543210", "c" * 64, DATASET.tokenizer_digest)
    result = pipeline(seed=1, score=1.0, dataset=other)
    assert not result.champion
    assert "there is no exported model" in result.verdict
