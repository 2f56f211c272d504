"""Real runs of the real command in a state folder of their own, with a plan of faults, and what is true afterwards."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

from headrace.storage import Storage

COMMAND = [sys.executable, "-m", "flows.cli"]
COMMAND_SECONDS = 420
ORPHAN_SECONDS = 10


@dataclass
class Lab:
    """One state folder, one config and the faults planned for its processes."""

    folder: Path
    config: dict[str, Any]
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def home(self) -> Path:
        return self.folder / "home"

    @property
    def store(self) -> Path:
        return self.home / "store"

    @property
    def storage(self) -> Storage:
        """The store of the config: in the state folder when it names none."""
        return Storage.open(self.config.get("storage", {}).get("root") or self.store)

    def write_config(self) -> Path:
        path = self.folder / "run.yaml"
        path.write_text(yaml.safe_dump(self.config), encoding="utf-8")
        return path

    def plan(self, *faults: dict[str, Any]) -> None:
        """Plan faults for every later command; an empty plan takes them away."""
        self.environment.pop("HEADRACE_FAULTS", None)
        if faults:
            number = len(list(self.folder.glob("faults-*")))
            folder = self.folder / f"faults-{number}"
            folder.mkdir()
            path = folder / "plan.json"
            path.write_text(json.dumps({"dir": str(folder), "faults": list(faults)}), encoding="utf-8")
            self.environment["HEADRACE_FAULTS"] = str(path)

    def fired(self) -> int:
        """How many of the planned faults have fired."""
        return len(list(Path(self.environment["HEADRACE_FAULTS"]).parent.glob("fired-*")))

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HEADRACE_", "MLFLOW_", "PREFECT_"))},
            "HEADRACE_HOME": str(self.home),
            "OMP_NUM_THREADS": "1",
            **self.environment,
        }
        return subprocess.Popen(
            [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
        )

    def command(self, *arguments: str, seconds: float = COMMAND_SECONDS) -> "subprocess.CompletedProcess[str]":
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"{arguments} took longer than {seconds} s:\n{out[-3000:]}\n{err[-6000:]}") from None
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def run(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        return self.command("run", str(self.write_config()), "--json", *arguments)

    def run_to_the_end(self, *arguments: str) -> dict[str, Any]:
        """Run the command; it must succeed. Returns its JSON document."""
        done = self.run(*arguments)
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    def run_until_done(self, most: int) -> tuple[dict[str, Any], int]:
        """Give the same command again until it succeeds, as a user does whose shell was killed.

        Returns the JSON document and how many times the command was given. Any end but a kill or success fails.
        """
        for times in range(1, most + 1):
            done = self.run()
            if done.returncode == 0:
                return json.loads(done.stdout), times
            assert done.returncode == -9, f"exit code {done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
            self.assert_no_orphans()
        raise AssertionError(f"the command was killed {most} times and is still not done: {self.fired()} faults fired")

    def processes(self) -> list[psutil.Process]:
        """Every live process that works on this state folder."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                    continue
                if process.environ().get("HEADRACE_HOME") == str(self.home):
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def assert_no_orphans(self) -> None:
        """Within ten seconds nothing that the command started is alive."""
        deadline = time.monotonic() + ORPHAN_SECONDS
        while left := self.processes():
            assert time.monotonic() < deadline, f"still alive: {[(p.pid, p.cmdline()) for p in left]}"
            time.sleep(0.2)


def final_tensors(storage: Storage, run_id: str) -> dict[str, list[tuple[Any, ...]]]:
    """Name -> (offsets, sizes, SHA-256) of every stored piece of the newest checkpoint: the state, bit for bit."""
    keys = storage.list(f"runs/{run_id}/artifacts/checkpoints")
    newest = max(key for key in keys if key.endswith("/COMMIT.json"))
    metadata = storage.read_json(newest.replace("COMMIT.json", "metadata.json"))
    return {
        name: sorted((tuple(c["offsets"]), tuple(c["sizes"]), c["sha256"]) for c in item["chunks"])
        for name, item in metadata["items"].items()
    }
