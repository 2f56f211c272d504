"""Starting from another model's weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import ConfigError, DamagedData, InputError
from headrace.storage import Storage
from tests.training.test_main import STEPS, attempt_of, events_of, free_port, rank_of_attempt, run_of
from tests.training.toy import alone, toy_training
from training.checkpoint.catalog import newest_at
from training.checkpoint.reader import read_tensors
from training.export.main import export
from training.export.spec import ExportSpec
from training.origin import read_origin

SOURCE = "a" * 32


@pytest.fixture(scope="module")
def source(_warm_ranks, text_dataset, tmp_path_factory) -> dict[str, np.ndarray]:
    """A finished run on the store, exported to `models/origin`; its last weights by FQN."""
    run = run_of(text_dataset, "a")
    spec = attempt_of(text_dataset, run, tmp_path_factory.mktemp("source"))
    _warm_ranks.run(1, rank_of_attempt, spec, free_port())
    storage = Storage.open(text_dataset.root)
    checkpoint = newest_at(storage, run.run_prefix, STEPS)
    export(
        ExportSpec(
            storage_root=str(text_dataset.root),
            run_id=run.run_id,
            checkpoint=checkpoint.restore_point,
            target="models/origin",
        )
    )
    stored = read_tensors(storage, checkpoint.prefix, checkpoint.commit, wanted=lambda name: name.startswith("model."))
    return {name.removeprefix("model."): tensor.numpy() for name, tensor in stored.items()}


def start_of(text_dataset: Any, run_ranks: Any, tmp_path: Path, run_id: str, init_from: str) -> tuple[Any, list[dict]]:
    """The first checkpoint of a run that starts from `init_from` with a learning rate of nearly nothing, and events."""
    run = run_of(
        text_dataset,
        run_id,
        training={"steps": 1, "precision": "float32", "init_from": init_from},
        optimizer={"learning_rate": 1e-30, "weight_decay": 0.0},
    )
    spec = attempt_of(text_dataset, run, tmp_path)
    results = run_ranks(2, rank_of_attempt, spec, free_port())
    assert [result.outcome for result in results] == ["finished"] * 2
    storage = Storage.open(text_dataset.root)
    checkpoint = newest_at(storage, run.run_prefix, 1)
    return read_tensors(storage, checkpoint.prefix, checkpoint.commit), events_of(spec)


@pytest.mark.parametrize("kind", ["run", "hf"])
def test_weights_are_taken_and_everything_else_begins_anew(run_ranks, text_dataset, tmp_path, source, kind):
    init_from = f"run:{SOURCE}@{STEPS}" if kind == "run" else f"hf://{text_dataset.root}/models/origin"
    tensors, events = start_of(text_dataset, run_ranks, tmp_path, "b" if kind == "run" else "c", init_from)
    for fqn, expected in source.items():
        assert np.array_equal(tensors[f"model.{fqn}"].numpy(), expected), fqn
        assert tensors[f"optim.{fqn}.step"].item() == 1.0
    (step,) = [event for event in events if event["kind"] == "step"]
    assert (step["step"], step["learning_rate"]) == (1, 0.5e-30)  # the first of two warm-up steps
    assert [event["kind"] for event in events[:2]] == ["attempt.started", "weights.loaded"]
    loaded = events[1]
    assert loaded["init_from"] == init_from
    if kind == "run":
        assert (loaded["run_id"], loaded["checkpoint_step"], loaded["checkpoint_attempt"]) == (SOURCE, STEPS, 1)
        assert len(loaded["checkpoint_digest"]) == 64
    else:
        assert loaded["folder"] == f"{text_dataset.root}/models/origin"


def test_a_later_attempt_goes_on_from_its_own_checkpoint_not_from_the_origin(run_ranks, text_dataset, tmp_path, source):
    run = run_of(text_dataset, "d", training={"steps": 3, "init_from": f"run:{SOURCE}@{STEPS}"})
    first = attempt_of(text_dataset, run, tmp_path)
    run_ranks(1, rank_of_attempt, first, free_port(), 1)
    second = attempt_of(text_dataset, run, tmp_path)
    run_ranks(1, rank_of_attempt, second, free_port())
    kinds = [event["kind"] for event in events_of(second)]
    assert kinds[:2] == ["attempt.started", "checkpoint.loaded"]
    assert "weights.loaded" not in kinds


def model_of(text_dataset: Any, **changes: Any) -> Any:
    return run_of(text_dataset, "e", model=changes).model


@pytest.mark.parametrize(
    ("init_from", "error", "message"),
    [
        (f"run:{SOURCE}@3000", InputError, "no committed checkpoint of step 3000; its steps are: "),
        (f"run:{'9' * 32}@1", InputError, "no committed checkpoint of step 1; its steps are: none"),
        ("hf:///nowhere/at/all", InputError, "config.json"),
        ("run:short@1", ConfigError, "must be run:ID@STEP or hf://FOLDER"),
    ],
)
def test_a_source_that_is_not_there_is_named(text_dataset, source, init_from, error, message):
    with pytest.raises(error, match=message):
        read_origin(Storage.open(text_dataset.root), init_from, model_of(text_dataset))


def test_another_model_is_refused_tensor_by_tensor(text_dataset, source):
    storage = Storage.open(text_dataset.root)
    with pytest.raises(ConfigError, match=r"layers.2.attn_norm.weight is missing there; .* and 5 more"):
        read_origin(storage, f"run:{SOURCE}@{STEPS}", model_of(text_dataset, num_layers=3))
    with pytest.raises(ConfigError, match=r"layers.0.ffn.w_gate.weight has shape \[48, 32\] there and \[64, 32\] here"):
        read_origin(storage, f"run:{SOURCE}@{STEPS}", model_of(text_dataset, ffn_dim=64))
    with pytest.raises(ConfigError, match=r"layers.1.attn_norm.weight exists only there"):
        read_origin(storage, f"hf://{text_dataset.root}/models/origin", model_of(text_dataset, num_layers=1))


def test_a_damaged_source_is_refused(text_dataset, source, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in (text_dataset.root / "models/origin").iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (copy / "model.safetensors").write_bytes(data)
    with pytest.raises(DamagedData, match=r"model\.safetensors"):
        read_origin(Storage.open(text_dataset.root), f"hf://{copy}", model_of(text_dataset))


def test_weights_of_the_source_are_not_those_of_the_seed(source, text_dataset):
    drawn = toy_training(alone(), run_of(text_dataset, "e")).state.parameters
    assert not np.array_equal(drawn["embed.weight"].detach().numpy(), source["embed.weight"])
