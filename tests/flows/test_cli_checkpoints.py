"""`headrace checkpoints` in one process, on runs of stand-in ranks: documents, tables and exit codes."""

import json

import pytest

from flows import cli
from headrace.environment import home
from headrace.errors import AttemptFailed, InputError
from headrace.lease import hold
from headrace.storage import Storage
from headrace.tracking import Tracker
from tasks.export import export
from tasks.runs import Workspace, lease_key, resolve_run
from tasks.train import TrainingSession, train
from tests.mlflow_database import NOLOAD, new_database
from tests.tasks.stand_ins import DATASET, FakeRanks, FakeStages, make_request
from training.checkpoint.catalog import checkpoint_prefix, list_commits, newest_at, quarantine
from training.checkpoint.config import CheckpointConfig

pytestmark = pytest.mark.filterwarnings(NOLOAD)


@pytest.fixture
def space(tmp_path, monkeypatch):
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    tracker = Tracker.connect(f"sqlite:///{new_database(home())}")
    return Workspace(Storage.open(tmp_path / "runs" / "store"), tracker, home() / "work")


@pytest.fixture
def ranks(monkeypatch):
    fake = FakeRanks()
    monkeypatch.setattr("tasks.train.run_attempt", fake)
    return fake


@pytest.fixture
def run(space, ranks):
    """A finished run of two attempts, with commits of steps 2 to 12; a save of the first one was killed."""
    ranks.ends = [6, None]
    run = resolve_run(space, make_request(checkpoint=CheckpointConfig(save_every=2, keep_last=100)), DATASET)
    with pytest.raises(AttemptFailed):
        train.fn(space, run, TrainingSession())
    train.fn(space, run, TrainingSession())
    space.storage.write_bytes(f"{folder(run, 7, 1)}/rank-0000.bin", b"half a save")
    return run


def folder(run, step, attempt):
    return checkpoint_prefix(run.spec.run_prefix, step=step, attempt=attempt)


def steps(space, run):
    return [c.step for c in list_commits(space.storage, run.spec.run_prefix)]


@pytest.fixture
def command(capfd):
    """Runs `headrace checkpoints ...`; the exit code, standard output and standard error."""

    def call(*arguments):
        capfd.readouterr()
        code = cli.execute(["checkpoints", *arguments])
        out, err = capfd.readouterr()
        return code, out, err

    return call


def document(answer):
    code, out, _ = answer
    return code, json.loads(out)


# -------------------------------------------------------------------------------------------------------------- ls


def test_every_folder_is_listed_with_its_state(space, run, command, monkeypatch):
    monkeypatch.setattr("tasks.export.run_module", FakeStages(space.storage))
    exported = export.fn(space, run, train.fn(space, run, TrainingSession()), "float32")
    quarantine(space.storage, newest_at(space.storage, run.spec.run_prefix, 10), reason="a byte", found_by_attempt=2)
    code, found = document(command("ls", "tiny", "--json"))
    assert code == 0
    assert (found["run_id"], found["name"]) == (run.run_id, "tiny")
    states = {(line["step"], line["attempt"]): line["state"] for line in found["checkpoints"]}
    assert states == {
        (12, 2): "usable",
        (10, 2): "damaged",
        (8, 2): "usable",
        (7, 1): "incomplete",
        (6, 1): "usable",
        (4, 1): "usable",
        (2, 1): "usable",
    }
    newest = found["checkpoints"][0]
    assert newest["kept_for"] == [f"exported as model {exported.model.model_id}"]
    assert newest["bytes"] == sum(space.storage.sizes(folder(run, 12, 2)).values())
    code, out, err = command("ls", run.run_id[:8])
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0].split() == ["step", "attempt", "state", "size", "ranks", "notes"]
    assert lines[1].split()[:3] == ["12", "2", "usable"]
    assert "was set aside: a byte" in lines[2]


def test_what_a_later_attempt_went_back_behind_is_beside_the_chain(space, run, command):
    space.storage.write_json(f"{run.spec.run_prefix}/rewinds/0002.json", {})
    space.storage.delete(f"{run.spec.run_prefix}/attempts/0002.json")
    found = document(command("ls", "tiny", "--json"))[1]
    assert {line["state"] for line in found["checkpoints"] if line["attempt"] == 2} == {"beside"}


def test_a_run_without_checkpoints_says_so(space, ranks, command):
    resolve_run(space, make_request(), DATASET)
    assert command("ls", "tiny")[::2] == (0, "The run tiny has no checkpoints yet.\n")
    assert document(command("ls", "tiny", "--json"))[1]["checkpoints"] == []
    assert command("verify", "tiny")[::2] == (0, "The run tiny has no checkpoints yet.\n")
    code, _, err = command("export", "tiny", "somewhere")
    assert (code, "has no usable checkpoint yet" in err) == (2, True)


@pytest.mark.parametrize("words", ["ls x", "verify x", "gc x", "export x d", "diff x@1 x@2"])
def test_a_name_that_is_no_run_is_refused(space, run, command, words):
    code, out, err = command(*words.split())
    assert (code, out) == (2, "")
    assert "There is no run 'x'. Runs by name: tiny" in err
    code, found = document(command(*words.split(), "--json"))
    assert code == found["exit_code"] == 2


# ---------------------------------------------------------------------------------------------------------- verify


def test_whole_checkpoints_are_exit_code_0(run, command):
    code, found = document(command("verify", "tiny", "--content", "--json"))
    assert (code, found["damaged"], found["content"]) == (0, 0, True)
    assert [c["step"] for c in found["checkpoints"]] == [12, 10, 8, 6, 4, 2]
    code, out, err = command("verify", "tiny")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split()[-1] == "whole"


def test_damaged_files_are_named_and_exit_code_1(space, run, command):
    place = f"{folder(run, 8, 2)}/rank-0000.bin"
    space.storage.write_bytes(place, b"state of step 9")
    assert command("verify", "tiny")[0] == 0, "the size is right"
    code, found = document(command("verify", "tiny", "--content", "--json"))
    assert (code, found["damaged"]) == (1, 1)
    damaged = next(c for c in found["checkpoints"] if c["step"] == 8)
    assert not damaged["ok"]
    assert [d["file"] for d in damaged["damage"]] == ["rank-0000.bin"]
    code, out, err = command("verify", "tiny", "--step", "8", "--content")
    assert code == 1
    assert "DAMAGED" in out
    assert f"{space.storage.url(place)}: its content is not that of the commit" in err
    assert command("verify", "tiny", "--step", "6", "--content")[0] == 0
    assert steps(space, run) == [12, 10, 8, 6, 4, 2], "nothing is changed"


def test_a_step_without_a_checkpoint_is_refused(run, command):
    code, _, err = command("verify", "tiny", "--step", "5")
    assert code == 2
    assert "has no committed checkpoint of step 5; its steps are: 2, 4, 6, 8, 10, 12." in err


# -------------------------------------------------------------------------------------------------------------- gc


def test_a_dry_run_says_what_the_command_then_does(space, run, command):
    code, planned = document(command("gc", "tiny", "--keep-last", "2", "--dry-run", "--json"))
    assert code == 0
    assert steps(space, run) == [12, 10, 8, 6, 4, 2]
    code, done = document(command("gc", "tiny", "--keep-last", "2", "--json"))
    assert code == 0
    [before], [after] = planned["runs"], done["runs"]
    assert [v["step"] for v in after["delete"]] == [2, 4, 6, 8]
    assert [v["step"] for v in after["sweep"]] == [7]
    assert (after["read_back"], after["complete"], before["complete"]) == (12, True, False)
    for part in ("keep", "delete", "sweep", "uploads", "bytes", "read_back"):
        assert before[part] == after[part]
    assert steps(space, run) == [12, 10]
    code, again = document(command("gc", "tiny", "--keep-last", "2", "--json"))
    assert (again["runs"][0]["delete"], again["runs"][0]["sweep"]) == ([], [])


def test_without_options_what_the_newest_attempt_was_told_counts(space, run, command):
    code, out, err = command("gc", "tiny", "--dry-run")
    assert code == 0
    assert [line.split()[:3] for line in out.splitlines()[1:]] == [
        *(["stays", step, "2"] for step in ("12", "10", "8")),
        *(["stays", step, "1"] for step in ("6", "4", "2")),
        ["goes", "7", "1"],
    ]
    assert err == "tiny: would delete 1 folders, 11 B\n"
    assert command("gc", "tiny")[2] == "tiny: deleted 1 folders, 11 B\n"
    assert steps(space, run) == [12, 10, 8, 6, 4, 2]


def test_a_run_in_use_is_left_to_its_own_command(space, run, command):
    with hold(space.storage, lease_key(run.run_id)):
        code, _, err = command("gc", "tiny", "--keep-last", "2")
        assert code == 1
        assert "is worked on by process" in err
        assert command("gc", "tiny", "--keep-last", "2", "--dry-run")[0] == 0
        code, found = document(command("gc", "--all", "--keep-last", "2", "--json"))
        assert code == 0
        assert "worked on by" in found["runs"][0]["left_out"]
        assert len(steps(space, run)) == 6
    assert command("gc", "tiny", "--keep-last", "2")[0] == 0
    assert not space.storage.exists(lease_key(run.run_id))


def test_all_runs_at_once_and_one_that_cannot_be_read_stops_no_other(space, run, command):
    other = resolve_run(space, make_request(name="other", seed=2, identity={"seed": 2}), DATASET)
    train.fn(space, other, TrainingSession())
    empty = resolve_run(space, make_request(name="empty", seed=3, identity={"seed": 3}), DATASET)
    space.storage.delete(f"{empty.spec.run_prefix}/run.json")
    code, found = document(command("gc", "--all", "--keep-last", "2", "--json"))
    assert code == 0
    assert [r["name"] for r in found["runs"]] == ["tiny", "other", "empty"]
    assert (steps(space, run), steps(space, other)) == ([12, 10], [12, 8])
    space.storage.write_bytes(f"{other.spec.run_prefix}/attempts/0001.json", b"{")
    code, found = document(command("gc", "--all", "--json"))
    assert code == 1
    assert ["left_out" in r for r in found["runs"]] == [False, True, True]


@pytest.mark.parametrize("words", [["gc"], ["gc", "tiny", "--all"], ["gc", "tiny", "--keep-last", "1"]])
def test_gc_takes_one_run_or_all_and_keeps_two(space, run, command, words):
    assert command(*words)[0] == 2
    assert len(steps(space, run)) == 6


# ---------------------------------------------------------------------------------------------------- export and diff


def test_an_export_goes_to_the_folder_that_was_named(space, run, command, monkeypatch, tmp_path):
    calls = []

    def run_module(module, spec, *, folder, on_report):
        calls.append((module, spec))
        return {"target": spec["target"], "digest": "d", "step": spec["checkpoint"]["step"], "files": [], "bytes": 5}

    monkeypatch.setattr("flows.checkpoints.run_module", run_module)
    target = tmp_path / "with space" / "model-6"
    code, out, _ = command("export", "tiny", str(target), "--step", "6", "--dtype", "bfloat16")
    assert (code, out) == (0, f"{target}\n")
    module, spec = calls[0]
    assert module == "training.export.main"
    assert (spec["target_root"], spec["target"], spec["dtype"]) == (str(target.parent), "model-6", "bfloat16")
    assert spec["checkpoint"] == {"attempt": 1, "step": 6}
    code, found = document(command("export", "tiny", str(target), "--json"))
    assert (found["target"], found["step"], found["attempt"]) == (str(target), 12, 2)


def test_a_folder_of_something_else_is_refused(run, command, tmp_path):
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, told in (("notes", "is not empty"), ("file", "is a file"), ("a b", "cannot be used")):
        code, _, err = command("export", "tiny", str(tmp_path / name))
        assert code == 2
        assert told in err
    assert command("export", "tiny", str(tmp_path / "m"), "--step", "5")[0] == 2


def test_a_comparison_is_a_table_or_a_document(run, command, monkeypatch):
    tensors = [
        {"name": "a", "status": "equal", "detail": "", "elements": 9, "differing": 0, "max_abs_difference": None},
        {"name": "b", "status": "differs", "detail": "", "elements": 9, "differing": 3, "max_abs_difference": 0.25},
        {"name": "c", "status": "differs", "detail": "", "elements": 9, "differing": 3, "max_abs_difference": None},
        {"name": "d", "status": "only in the first", "detail": "", "elements": 0, "differing": 0},
    ]
    result = {"equal": False, "first": {}, "second": {}, "tensors": tensors}

    def run_module(module, spec, *, folder, on_report):
        assert [spec[side]["step"] for side in ("first", "second")] == [6, 12]
        on_report({"progress": 1, "total": 4})
        return result

    monkeypatch.setattr("flows.checkpoints.run_module", run_module)
    code, out, err = command("diff", "tiny@6", f"{run.run_id[:6]}@12")
    assert code == 0
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["b", "differs", "3", "of", "9", "0.25"],
        ["c", "differs", "3", "of", "9", "not", "finite"],
        ["d", "only", "in", "the", "first"],
    ]
    assert "4 tensors: 2 differs, 1 equal, 1 only in the first" in err
    code, found = document(command("diff", "tiny@6", "tiny@12", "--json"))
    assert (code, found) == (0, result)


@pytest.mark.parametrize(
    ("first", "told"),
    [
        ("tiny", "'tiny' names no checkpoint. Give RUN@STEP"),
        ("tiny@", "names no checkpoint"),
        ("@4", "names no checkpoint"),
        ("tiny@last", "names no checkpoint"),
        ("tiny@5", "no committed checkpoint of step 5; its steps are: 2, 4, 6, 8, 10, 12"),
    ],
)
def test_what_names_no_checkpoint_is_refused(run, command, first, told):
    code, _, err = command("diff", first, "tiny@12")
    assert code == InputError.exit_code
    assert told in err
