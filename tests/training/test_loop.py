import math

import pytest
import torch

from headrace.errors import Terminal
from tests.training.toy import MemorySink, Notebook, alone, no_evaluation, run_spec, toy_training
from training.evaluation.evaluate import EvalResult
from training.loop import Training, train
from training.parallel.world import World
from training.state import TrainState


def events(training: Training, kind: str) -> list[dict]:
    assert isinstance(training.sink, MemorySink)
    return training.sink.of_kind(kind)


def calls(training: Training) -> list[tuple[str, int]]:
    assert isinstance(training.checkpoints, Notebook)
    return training.checkpoints.calls


def test_every_step_is_told_once_with_all_its_numbers():
    training = toy_training(alone(), run_spec(training={"precision": "float32"}))
    assert train(training) == "finished"
    steps = events(training, "step")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["tokens_seen"] for step in steps] == [128, 256, 384]
    assert [step["learning_rate"] for step in steps] == [training.state.schedule.learning_rate(n) for n in (1, 2, 3)]
    assert math.log(67) < steps[0]["loss"] < math.log(67) + 0.6  # untrained, its logits spread by about one
    assert all(step["grad_norm"] > 0 for step in steps)
    for step in steps:
        assert step["tokens_per_second"] == pytest.approx(128 / step["step_seconds"])
        assert 0 <= step["data_seconds"] <= step["step_seconds"]
        assert step["memory_bytes"] > 10_000_000


def test_loss_falls():
    training = toy_training(alone(), run_spec(training={"steps": 30, "precision": "float32"}))
    train(training)
    losses = [step["loss"] for step in events(training, "step")]
    assert losses[-1] < losses[0] - 0.5


def test_it_saves_when_due_and_at_the_end():
    training = toy_training(alone(), run_spec(training={"steps": 5}, checkpoint={"save_every": 2}))
    train(training)
    assert calls(training) == [("save", 2), ("save", 4), ("required", 5), ("wait", 0)]


def test_a_finished_run_does_nothing_but_make_sure_of_its_last_commit():
    training = toy_training(alone(), run_spec())
    training.state.step = 3
    assert train(training) == "finished"
    assert calls(training) == [("required", 3), ("wait", 0)]
    assert events(training, "step") == []


def evaluating(steps: int, every: int) -> Training:
    training = toy_training(alone(), run_spec(training={"steps": steps}, evaluation={"every": every}))
    result = EvalResult(2.0, math.exp(2.0), 1.5, 10.0, 5, 12, [], [], [])
    return Training(**{**vars(training), "evaluate": lambda: result})


def test_it_evaluates_before_the_first_step_when_due_and_at_the_end():
    training = evaluating(steps=5, every=2)
    train(training)
    told = events(training, "evaluation")
    assert [event["step"] for event in told] == [0, 2, 4, 5]
    assert told[0] | {"seconds": 0} == {
        "kind": "evaluation",
        "step": 0,
        "loss": 2.0,
        "perplexity": math.exp(2.0),
        "bits_per_byte": 1.5,
        "tokens": 5,
        "seconds": 0,
    }


def test_an_evaluation_comes_before_the_save_of_its_step():
    """So that a committed step has its evaluation in the event log."""
    order: list[str] = []

    class Noting(Notebook):
        def save_async(self, state: TrainState, *, required: bool = False) -> bool:
            order.append("save")
            return super().save_async(state, required=required)

    def evaluate() -> EvalResult:
        order.append("evaluate")
        return no_evaluation()

    run = run_spec(training={"steps": 2}, evaluation={"every": 1}, checkpoint={"save_every": 1})
    training = toy_training(alone(), run)
    train(Training(**{**vars(training), "evaluate": evaluate, "checkpoints": Noting()}))
    assert order == ["evaluate", "evaluate", "save", "evaluate", "save"]


def test_a_resumed_run_does_not_evaluate_its_first_step_again():
    training = evaluating(steps=3, every=100)
    training.state.step = 2
    train(training)
    assert [event["step"] for event in events(training, "evaluation")] == [3]


def test_stop_saves_at_the_current_step():
    asked = iter([False, True])
    training = toy_training(alone(), run_spec(), should_stop=lambda: next(asked))
    assert train(training) == "stopped"
    assert calls(training) == [("required", 1), ("wait", 0)]
    assert [step["step"] for step in events(training, "step")] == [1]


def stop_on_one_rank(world: World, rank: int) -> tuple[str, list[tuple[str, int]], int]:
    training = toy_training(world, run_spec(), should_stop=lambda: world.rank == rank and training.state.step == 2)
    return train(training), calls(training), training.state.step


def test_ranks_stop_together_when_one_was_asked(run_ranks):
    assert run_ranks(2, stop_on_one_rank, 1) == [("stopped", [("required", 2), ("wait", 0)], 2)] * 2


def loss_is_nan_on_one_rank(world: World, rank: int) -> str:
    training = toy_training(world, run_spec())
    if world.rank == rank:
        forward_backward = training.engine.forward_backward
        training.engine.forward_backward = lambda *args: forward_backward(*args) * math.nan
    before = {name: tensor.clone() for name, tensor in training.state.tensors().items()}
    with pytest.raises(Terminal) as error:
        train(training)
    after = training.state.tensors()
    assert all(torch.equal(before[name], after[name]) for name in before if name.startswith("model."))
    assert calls(training) == []
    return str(error.value)


def test_a_loss_that_is_no_number_ends_the_run_on_every_rank_and_nothing_is_saved(run_ranks):
    messages = run_ranks(2, loss_is_nan_on_one_rank, 1)
    assert messages[0] == messages[1]
    assert messages[0].startswith("Step 1 gave a loss of nan and a gradient norm of ")
    assert "Lower optimizer.learning_rate" in messages[0]


def test_loss_is_the_mean_over_valid_tokens_whatever_the_masks():
    """Against a sum by hand over the whole batch, in one go."""
    training = toy_training(alone(), run_spec(training={"steps": 1}, layout={"micro_batch_size": 3}), uneven=True)
    batch = training.batches.read(0)
    logits_BTV = training.engine.infer(batch.tokens_BT)
    valid = batch.targets_BT >= 0
    each = -torch.log_softmax(logits_BTV, dim=-1).gather(-1, batch.targets_BT.clamp(min=0)[..., None])[..., 0]
    train(training)
    (step,) = events(training, "step")
    assert step["tokens_seen"] == int(valid.sum()) < 128
    assert step["loss"] == pytest.approx(each[valid].mean().item(), rel=1e-12)
