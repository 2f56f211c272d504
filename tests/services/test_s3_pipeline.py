"""The whole way with its store on a real S3 server: text to a registered version, killed and undisturbed."""

import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlflow
import pandas
import pytest

from headrace.commit import check_files, read_commit
from tests.chaos.harness import Lab
from tests.chaos.test_kills import STEPS, assert_parent_tells_the_truth, client, weights
from tests.chaos.test_reuse import outcomes
from tests.mlflow_database import NOLOAD
from tests.services.rgw import Rgw

pytestmark = pytest.mark.filterwarnings(NOLOAD)

WAIT_SECONDS = 180.0
OUTAGE_SECONDS = 60.0


@pytest.fixture
def secrets_of(rgw: Rgw) -> list[bytes]:
    return [rgw.access_key.encode(), rgw.secret_key.encode()]


def slow_steps(seconds: float) -> dict[str, Any]:
    """Training that lasts long enough for a server to be killed in it."""
    return {"point": "step.middle", "action": "sleep", "seconds": seconds, "always": True}


def files_with(folder: Path, secrets: list[bytes]) -> list[str]:
    return [
        str(path)
        for path in folder.rglob("*")
        if path.is_file() and any(secret in path.read_bytes() for secret in secrets)
    ]


def test_from_text_to_a_registered_version(rgw: Rgw, lab: Lab, secrets_of: list[bytes]):
    done = lab.run()
    assert done.returncode == 0, done.stderr[-4000:]
    first = json.loads(done.stdout)
    assert set(outcomes(first).values()) == {"done"}
    assert first["champion"]
    assert list(lab.home.rglob("*.bin")) == [], "a staged file was left"
    assert not lab.store.exists(), "something was written beside the store that the config names"
    assert_parent_tells_the_truth(lab, first, STEPS)
    root = lab.config["storage"]["root"]
    run = client(lab).get_run(first["run_id"])
    assert client(lab).get_experiment(run.info.experiment_id).artifact_location == f"{root}/runs"
    assert run.info.artifact_uri == f"{root}/runs/{first['run_id']}/artifacts"
    assert {file.path for file in client(lab).list_artifacts(first["run_id"])} >= {"run.json", "checkpoints", "events"}
    the_champion_is_loaded_from_the_bucket(lab)

    again = lab.run_to_the_end()
    assert set(outcomes(again).values()) == {"reused"}
    assert (again["run_id"], again["version"], again["new_version"]) == (first["run_id"], "1", False)

    # A52: the credentials are nowhere. Logs, events, the databases of MLflow and Prefect lie in the state folder.
    assert files_with(lab.folder, secrets_of) == []
    storage = lab.storage
    keys = storage.list()
    assert len(keys) > 30
    assert [key for key in keys if any(secret in storage.read_bytes(key) for secret in secrets_of)] == []
    assert not any(secret.decode() in done.stdout + done.stderr for secret in secrets_of)


def the_champion_is_loaded_from_the_bucket(lab: Lab) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{lab.home / 'mlflow.db'}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own, about type hints and its database
        model = mlflow.pyfunc.load_model("models:/chaos@champion")
        (text,) = model.predict(pandas.DataFrame({"text": ["def "]}), params={"max_new_tokens": 4})
    assert isinstance(text, str)
    assert text


def test_credentials_in_a_config_are_refused_and_not_repeated(rgw: Rgw, lab: Lab):
    root = lab.config["storage"]["root"]
    for storage in (
        {"root": root, "secret_key": "canary-in-a-config"},
        {"root": root, "client_kwargs": {"key": "canary-in-a-config"}},
        {"root": root.replace("s3://", "s3://someone:canary-in-a-config@")},
    ):
        lab.config["storage"] = storage
        done = lab.run()
        assert done.returncode == 2, done.stderr[-4000:]
        assert "canary-in-a-config" not in done.stdout + done.stderr
        assert "storage" in done.stdout + done.stderr
    lab.write_config().unlink()
    assert files_with(lab.folder, [b"canary-in-a-config"]) == []


@pytest.mark.parametrize("wrong", ["AWS_SECRET_ACCESS_KEY", "AWS_ACCESS_KEY_ID"])
def test_wrong_credentials_end_the_command_with_one_sentence(
    rgw: Rgw, lab: Lab, secrets_of: list[bytes], monkeypatch: pytest.MonkeyPatch, wrong: str
):
    monkeypatch.setenv(wrong, "canary-of-a-wrong-key")
    done = lab.run()
    assert done.returncode == 2
    assert "did not accept the credentials" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    told = done.stdout + done.stderr
    assert "canary-of-a-wrong-key" not in told
    assert files_with(lab.folder, [*secrets_of, b"canary-of-a-wrong-key"]) == []


# ------------------------------------------------------------------------------------------------ kills and outages


class Running:
    """A command in the background, watched through the event log of its newest attempt."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.process = lab.start("run", str(lab.write_config()), "--json")
        self._out: tuple[str, str] | None = None

    def events(self) -> list[dict[str, Any]]:
        logs = sorted(self.lab.home.glob("work/*/attempt-*/events.jsonl"))
        lines = logs[-1].read_text(encoding="utf-8").splitlines(keepends=True) if logs else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def steps(self, kind: str) -> list[int]:
        return [event["step"] for event in self.events() if event["kind"] == kind]

    def wait_for(self, what: str, condition: Callable[[], bool], seconds: float = WAIT_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"ended before {what}: {self.process.communicate()[1][-4000:]}"
            assert time.monotonic() < deadline, f"no {what} within {seconds:g} s"
            time.sleep(0.05)

    def finish(self) -> dict[str, Any]:
        out, err = self.process.communicate(timeout=WAIT_SECONDS)
        assert self.process.returncode == 0, f"{out[-2000:]}\n{err[-6000:]}"
        document: dict[str, Any] = json.loads(out)
        return document


@pytest.fixture
def background() -> Iterator[Callable[[Lab], Running]]:
    """Starts commands that do not outlive the test."""
    started: list[Running] = []

    def start(lab: Lab) -> Running:
        started.append(Running(lab))
        return started[-1]

    yield start
    for running in started:
        if running.process.poll() is None:
            running.process.kill()
            running.process.communicate()


def all_commits_are_whole(lab: Lab, result: dict[str, Any]) -> list[int]:
    """Steps of the committed checkpoints, every byte of which was read and compared."""
    storage, steps = lab.storage, []
    for key in storage.list(f"runs/{result['run_id']}/artifacts/checkpoints"):
        if key.endswith("/COMMIT.json"):
            prefix = key.removesuffix("/COMMIT.json")
            commit = read_commit(storage, prefix, kind="checkpoint")
            assert commit is not None
            check_files(storage, prefix, commit, content=True)
            steps.append(int(commit.body["step"]))
    return sorted(steps)


@pytest.fixture
def long_labs(new_lab: Callable[[str], Lab]) -> Callable[[str, int, int], Lab]:
    def make(name: str, steps: int, save_every: int) -> Lab:
        lab = new_lab(name)
        lab.config["training"]["steps"] = steps
        lab.config["checkpoint"] |= {"save_every": save_every, "keep_last": steps}
        lab.config["evaluation"]["every"] = steps
        return lab

    return make


def test_a_run_killed_while_it_saves_ends_with_the_same_weights(new_lab: Callable[[str], Lab]):
    broken, clean = new_lab("broken"), new_lab("clean")
    broken.plan(
        {"point": "save.files_written", "rank": 0, "step": 4, "action": "kill", "target": "flow"},
        {"point": "commit.before", "rank": 0, "step": 8, "action": "kill", "target": "rank:0"},
        slow_steps(0.6),
    )
    result, commands = broken.run_until_done(most=2)
    assert (broken.fired(), commands, result["attempts"]) == (2, 2, 3)
    broken.assert_no_orphans()
    all_commits_are_whole(broken, result)
    assert weights(broken, result) == weights(clean, clean.run_to_the_end())


def test_the_server_killed_during_saves_loses_nothing(
    rgw: Rgw, long_labs: Callable[[str, int, int], Lab], background: Callable[[Lab], Running]
):
    steps, save_every = 40, 10
    lab, clean = long_labs("broken", steps, save_every), long_labs("clean", steps, save_every)
    lab.plan(slow_steps(0.7))
    running = background(lab)
    for step, part in ((10, "radosgw"), (20, "osd")):
        running.wait_for(f"save of step {step}", lambda step=step: step in running.steps("save.begun"))
        rgw.kill(part)  # type: ignore[arg-type]
        rgw.restart(part)  # type: ignore[arg-type]
        running.wait_for(f"commit of step {step}", lambda step=step: step in running.steps("save.committed"))
    result = running.finish()
    assert result["attempts"] == 1
    committed, skipped = all_commits_are_whole(lab, result), running.steps("save.skipped")
    assert {10, 20, 40} <= set(committed)
    assert sorted(committed + skipped) == [10, 20, 30, 40], "a save was lost without a word"
    assert running.steps("save.failed") == []
    assert running.steps("step") == list(range(1, steps + 1))
    assert_parent_tells_the_truth(lab, result, steps)
    assert weights(lab, result) == weights(clean, clean.run_to_the_end())


@pytest.mark.slow
def test_a_minute_without_the_store_costs_no_step(
    rgw: Rgw, long_labs: Callable[[str, int, int], Lab], background: Callable[[Lab], Running]
):
    steps, save_every = 100, 10
    lab, clean = long_labs("broken", steps, save_every), long_labs("clean", steps, save_every)
    lab.plan(slow_steps(1.0))
    running = background(lab)
    running.wait_for("commit of step 10", lambda: 10 in running.steps("save.committed"))
    rgw.kill("radosgw")
    gone_at = len(running.steps("step"))
    time.sleep(OUTAGE_SECONDS)
    back_at = len(running.steps("step"))
    rgw.restart("radosgw")
    assert back_at - gone_at > OUTAGE_SECONDS / 2, "training did not go on while the store was away"
    result = running.finish()
    assert result["attempts"] == 1
    assert running.steps("step") == list(range(1, steps + 1))
    assert len(running.steps("save.skipped")) >= 2
    committed = all_commits_are_whole(lab, result)
    assert {10, steps} <= set(committed)
    assert_parent_tells_the_truth(lab, result, steps)
    assert weights(lab, result) == weights(clean, clean.run_to_the_end())
