"""What is computed again when something changes: only what depends on it. All through the real command."""

import gc
import json
import re
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pandas
import pytest
import webdataset
from mlflow import MlflowClient

from tests.chaos.conftest import CONFIG, STEPS
from tests.chaos.harness import Lab
from tests.mlflow_database import NOLOAD

pytestmark = [pytest.mark.chaos, pytest.mark.filterwarnings(NOLOAD)]


def outcomes(result: dict[str, Any]) -> dict[str, str]:
    return {stage["name"]: stage["outcome"] for stage in result["stages"]}


def units(result: dict[str, Any]) -> tuple[int, int]:
    """Units built and reused, as `prepare` tells them."""
    detail = next(stage["detail"] for stage in result["stages"] if stage["name"] == "prepare")
    match = re.search(r"(\d+) units built, (\d+) reused", detail)
    assert match, detail
    return int(match[1]), int(match[2])


# Stock webdataset leaves the tars it read to the garbage collector.
@pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_only_what_depends_on_a_change_is_done_again(lab: Lab, corpus: Path) -> None:
    own = lab.folder / "corpus"
    shutil.copytree(corpus, own)
    lab.config["data"]["inputs"] = [{"path": str(own), "include": ["*.py"]}]

    first = lab.run_to_the_end()
    assert set(outcomes(first).values()) == {"done"}
    assert first["champion"]
    built, _ = units(first)
    the_last_evaluation_in_the_loop_is_the_stage_s(lab, first)
    stock_webdataset_reads_every_shard(lab, first)
    the_champion_predicts(lab)

    again = lab.run_to_the_end()
    assert set(outcomes(again).values()) == {"reused"}
    assert (again["run_id"], again["version"], again["new_version"]) == (first["run_id"], "1", False)

    measured = lab.run_to_the_end("--set", "evaluation.max_tokens=2048")
    assert outcomes(measured) == {
        "prepare": "reused",
        "train": "reused",
        "export": "reused",
        "evaluate": "done",
        "register": "reused",
    }
    assert (measured["run_id"], measured["attempts"], measured["version"]) == (first["run_id"], 1, "1")
    assert measured["evaluation"]["tokens"] < first["evaluation"]["tokens"]

    slower = lab.run_to_the_end("--set", "optimizer.learning_rate=0.0001")
    assert outcomes(slower)["prepare"] == "reused"
    assert outcomes(slower)["train"] == "done"
    assert slower["run_id"] != first["run_id"]
    assert units(slower) == (0, built)
    assert (slower["version"], slower["champion"]) == ("2", False), slower["verdict"]

    changed = sorted(own.iterdir())[7]
    changed.write_bytes(changed.read_bytes() + b"\n# one line more\n")
    onward = lab.run_to_the_end()
    assert units(onward) == (1, built - 1)
    assert outcomes(onward)["train"] == "done"
    assert onward["run_id"] not in (first["run_id"], slower["run_id"])
    assert onward["dataset"] != first["dataset"]


def the_last_evaluation_in_the_loop_is_the_stage_s(lab: Lab, result: dict[str, Any]) -> None:
    client = MlflowClient(tracking_uri=f"sqlite:///{lab.home / 'mlflow.db'}")
    history = client.get_metric_history(result["run_id"], "validation/loss")
    assert [point.step for point in history] == [0, STEPS // 2, STEPS]
    assert history[-1].value == pytest.approx(result["evaluation"]["loss"], abs=1e-6)


def stock_webdataset_reads_every_shard(lab: Lab, result: dict[str, Any]) -> None:
    """Count and sum of all tokens, read by the library that others use, are those that the manifest names."""
    dataset = result["dataset"].removeprefix("datasets/")
    manifest = json.loads((lab.store / "datasets" / dataset / "manifest.json").read_text(encoding="utf-8"))
    counted = {"train": 0, "validation": 0}
    for unit in manifest["body"]["units"]:
        for split in counted:
            for shard in sorted((lab.store / "units" / unit["key"]).glob(f"{split}-*.tar")):
                for sample in webdataset.WebDataset(str(shard), shardshuffle=False):
                    tokens = np.frombuffer(sample["tokens.bin"], dtype="<u2")
                    ends = np.frombuffer(sample["ends.bin"], dtype="<u4")
                    assert tokens.max() < CONFIG["model"]["vocab_size"]
                    assert all(tokens[end - 1] == 0 for end in ends), "a document does not end with its end token"
                    counted[split] += len(tokens)
    gc.collect()
    for split, tokens_of_split in counted.items():
        assert tokens_of_split == manifest["body"]["totals"][split]["tokens"]


def the_champion_predicts(lab: Lab) -> None:
    mlflow.set_tracking_uri(f"sqlite:///{lab.home / 'mlflow.db'}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # MLflow's own, about type hints and its database
        model = mlflow.pyfunc.load_model("models:/chaos@champion")
        forms = (["def "], "def ", {"prompt": ["def "]}, pandas.DataFrame({"text": ["def "]}))
        texts = [model.predict(form, params={"max_new_tokens": 4}) for form in forms]
    assert all(len(text) == 1 and isinstance(text[0], str) and text[0] for text in texts)
    assert all(text == texts[0] for text in texts)


def test_another_layout_continues_the_same_run(lab: Lab) -> None:
    lab.plan({"point": "step.middle", "rank": 0, "step": 11, "action": "kill", "target": "flow"})
    assert lab.run().returncode == -9
    lab.assert_no_orphans()
    lab.plan()
    result = lab.run_to_the_end("--set", "launch.ranks_per_node=1", "--set", "layout.micro_batch_size=8")
    assert (result["step"], result["attempts"]) == (STEPS, 2)
    attempt = json.loads(
        (lab.store / "runs" / result["run_id"] / "artifacts/attempts/0002.json").read_text(encoding="utf-8")
    )
    # The ranks of a killed command save where they are, when there is time; the last regular save is that of step 8.
    assert attempt["restore"]["attempt"] == 1
    assert attempt["restore"]["step"] in range(4, STEPS)


def test_two_runs_started_together_prepare_their_dataset_once(lab: Lab) -> None:
    path = lab.write_config()
    processes = [lab.start("run", str(path), "--json", "--set", f"name={name}") for name in ("one", "two")]
    results = []
    for process in processes:
        out, err = process.communicate(timeout=420)
        assert process.returncode == 0, err[-4000:]
        results.append(json.loads(out))
    built = [units(result)[0] for result in results]
    on_the_store = len(list((lab.store / "units").iterdir()))
    assert sorted(built) == [0, on_the_store]
    assert results[0]["dataset"] == results[1]["dataset"]
    assert results[0]["run_id"] != results[1]["run_id"]


def test_a_folder_of_text_becomes_a_sentence(new_lab: Callable[[str], Lab], corpus: Path) -> None:
    lab = new_lab("own")
    written = lab.command("init", str(corpus))
    assert written.returncode == 0, written.stderr
    path = lab.folder / "my.yaml"
    path.write_text(written.stdout, encoding="utf-8")
    small = ["training.steps=4", "schedule.warmup_steps=1", "model.num_layers=1", "evaluation.max_tokens=2048"]
    done = lab.command("run", str(path), "--json", *(word for each in small for word in ("--set", each)))
    assert done.returncode == 0, done.stderr[-4000:]
    result = json.loads(done.stdout)
    said = lab.command("generate", result["model_name"], "--prompt", "import ", "--json")
    assert said.returncode == 0, said.stderr[-4000:]
    assert json.loads(said.stdout)["text"]
