"""The commands and options that exist, and that every command in the documents is one of them."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from flows.cli import app
from tests.project.documented_commands import ROOT, Command, documented

# Each entry is a promise to scripts. A new one is a decision: say in docs/guide.md what it is for.
COMMANDS = {
    "init": {"DATA", "--name", "--json"},
    "validate": {"CONFIG", "--set", "--show", "--json"},
    "run": {"CONFIG", "--set", "--json"},
    "trigger": {"--config", "--set", "--idempotency-key", "--deployment", "--wait", "--timeout", "--json"},
    "runs ls": {"--json"},
    "runs show": {"RUN", "--json"},
    "checkpoints ls": {"RUN", "--json"},
    "checkpoints verify": {"RUN", "--step", "--content", "--json"},
    "checkpoints gc": {"RUN", "--all", "--dry-run", "--keep-last", "--json"},
    "checkpoints export": {"RUN", "DIR", "--step", "--dtype", "--json"},
    "checkpoints diff": {"RUN@STEP", "--json"},
    "generate": {"MODEL", "--prompt", "--json"},
    "ui": {"--port", "--json"},
    "up": {"--host", "--port", "--mlflow-port", "--json"},
    "status": {"--json"},
    "down": {"--json"},
    "goodput": {"RUN", "--price", "--json"},
    "doctor": {"RUN", "--json"},
    "replay": {"RUN", "--step", "--json"},
}


def leaves(command: Any, name: tuple[str, ...] = ()) -> dict[str, Any]:
    """Every command that does something, by its words."""
    below = getattr(command, "commands", None)
    if below is None:
        return {" ".join(name): command}
    return {words: leaf for part, inner in below.items() for words, leaf in leaves(inner, (*name, part)).items()}


LEAVES = leaves(typer.main.get_command(app))


def test_the_commands_and_options_are_those_that_were_decided():
    assert {words: options_of(leaf) for words, leaf in LEAVES.items()} == COMMANDS


def options_of(leaf: Any) -> set[str]:
    names = [[p.metavar or p.name] if p.param_type_name == "argument" else p.opts for p in leaf.params]
    return {name for several in names for name in several}


@pytest.mark.parametrize("words", COMMANDS)
def test_every_command_takes_json_and_has_help(words: str):
    done = headrace(*words.split(), "--help")

    assert done.returncode == 0
    assert done.stderr == ""
    assert "--json" in done.stdout


@pytest.mark.parametrize("command", documented("headrace"), ids=str)
def test_a_documented_command_parses(command: Command):
    arguments = list(command.words[1:])
    words = " ".join(arguments[:2]) if " ".join(arguments[:2]) in LEAVES else arguments[0]
    assert words in LEAVES, f"there is no command {words!r}"

    LEAVES[words].make_context(words, arguments[len(words.split()) :])


def test_the_readme_shows_the_whole_way():
    shown = {command.words[1] for command in documented("headrace") if command.where == "README.md"}

    assert shown >= {"init", "validate", "run", "runs", "generate", "ui"}


# --------------------------------------------------------------------------------- the documented ones that cost little


def test_init_validate_and_show_as_documented(tmp_path: Path):
    data = tmp_path / "DATA"
    data.mkdir()
    for number in range(40):
        text = " ".join(f"word{(number * 31 + i) % 97}" for i in range(400))
        (data / f"{number}.txt").write_text(text, encoding="utf-8")

    written = headrace("init", "DATA", folder=tmp_path)
    assert written.returncode == 0, written.stderr
    assert written.stdout.count("#") > 5, "the config is commented"
    (tmp_path / "my.yaml").write_text(written.stdout, encoding="utf-8")

    checked = headrace("validate", "my.yaml", folder=tmp_path)
    assert (checked.returncode, checked.stdout) == (0, "")
    shown = headrace("validate", "my.yaml", "--show", folder=tmp_path)
    (tmp_path / "resolved.yaml").write_text(shown.stdout, encoding="utf-8")
    again = headrace("validate", "resolved.yaml", "--show", folder=tmp_path)
    assert again.stdout == shown.stdout


def test_validate_gives_one_json_document(tmp_path: Path):
    done = headrace("validate", str(ROOT / "configs/quickstart.yaml"), "--json", folder=tmp_path)

    assert done.returncode == 0
    assert json.loads(done.stdout)["config"]["name"] == "quickstart"
    assert list(tmp_path.iterdir()) == [], "nothing is started, so nothing is written"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["validate", "missing.yaml"], "missing.yaml"),
        (["validate", str(ROOT / "configs/quickstart.yaml"), "--set", "model.layers=2"], "num_layers"),
        (["run", str(ROOT / "configs/quickstart.yaml"), "--set", "layout.micro_batch_size=7"], "global_batch_size"),
        (["validate"], "CONFIG"),
        (["unknown"], "unknown"),
        (["runs", "ls", "--all"], "--all"),
    ],
    ids=lambda value: " ".join(value).replace(str(ROOT), "") if isinstance(value, list) else "",
)
def test_a_mistake_is_one_message_and_exit_code_2(tmp_path: Path, arguments: list[str], told: str):
    done = headrace(*arguments, folder=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert "Traceback" not in done.stderr

    document = headrace(*arguments, "--json", folder=tmp_path)
    assert document.returncode == 2
    assert told in json.loads(document.stdout)["error"]["message"]
    assert list(tmp_path.iterdir()) == [], "a refused command leaves nothing behind"


def headrace(*arguments: str, folder: Path = ROOT) -> "subprocess.CompletedProcess[str]":
    """The command as a user calls it, in `folder`, with its state there."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_", "PREFECT_", "MLFLOW_"))}
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *arguments],
        cwd=folder,
        env={**kept, "HEADRACE_HOME": str(folder / ".headrace"), "NO_COLOR": "1", "COLUMNS": "200"},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )
