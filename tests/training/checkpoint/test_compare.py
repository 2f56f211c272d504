"""Two checkpoints, tensor by tensor, over layouts; each byte verified."""

import json
import shutil

import pytest
import torch

from headrace.errors import DamagedData, InputError
from headrace.storage import Storage
from tasks.child import run_module
from tests.training.checkpoint.saved import claim, train_saved
from tests.training.toy import run_spec
from training.checkpoint.catalog import newest_at
from training.checkpoint.compare import compare, difference_of
from training.checkpoint.comparison import ComparisonSpec
from training.checkpoint.reader import read_tensors
from training.program import read_spec

RUN = run_spec(training={"steps": 4}, checkpoint={"save_every": 2})
WIDE = run_spec(run_id="1" * 32, model={"ffn_dim": 64}, training={"steps": 2})


@pytest.fixture(scope="module")
def trained(_warm_ranks, tmp_path_factory):
    """A run of two ranks, the same of one, and one of another model."""
    folder = tmp_path_factory.mktemp("compared")
    for name, ranks, run in (("two", 2, RUN), ("one", 1, RUN), ("wide", 1, WIDE)):
        _warm_ranks.run(ranks, train_saved, claim(folder / name, run))
    return folder


def spec(trained, first, second):
    """Each side is (store, run, step)."""
    sides = [
        {"storage_root": str(trained / name / "store"), "run_id": run.run_id, "step": step}
        for name, run, step in (first, second)
    ]
    return ComparisonSpec.model_validate({"first": sides[0], "second": sides[1]})


def by_status(result):
    found = {}
    for tensor in result["tensors"]:
        found.setdefault(tensor["status"], []).append(tensor["name"])
    return found


def test_a_checkpoint_equals_itself(trained):
    told = []
    result = compare(spec(trained, ("two", RUN, 4), ("two", RUN, 4)), lambda *progress: told.append(progress))
    assert result["equal"]
    assert by_status(result).keys() == {"equal"}
    assert told == [(done, len(told)) for done in range(len(told))]
    assert result["first"]["layout"]["world_size"] == 2
    assert result["first"] == result["second"]


def test_two_steps_differ_where_training_changed_something(trained):
    result = compare(spec(trained, ("two", RUN, 2), ("two", RUN, 4)), lambda *_: None)
    assert not result["equal"]
    sides = []
    for step in (2, 4):
        storage = Storage.open(trained / "two" / "store")
        checkpoint = newest_at(storage, RUN.run_prefix, step)
        sides.append(read_tensors(storage, checkpoint.prefix, checkpoint.commit))
    for tensor in result["tensors"]:
        one, other = (side[tensor["name"]] for side in sides)
        assert tensor["elements"] == one.numel()
        assert (tensor["status"] == "equal") == torch.equal(one, other)
        assert tensor["differing"] == int((one != other).sum())
        if tensor["status"] == "differs":
            assert tensor["max_abs_difference"] == float((one.double() - other.double()).abs().max())
    assert "model.embed.weight" in by_status(result)["differs"]


def test_other_layouts_compare_by_the_whole_tensors(trained):
    """One rank and two: the same up to rounding, and the random state of a second rank is only in one of them."""
    result = compare(spec(trained, ("two", RUN, 4), ("one", RUN, 4)), lambda *_: None)
    assert by_status(result)["only in the first"] == ["rng.rank0001"]
    differing = [tensor for tensor in result["tensors"] if tensor["name"].startswith(("model.", "optim."))]
    assert len(differing) > 10
    assert max(tensor["max_abs_difference"] or 0.0 for tensor in differing) < 1e-10
    assert result["second"]["layout"]["world_size"] == 1


def test_another_model_is_told_by_shapes(trained):
    result = compare(spec(trained, ("one", RUN, 2), ("wide", WIDE, 2)), lambda *_: None)
    found = {tensor["name"]: tensor for tensor in result["tensors"]}
    other = [name for name, tensor in found.items() if tensor["status"] == "other shape"]
    assert "model.layers.0.ffn.w1.weight" in other or len(other) >= 6
    assert found[other[0]]["detail"].startswith("float64[")


@pytest.mark.parametrize(
    ("one", "other", "differing", "largest"),
    [
        ([1.0, float("nan"), 3.0], [1.0, float("nan"), 3.0], 0, None),
        ([1.0, 2.0, 3.0], [1.0, 2.5, 1.0], 2, 2.0),
        ([1.0, float("nan"), 3.0], [1.0, 2.0, 4.0], 2, None),
        ([float("inf"), 1.0], [float("inf"), 1.0], 0, None),
        ([float("inf"), 1.0], [0.0, 1.0], 1, None),
        ([], [], 0, None),
    ],
)
def test_differences_of_values_that_are_not_finite(one, other, differing, largest):
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        found = difference_of("t", torch.tensor(one, dtype=dtype), torch.tensor(other, dtype=dtype))
        assert (found.differing, found.max_abs_difference) == (differing, largest)
        assert found.status == ("differs" if differing else "equal")


def test_whole_numbers_and_truth_values_compare_too():
    big = 2**62
    found = difference_of("t", torch.tensor([big, 5]), torch.tensor([big + 1, 5]))
    assert (found.status, found.differing) == ("differs", 1)
    found = difference_of("t", torch.tensor([True, False]), torch.tensor([True, True]))
    assert (found.differing, found.max_abs_difference) == (1, 1.0)
    assert difference_of("t", torch.tensor(3, dtype=torch.uint8), torch.tensor(3, dtype=torch.uint8)).status == "equal"


def test_a_damaged_byte_is_refused_never_compared(trained, tmp_path):
    shutil.copytree(trained / "two", tmp_path / "two")
    file = next((tmp_path / "two" / "store").rglob("step-00000004/*/rank-0000.bin"))
    data = bytearray(file.read_bytes())
    data[64] ^= 1
    file.write_bytes(data)
    with pytest.raises(DamagedData, match=r"rank-0000\.bin is damaged"):
        compare(spec(tmp_path, ("two", RUN, 2), ("two", RUN, 4)), lambda *_: None)


def test_a_step_that_was_never_committed_is_refused(trained):
    with pytest.raises(InputError, match="no committed checkpoint of step 3; its steps are: 2, 4"):
        compare(spec(trained, ("two", RUN, 3), ("two", RUN, 4)), lambda *_: None)


def test_as_a_process_of_its_own(trained, tmp_path):
    told = []
    document = spec(trained, ("two", RUN, 2), ("two", RUN, 4)).model_dump(mode="json")
    result = run_module("training.checkpoint.compare", document, folder=tmp_path / "scratch", on_report=told.append)
    assert not result["equal"]
    assert told[0] == {"progress": 0, "total": len(result["tensors"])}
    document["first"]["step"] = 3
    with pytest.raises(InputError, match="its steps are: 2, 4"):
        run_module("training.checkpoint.compare", document, folder=tmp_path / "scratch", on_report=told.append)


def test_a_spec_that_is_none_is_refused(tmp_path):
    (tmp_path / "spec.json").write_text(json.dumps({"first": {}}), encoding="utf-8")
    with pytest.raises(InputError, match="is not the spec of a comparison"):
        read_spec(ComparisonSpec, tmp_path / "spec.json", "a comparison")
