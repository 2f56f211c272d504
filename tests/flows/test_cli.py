"""The command line in one process: exit codes, one document with --json, one sentence without."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from flows import cli
from flows.look import RunLine
from flows.result import PretrainResult, Scores, StageResult
from headrace import errors
from training.export.folder import to_hf_config
from training.health.goodput import account
from training.model.config import ModelConfig

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
README = Path(__file__).parents[2] / "README.md"

LLAMA = to_hf_config(ModelConfig(), dtype="float32", eos_id=0, bos_id=None)

RESULT = PretrainResult(
    run_id="a" * 32,
    run_key="b" * 64,
    name="tiny",
    dataset="tiny-1",
    step=12,
    attempts=2,
    stages=(StageResult(name="train", outcome="done", seconds=12.34, detail="step 12"),),
    bits_per_byte=Scores(model=1.7, untrained=4.5, unigram=2.8, bigram=2.2),
    evaluation={"loss": 2.0},
    model_name="tiny",
    version="1",
    new_version=True,
    champion=True,
    verdict="it is the champion, as the first",
    export="file:///store/runs/models/m-1/artifacts",
    seconds=20.0,
    pages={},
)


@pytest.fixture
def pipeline(monkeypatch):
    """What `headrace run` would come back with, or raise."""
    outcome = SimpleNamespace(value=RESULT, config=None)

    def run_pipeline(config, terminal):
        outcome.config = config
        if isinstance(outcome.value, BaseException):
            raise outcome.value
        return outcome.value

    monkeypatch.setattr("flows.command.run_pipeline", run_pipeline)
    return outcome


# ------------------------------------------------------------------------------------------------------------- run


def test_a_run_ends_with_one_summary(pipeline, capfd):
    assert cli.execute(["run", str(QUICKSTART)]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "train" in err
    assert "against untrained 4.500, unigram 2.800, bigram 2.200" in err
    assert "of tiny: it is the champion, as the first" in err
    rows = [line.split() for line in err.splitlines()]
    assert ["attempts", "2", "over", "the", "whole", "life", "of", "the", "run"] in rows
    assert ["all", "of", "it", "20.0", "s", "of", "this", "command"] in rows
    assert 'headrace generate tiny --prompt "..."' in err
    assert "headrace ui" in err
    assert "http" not in err, "no page without a server"


def test_the_summary_in_the_readme_has_the_rows_of_a_real_one():
    shown = README.read_text(encoding="utf-8").partition("quickstart: run ")[2].partition("```")[0].splitlines()
    labels = [line.strip().split("  ")[0] for line in shown[1:]]
    stages = ["prepare", "train", "export", "evaluate", "register"]
    own = [row[0] for row in RESULT.rows()[len(RESULT.stages) :]]
    assert labels == [*stages, *own, 'next: headrace generate quickstart --prompt "..."']


def test_pages_are_printed_when_they_are_live(pipeline, capfd):
    page = "http://127.0.0.1:5000/#/experiments/1/runs/a?workflowType=machine_learning"
    pipeline.value = RESULT.model_copy(update={"pages": {"MLflow": page}})
    assert cli.execute(["run", str(QUICKSTART)]) == 0
    err = capfd.readouterr().err
    assert page in err
    assert "headrace ui" not in err


def test_with_json_standard_output_is_one_document(pipeline, capfd):
    assert cli.execute(["run", str(QUICKSTART), "--json", "--set", "training.steps=77"]) == 0
    out, _ = capfd.readouterr()
    document = json.loads(out)
    assert document["stages"] == [{"name": "train", "outcome": "done", "seconds": 12.34, "detail": "step 12"}]
    assert (document["version"], document["champion"]) == ("1", True)
    assert pipeline.config.training.steps == 77


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Terminal("three attempts in a row"), 1),
        (errors.StorageUnavailable("the store is away"), 1),
        (errors.TrackingUnavailable("MLflow is away"), 1),
        (errors.DamagedData("a digest differs"), 1),
        (errors.StorageFull("the disk is full"), 1),
        (errors.ConfigError("a wrong key"), 2),
        (errors.InputError("an empty corpus"), 2),
        (errors.Cancelled("stopped at step 6"), 3),
        (errors.Preempted("made room"), 3),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_each_kind_of_failure_has_its_code_and_one_sentence(pipeline, capfd, error, code):
    pipeline.value = error
    assert cli.execute(["run", str(QUICKSTART)]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert err.strip().endswith(f"Error: {error}")
    assert "Traceback" not in err

    assert cli.execute(["run", str(QUICKSTART), "--json"]) == code
    document = json.loads(capfd.readouterr().out)
    assert document == {"error": {"kind": type(error).__name__, "message": str(error)}, "exit_code": code}


def test_ctrl_c_is_stopped_and_resumable(pipeline, capfd):
    pipeline.value = KeyboardInterrupt()
    assert cli.execute(["run", str(QUICKSTART), "--json"]) == 3
    assert "same command continues" in json.loads(capfd.readouterr().out)["error"]["message"]


def test_a_defect_keeps_its_traceback(pipeline):
    pipeline.value = RuntimeError("a defect")
    with pytest.raises(RuntimeError, match="a defect"):
        cli.execute(["run", str(QUICKSTART)])


def test_a_reader_that_has_seen_enough_is_no_failure(monkeypatch):
    def broken(*_):
        raise BrokenPipeError

    monkeypatch.setattr("flows.cli._load", broken)
    assert cli.execute(["validate", str(QUICKSTART)]) == 0


# ------------------------------------------------------------------------------------------------------------ usage


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run"], "Missing argument 'CONFIG'"),
        (["run", str(QUICKSTART), "--sett", "a=b"], "No such option: --sett"),
        (["launch"], "No such command 'launch'"),
        (["runs", "list"], "No such command 'list'"),
        (["generate", "x"], "Missing option '--prompt'"),
        (["ui", "--port", "many"], "--port"),
        (["ui", "--port", "65536"], "--port"),
        (["up", "--mlflow-port", "-1"], "--mlflow-port"),
    ],
    ids=lambda value: " ".join(value)[:20] if isinstance(value, list) else "",
)
def test_wrong_usage_is_code_2_and_names_the_help(capfd, arguments, told):
    assert cli.execute(arguments) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert told in err
    assert "--help`" in err
    assert cli.execute([*arguments, "--json"]) == 2
    assert told in json.loads(capfd.readouterr().out)["error"]["message"]


@pytest.mark.parametrize("group", [[], ["runs"]], ids=["headrace", "headrace runs"])
def test_a_group_alone_prints_its_help_as_usage(capfd, group):
    assert cli.execute([*group, "--help"]) == 0
    wanted = capfd.readouterr().out
    assert cli.execute(group) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.strip() == wanted.strip()


# ------------------------------------------------------------------------------------------------------------- runs


LINES = [
    RunLine("a" * 32, "tiny", "FINISHED", 12, 12, 2, "tiny-1", 1.7, "tiny/1"),
    RunLine("b" * 32, "other", "INTERRUPTED", 0, 100, 1, "other-1", None, None),
]


def test_runs_are_a_table_or_a_document(monkeypatch, capfd):
    monkeypatch.setattr("flows.look.list_runs", lambda: LINES)
    assert cli.execute(["runs", "ls"]) == 0
    lines = capfd.readouterr().out.splitlines()
    assert lines[1].split() == ["a" * 32, "tiny", "FINISHED", "12/12", "2", "1.700", "tiny/1"]
    assert lines[2].split() == ["b" * 32, "other", "INTERRUPTED", "0/100", "1"]
    assert cli.execute(["runs", "ls", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["runs"][0]["bits_per_byte"] == 1.7


def test_without_runs_the_next_command_is_named(monkeypatch, capfd):
    monkeypatch.setattr("flows.look.list_runs", list)
    assert cli.execute(["runs", "ls"]) == 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "headrace init DATA" in err
    assert cli.execute(["runs", "ls", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"runs": []}


def test_a_run_is_shown_as_yaml_or_as_a_document(monkeypatch, capfd):
    monkeypatch.setattr("flows.look.show_run", lambda name: {"run_id": name, "checkpoints": [{"step": 4}]})
    assert cli.execute(["runs", "show", "tiny"]) == 0
    assert capfd.readouterr().out == "run_id: tiny\ncheckpoints:\n- step: 4\n"
    assert cli.execute(["runs", "show", "tiny", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"run_id": "tiny", "checkpoints": [{"step": 4}]}


@pytest.mark.parametrize(
    "arguments",
    [
        ["runs", "show", "nope"],
        ["generate", "nope", "--prompt", "x"],
        ["generate", "models:/nope/3", "--prompt", "x"],
        ["generate", "0" * 32, "--prompt", "x"],
        ["run", "nope.yaml"],
        ["validate", "nope.yaml"],
        ["init", "nope"],
        ["trigger", "--config", "nope.yaml"],
    ],
    ids=" ".join,
)
def test_a_name_of_nothing_is_refused_input(arguments, monkeypatch, tmp_path, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert cli.execute(arguments) == 2
    assert re.search("does not exist|There is no", capfd.readouterr().err)


def test_generated_text_follows_its_prompt(monkeypatch, capfd):
    monkeypatch.setattr("flows.command.continue_text", lambda model, prompt: (Path("/m") / model, " there was"))
    assert cli.execute(["generate", "tiny", "--prompt", "Once"]) == 0
    assert capfd.readouterr().out == "Once there was\n"
    assert cli.execute(["generate", "tiny", "--prompt", "Once", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"model": "/m/tiny", "prompt": "Once", "text": " there was"}


def test_the_page_of_the_ui_is_what_is_on_standard_output(monkeypatch, capfd):
    page = "http://127.0.0.1:5000/#/experiments"
    monkeypatch.setattr("flows.command.serve_pages", lambda port, terminal, on_page: on_page(page))
    assert cli.execute(["ui"]) == 0
    assert capfd.readouterr() == (f"{page}\n", "")
    assert cli.execute(["ui", "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"page": page}


# ------------------------------------------------------------------------------------------------- init and validate


def test_init_prints_a_config_that_validates(capfd, tmp_path):
    (tmp_path / "a.txt").write_text("some words " * 1000)
    (tmp_path / "b.txt").write_text("other words " * 1000)
    assert cli.execute(["init", str(tmp_path), "--name", "mine"]) == 0
    text = capfd.readouterr().out
    (tmp_path / "mine.yaml").write_text(text)
    assert cli.execute(["validate", str(tmp_path / "mine.yaml")]) == 0
    assert f"Next: headrace run {tmp_path / 'mine.yaml'}" in capfd.readouterr().err
    assert cli.execute(["init", str(tmp_path), "--name", "mine", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert document["config"]["name"] == "mine"
    assert document["yaml"].startswith("# Written by `headrace init`")


def test_init_refuses_a_name_that_is_none(capfd, tmp_path):
    (tmp_path / "a.txt").write_text("words " * 1000)
    assert cli.execute(["init", str(tmp_path), "--name", "../up"]) == 2
    assert "name" in capfd.readouterr().err


def test_init_of_nothing_is_refused_input(capfd, tmp_path):
    assert cli.execute(["init", str(tmp_path / "nothing")]) == 2
    assert "does not exist" in capfd.readouterr().err


def load_nothing_heavy(arguments, home):
    """Run a command in a process of its own that fails when a heavy library was loaded; return what it did."""
    code = (
        "import sys\n"
        "from flows.cli import execute\n"
        "code = execute(sys.argv[1:])\n"
        "heavy = {'prefect', 'mlflow', 'torch', 's3fs', 'pandas', 'tokenizers', 'transformers'} & set(sys.modules)\n"
        "sys.exit(f'loaded {sorted(heavy)}' if heavy else code)\n"
    )
    environment = {**os.environ, "HEADRACE_HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)
    assert "loaded" not in done.stderr
    assert not home.exists(), "nothing is written"
    return done


@pytest.mark.parametrize("arguments", [["--help"], ["validate", str(QUICKSTART)], ["init", str(Path(__file__).parent)]])
def test_light_commands_load_nothing_heavy(arguments, tmp_path):
    done = load_nothing_heavy(arguments, tmp_path / "home")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (None, "There is no config.json in"),
        ([], "must hold a JSON object"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2' and must be 'llama'"),
        ({**LLAMA, "num_hidden_layers": 0}, "num_layers must be 1 or more, got 0"),
        (LLAMA, "There are no weights in"),
    ],
    ids=["empty", "no object", "another kind", "no layers", "no weights"],
)
def test_a_folder_that_holds_no_model_is_refused_before_anything_heavy_is_loaded(config, told, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    done = load_nothing_heavy(["generate", str(folder), "--prompt", "x"], tmp_path / "home")
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert done.stderr.count("Error:") == 1


# --------------------------------------------------------------------------------------------------------- goodput


def test_goodput_says_why_it_advises_no_interval(monkeypatch, capfd):
    monkeypatch.setattr(
        "flows.look.run_account", lambda name: (SimpleNamespace(name=name, run_id="a"), account([], {}))
    )
    reason = (
        "no interval between saves is advised before two steps and two committed saves beside the last were seen: "
        "0 and 0 so far"
    )
    assert cli.execute(["goodput", "tiny"]) == 0
    assert capfd.readouterr().out.splitlines()[-1] == f"  {reason}"
    assert cli.execute(["goodput", "tiny", "--json"]) == 0
    document = json.loads(capfd.readouterr().out)
    assert (document["save_advice"], document["why_no_save_advice"]) == (None, reason)
