"""What the services cost: a run that is asked for against its bare work, saves to S3 beside a training, logged values.

    python benchmarks/bench_services.py [--steps 192] [--rounds 3] [--only starts saves values]

starts: `headrace up` on a fresh state folder of this run, warmed by one run. Then in turns `headrace trigger --wait` of
a shortened quickstart, and the floor: the same stages as plain calls in one process, without Prefect, MLflow,
artifacts and registration. Every round makes its units, training, export and score anew.

saves: a Ceph RGW of this run, on this machine; needs what `deployments/rgw/rgw.sh install` installs. Plain boto3
uploads files of the size that a save has, two at a time, then two ranks train and save to it. The rate of a save is
that of its bytes from begin to commit: staging, digests and the commit included. Steps that began while a save was
under way are compared with the others.

values: the event of a training step as the loop logs it, against a write of the same line by hand.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from data_prep.dataset import prepare
from flows.config import PipelineConfig, load_config
from flows.services_api import ask
from flows.stages import run_request
from headrace.events import EventWriter, read_events
from headrace.s3_parts import PART_CONCURRENCY
from headrace.storage import Storage
from tasks.child import run_module
from tasks.runs import DatasetRef
from training.checkpoint.catalog import list_commits
from training.evaluation.spec import EvalSpec, EvaluationTask
from training.export.spec import ExportSpec
from training.launch.resume import next_attempt
from training.launch.supervisor import run_attempt
from training.run_spec import RunSpec
from training.sink import Sink

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench_storage import SCRIPT, make_files, plain, server, use

ROOT = Path(__file__).resolve().parents[1]
QUICKSTART = ROOT / "configs/quickstart.yaml"
HEADRACE = [sys.executable, "-P", "-m", "flows.cli"]


def main() -> None:
    parts = {"starts": measure_starts, "saves": measure_saves, "values": measure_values}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=192, help="training steps of one run of `starts`")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of `starts`")
    parser.add_argument("--saves", type=int, default=6, help="saves of `saves`")
    parser.add_argument("--only", nargs="+", choices=list(parts), default=list(parts))
    parser.add_argument("--bare", nargs=2, type=Path, metavar=("CONFIG", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.bare:
        print(json.dumps(bare_run(load_config(arguments.bare[0]), arguments.bare[1])))
        return
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before")
    for name in arguments.only:
        with tempfile.TemporaryDirectory(prefix="headrace-bench-") as folder:
            parts[name](Path(folder), arguments)


# --------------------------------------------------------------------------------------------------- the bare work


def bare_run(config: PipelineConfig, folder: Path) -> float:
    """The stages up to the score as plain calls; returns their seconds."""
    started = time.perf_counter()
    storage = Storage.open(str(config.storage.root))
    spec = bare_spec(config, storage, folder)
    bare_training(storage, spec, folder)
    export = ExportSpec(
        storage_root=storage.root_url,
        run_id=spec.run_id,
        checkpoint=list_commits(storage, spec.run_prefix)[0].restore_point,
        target="model",
        dtype="float32",
    )
    run_module("training.export.main", export.model_dump(mode="json"), folder=folder / "export", on_report=ignore)
    evaluation = EvaluationTask(
        storage_root=storage.root_url,
        model="model",
        dataset_key=spec.dataset_key,
        spec=EvalSpec.of(
            spec.evaluation,
            dataset_digest=spec.dataset_digest,
            tokenizer_digest=spec.tokenizer_digest,
            window=spec.training.seq_len,
            precision=spec.training.precision,
        ),
        target="score",
        work_dir=str(folder),
        batch_size=spec.evaluation.batch_size,
        device=spec.layout.device,
    )
    run_module(
        "training.evaluation.main", evaluation.model_dump(mode="json"), folder=folder / "score", on_report=ignore
    )
    return time.perf_counter() - started


def bare_spec(config: PipelineConfig, storage: Storage, folder: Path) -> RunSpec:
    """Prepare the data, and say what is trained on it."""
    prepared = prepare(storage, config.data, config.tokenizer, work_dir=folder / "prepare")
    dataset = DatasetRef(prepared.dataset_key, prepared.digest, prepared.tokenizer_digest)
    request = run_request(config)
    return RunSpec(
        run_id="bare",
        run_key=request.run_key(dataset),
        name=request.name,
        seed=request.seed,
        model=request.model,
        training=request.training,
        optimizer=request.optimizer,
        schedule=request.schedule,
        dataset_key=dataset.key,
        dataset_digest=dataset.digest,
        tokenizer_digest=dataset.tokenizer_digest,
        evaluation=request.evaluation,
        checkpoint=request.checkpoint,
        layout=request.layout,
        launch=request.launch,
    )


def bare_training(storage: Storage, spec: RunSpec, folder: Path) -> None:
    storage.write_json(f"{spec.run_prefix}/run.json", spec.model_dump(mode="json"))
    attempt = next_attempt(storage, spec, work_root=folder)
    assert attempt is not None, "the store is a fresh one"
    outcome = run_attempt(storage, attempt, on_event=ignore, should_stop=lambda: False)
    assert outcome.kind == "finished", outcome.message


def ignore(_: dict[str, Any]) -> None:
    """Nobody is told."""


# ------------------------------------------------------------------------------------------------ orchestrated runs


def measure_starts(folder: Path, arguments: argparse.Namespace) -> None:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_", "MLFLOW_", "PREFECT_"))}
    environment["HEADRACE_HOME"] = str(folder / "home")
    walls, works, starts = [], [], []
    with services(environment, folder) as api:
        triggered(environment, config_of(folder, "warm", 20), api)
        for number in range(arguments.rounds):
            wall, start = triggered(environment, config_of(folder, f"asked-{number}", arguments.steps), api)
            work = bare(environment, config_of(folder, f"bare-{number}", arguments.steps), folder / f"work-{number}")
            print(f"round {number}: asked for {wall:.1f} s, bare {work:.1f} s, first task after {start:.1f} s")
            walls.append(wall)
            works.append(work)
            starts.append(start)
    shares = [(wall - work) / wall for wall, work in zip(walls, works, strict=True)]
    extra = statistics.median(wall - work for wall, work in zip(walls, works, strict=True))
    print(f"{arguments.steps} steps, {arguments.rounds} rounds, medians:")
    print(f"  run asked for {statistics.median(walls):.1f} s, bare work {statistics.median(works):.1f} s")
    print(f"  orchestration {extra:.1f} s, {100 * statistics.median(shares):.1f} % of the run (wanted: 10 %)")
    print(
        f"  first task {statistics.median(starts):.1f} s after the request, at most {max(starts):.1f} s (wanted: 15 s)"
    )


def config_of(folder: Path, name: str, steps: int) -> Path:
    """A config file of a run with a store and an experiment of its own."""
    document = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
    document["name"] = name
    document["training"]["steps"] = steps
    document["data"]["inputs"][0]["include"] = ["[a-e]*.py"]  # 4 of 31 MB
    document["storage"] = {"root": str(folder / "stores" / name)}
    document["tracking"] = {"experiment": name}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(document), encoding="utf-8")
    return path


@contextlib.contextmanager
def services(environment: dict[str, str], folder: Path) -> Iterator[str]:
    """`headrace up`; gives the address of Prefect's API."""
    command = [*HEADRACE, "up", "--port", "0", "--mlflow-port", "0", "--json"]
    with (folder / "up.log").open("wb") as log:
        up = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True)
    assert up.stdout is not None
    try:
        lines: list[str] = []
        while not lines or lines[-1] != "}\n":
            line = up.stdout.readline()
            assert line, (folder / "up.log").read_text(encoding="utf-8")
            lines.append(line)
        yield str(json.loads("".join(lines))["prefect_api"])
    finally:
        up.terminate()
        up.wait()
        up.stdout.close()


def triggered(environment: dict[str, str], config: Path, api: str) -> tuple[float, float]:
    """Seconds of `headrace trigger --wait`, and from its request until the first task ran."""
    started = time.perf_counter()
    command = [*HEADRACE, "trigger", "--config", str(config), "--wait", "--json"]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    wall = time.perf_counter() - started
    flow_run = json.loads(done.stdout)["flow_run_id"]
    asked = ask(f"{api}/flow_runs/{flow_run}")["created"]
    tasks = ask(f"{api}/task_runs/filter", {"flow_runs": {"id": {"any_": [flow_run]}}})
    first = min(moment(task["start_time"]) for task in tasks if task["start_time"])
    return wall, (first - moment(asked)).total_seconds()


def moment(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))


def bare(environment: dict[str, str], config: Path, folder: Path) -> float:
    """Seconds of the same stages in a process of its own, without its start."""
    command = [sys.executable, "-P", __file__, "--bare", str(config), str(folder)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
    return float(json.loads(done.stdout))


# ------------------------------------------------------------------------------------------------------------ saves


def measure_saves(folder: Path, arguments: argparse.Namespace) -> None:
    if shutil.which("radosgw") is None:
        print(f"saves: not run without Ceph RGW: as root, {SCRIPT} install", file=sys.stderr)
        return
    with server(folder / "rgw") as described:
        use(described)
        document = yaml.safe_load(QUICKSTART.read_text(encoding="utf-8"))
        document |= {"storage": {"root": f"s3://{described['bucket']}/saves"}, "schedule": {"warmup_steps": 1}}
        document["model"] |= {"dim": 512, "num_layers": 6, "num_heads": 8, "num_kv_heads": 4, "ffn_dim": 1536}
        # As long without a save as with one: a save here takes about as long as 20 steps.
        document["training"] |= {"steps": 60 * arguments.saves, "global_batch_size": 2, "seq_len": 128}
        document["layout"] = {"micro_batch_size": 1}
        document["checkpoint"] = {"save_every": 60}
        document["evaluation"] |= {"every": 10**6, "max_tokens": 4096}
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(document), encoding="utf-8")
        config = load_config(path)
        storage = Storage.open(str(config.storage.root))
        spec = bare_spec(config, storage, folder)
        size = 12 * spec.model.num_parameters // 2  # weights and two moments in float32, on two ranks
        raw = plain_rate(folder, described["bucket"], size)
        bare_training(storage, spec, folder)
        report_saves(read_events(storage, spec.run_prefix, 1), raw)


def plain_rate(folder: Path, bucket: str, size: int) -> float:
    """Megabytes a second of two files that boto3 uploads at once while nothing else runs; the median of five."""
    import boto3

    paths = make_files(folder, 2, size)
    upload = plain(boto3.client("s3"), bucket, PART_CONCURRENCY)
    rates = []
    with ThreadPoolExecutor(2) as threads:
        for _ in range(6):
            started = time.perf_counter()
            list(threads.map(lambda path: upload(path, f"raw/{secrets.token_hex(4)}"), paths))
            rates.append(sum(path.stat().st_size for path in paths) / (time.perf_counter() - started) / 1e6)
    for path in paths:
        path.unlink()
    return statistics.median(rates[1:])


def report_saves(events: list[dict[str, Any]], raw: float) -> None:
    begun = {event["step"]: event["time"] for event in events if event["kind"] == "save.begun"}
    last = max(begun)  # the training waits for it
    saves = [event for event in events if event["kind"] == "save.committed" and event["step"] != last]
    spans = [(begun[save["step"]], save["time"]) for save in saves]
    steps = [event for event in events if event["kind"] == "step" and event["step"] > 10]
    during = [s["step_seconds"] for s in steps if any(a < s["time"] - s["step_seconds"] < b for a, b in spans)]
    # A step that begins before a save and ends within it is of neither kind; nor is any, since saves begin between two.
    others = [s["step_seconds"] for s in steps if not any(a < s["time"] < b + s["step_seconds"] for a, b in spans)]
    rate = statistics.median(save["bytes"] / save["seconds"] for save in saves) / 1e6
    print(f"saves of {saves[0]['bytes'] / 1e6:.0f} MB by two ranks, {len(saves)} of them")
    print(
        f"  begin to commit while training {rate:.0f} MB/s, boto3 alone {raw:.0f} MB/s: {rate / raw:.2f} (wanted: 0.5)"
    )
    print(f"  steps during a save {len(during)}, others {len(others)}")
    for name, of in (("median", statistics.median), ("95th percentile", percentile_95)):
        wanted = 1.1 if name == "median" else 1.5
        ratio = of(during) / of(others)
        print(f"  {name} of a step {of(during):.3f} s against {of(others):.3f} s: {ratio:.2f} (wanted: {wanted})")


def percentile_95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


# ----------------------------------------------------------------------------------------------------------- values


def measure_values(folder: Path, _: argparse.Namespace) -> None:
    fields = {
        "step": 1000,
        "loss": 3.123456789,
        "grad_norm": 0.7654321,
        "learning_rate": 0.0034567,
        "tokens_seen": 123456789,
        "tokens_per_second": 4231.5,
        "step_seconds": 0.4838,
        "data_seconds": 0.0003,
        "memory_bytes": 1234567890,
    }
    number = 5000
    with EventWriter(folder / "ours.jsonl", 1) as events, (folder / "bare.jsonl").open("ab", buffering=0) as file:
        sink = Sink(events=events)
        ours, floor = [], []
        for _round in range(5):
            started = time.perf_counter()
            for _event in range(number):
                sink.event("step", **fields)
            ours.append((time.perf_counter() - started) / number)
            started = time.perf_counter()
            for _event in range(number):
                file.write(json.dumps(fields).encode() + b"\n")
            floor.append((time.perf_counter() - started) / number)
    event, line = 1e6 * statistics.median(ours), 1e6 * statistics.median(floor)
    value = event / len(fields)
    print(f"a step's event {event:.0f} us, by hand {line:.0f} us: {event / line:.1f}")
    print(f"  {value:.1f} us for each of its {len(fields)} values (wanted: 1000 us)")


if __name__ == "__main__":
    main()
