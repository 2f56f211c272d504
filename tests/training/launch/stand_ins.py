"""The real agent over a stand-in for torchrun and its ranks, which load no torch and do as a script says.

    python -m tests.training.launch.stand_ins PARENT_PID attempt.json           the agent
    python -m tests.training.launch.stand_ins torchrun PARENT_PID attempt.json
    python -m tests.training.launch.stand_ins rank N attempt.json
    python -m tests.training.launch.stand_ins flow attempt.json                 a process that runs one attempt

`script.json` in the work directory says what each rank does: `{"1": {"act": "raise", "after": 3}}`. Every process
leaves its id in `pids/`.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from headrace.process import pid_alive, set_parent_death_signal
from training.launch.stacks import offer_stacks
from training.run_spec import read_attempt

MODULE = "tests.training.launch.stand_ins"
BEAT_SECONDS = 0.02


def leave_pid(work_dir: Path, role: str, pid: int | None = None) -> None:
    folder = work_dir / "pids"
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{role}"
    temporary.write_text(str(pid or os.getpid()), encoding="utf-8")
    temporary.replace(folder / role)


def torchrun(parent: int, attempt_file: Path) -> None:
    """Start every rank in a session of its own; at the first failure end the others, as torchrun does."""
    set_parent_death_signal(signal.SIGKILL, parent)
    work_dir = attempt_file.parent
    leave_pid(work_dir, "torchrun")
    command = [sys.executable, "-m", MODULE, "rank"]
    ranks = {
        rank: subprocess.Popen([*command, str(rank), str(attempt_file)], start_new_session=True) for rank in range(2)
    }
    while all(rank.poll() in (None, 0) for rank in ranks.values()):
        if all(rank.poll() == 0 for rank in ranks.values()):
            sys.exit(0)
        time.sleep(0.02)
    failures = [
        {"rank": number, "pid": rank.pid, "exit_code": rank.returncode, "time": int(time.time())}
        for number, rank in ranks.items()
        if rank.poll() not in (None, 0)
    ]
    for rank in ranks.values():
        rank.terminate()
    deadline = time.monotonic() + 1.0
    while any(rank.poll() is None for rank in ranks.values()) and time.monotonic() < deadline:
        time.sleep(0.02)
    for rank in ranks.values():
        rank.kill()
    (work_dir / "failures.json").write_text(json.dumps(failures), encoding="utf-8")
    sys.exit(1)


class Rank:
    """One stand-in for a rank: beats, and then does what its script says."""

    def __init__(self, number: int, work_dir: Path) -> None:
        script = json.loads((work_dir / "script.json").read_text(encoding="utf-8"))
        self.number, self.work_dir = number, work_dir
        self.act = {"act": "finish", "after": 3, **script.get(str(number), {})}
        self.step = 0
        self.stopping = False

    def run(self) -> None:
        set_parent_death_signal(signal.SIGKILL)
        leave_pid(self.work_dir, f"rank-{self.number}")
        signal.signal(signal.SIGTERM, self.stop)
        offer_stacks(read_attempt(self.work_dir / "attempt.json"), self.number)
        self.beat("start")
        act = self.act["act"]
        while self.step < self.act["after"] or act == "wait":
            self.step += 1
            self.beat("forward_backward")
            self.tell()
            time.sleep(BEAT_SECONDS)
            if self.stopping and not self.act.get("deaf"):
                self.leave("stopped", 3)
        getattr(self, act)()

    def stop(self, *_: object) -> None:
        self.stopping = True

    def tell(self) -> None:
        if self.number == 0:
            event = {"seq": self.step, "time": time.time(), "attempt": 1, "kind": "step", "step": self.step}
            with (self.work_dir / "events.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(event) + "\n")

    def beat(self, phase: str) -> None:
        beat = {"rank": self.number, "pid": os.getpid(), "step": self.step, "phase": phase, "time": time.time()}
        self.write(f"heartbeats/rank-{self.number}.json", beat)

    def leave(self, outcome: str, code: int, **fields: object) -> None:
        result = {"rank": self.number, "outcome": outcome, "step": self.step, "exit_code": code, "time": time.time()}
        self.write(f"result-rank-{self.number}.json", {**result, **fields})
        os._exit(code)

    def write(self, name: str, document: dict[str, Any]) -> None:
        path = self.work_dir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(document), encoding="utf-8")
        temporary.replace(path)

    # ------------------------------------------------------------------------------------ what a script may ask for

    def finish(self) -> None:
        self.leave("finished", 0)

    def fail(self) -> None:
        self.leave("failed", 1, error_kind="ValueError", message="a number was wrong", retryable=None)

    def refuse(self) -> None:
        self.leave("failed", 2, error_kind="ConfigError", message="ranks do not divide", retryable=False)

    def echo(self) -> None:
        """Fail because another rank is gone, soon after it went."""
        deadline = time.monotonic() + 10.0
        while time.monotonic() < deadline:
            with contextlib.suppress(FileNotFoundError):
                if not pid_alive(int((self.work_dir / "pids" / "rank-1").read_text(encoding="utf-8"))):
                    break
            time.sleep(0.02)
        self.alone()

    def alone(self) -> None:
        """Fail as if another rank were gone."""
        self.leave("failed", 1, error_kind="RuntimeError", message="Connection closed by peer", secondary=True)

    def kill(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def vanish(self) -> None:
        os._exit(7)

    def freeze(self) -> None:
        os.kill(os.getpid(), signal.SIGSTOP)

    def hang(self) -> None:
        while True:
            time.sleep(1)

    def grip(self) -> None:
        """Hang in a call of C that does not let go of the interpreter."""
        while True:
            ctypes.PyDLL(None).sleep(600)

    def breed(self) -> None:
        """Start a process that wants to outlive everything, and hang."""
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
        leave_pid(self.work_dir, f"child-{self.number}", child.pid)
        self.hang()


def agent(attempt_file: Path) -> None:
    """The real agent, except for what it starts."""
    from training.launch import agent as module

    class AgentOfStandIns(module.Agent):
        def start_torchrun(self) -> "subprocess.Popen[bytes]":
            return subprocess.Popen(
                [sys.executable, "-m", MODULE, "torchrun", str(os.getpid()), str(attempt_file)],
            )

    leave_pid(attempt_file.parent, "agent")
    module.Agent = AgentOfStandIns  # type: ignore[misc]
    module.main()


def flow(attempt_file: Path) -> None:
    """Run one attempt as a flow's process does."""
    from headrace.storage import Storage
    from training.launch import supervisor
    from training.run_spec import read_attempt

    leave_pid(attempt_file.parent, "flow")
    supervisor.AGENT_MODULE = MODULE
    spec = read_attempt(attempt_file)
    storage = Storage.open(spec.storage_root)
    supervisor.run_attempt(storage, spec, on_event=lambda event: None, should_stop=lambda: False)


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "torchrun":
        torchrun(int(arguments[0]), Path(arguments[1]))
    elif what == "rank":
        Rank(int(arguments[0]), Path(arguments[1]).parent).run()
    elif what == "flow":
        flow(Path(arguments[0]))
    else:
        agent(Path(arguments[0]))


if __name__ == "__main__":
    main()
