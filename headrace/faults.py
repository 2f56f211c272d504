"""Faults on request, for tests that kill or slow a real run at a named point.

Nothing happens unless the environment variable HEADRACE_FAULTS names a JSON plan:

    {"dir": "/tmp/faults",
     "faults": [{"point": "commit.before", "step": 40, "rank": 0, "action": "kill", "target": "flow"},
                {"point": "storage.write", "key": "runs/*", "action": "sleep", "seconds": 5, "always": true},
                {"point": "storage.write", "action": "raise", "error": "StorageUnavailable"}]}

`dir` must exist. A fault fires when its point is reached and each further field equals the value that the code gives
there (`step`, `rank`, `key`, ...; text may hold the wildcards of `fnmatch`). It fires once in the whole run, over all
processes and attempts, unless `always` is true.

Actions: `kill` sends SIGKILL to `target` (`self`, or a role that registered itself: `flow`, `agent`, `torchrun`,
`rank:1`); `sleep` waits `seconds`; `raise` raises the class of headrace.errors named by `error`, else InjectedFault;
`scale` multiplies a value that the code offers there by `factor` (a number, or "nan" or "inf").
"""

import fnmatch
import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace import errors
from headrace.process import pid_alive, start_time

ENVIRONMENT_VARIABLE = "HEADRACE_FAULTS"

GONE_SECONDS = 5.0
SIGNAL_SECONDS = 0.2

_ACTIONS = ("kill", "sleep", "raise", "scale")
_OPTIONS = {"point", "action", "target", "seconds", "always", "error", "factor"}


class InjectedFault(Exception):
    """Stands for a defect in the code: not an error that any policy knows."""


@dataclass(frozen=True)
class _Fault:
    number: int
    point: str
    action: str
    target: str
    seconds: float
    error: str | None
    factor: float
    always: bool
    match: dict[str, Any]


@dataclass(frozen=True)
class _Plan:
    directory: Path
    faults: tuple[_Fault, ...]


_loaded: tuple[str, _Plan] | None = None
"""The plan of the last path seen in the environment: reading it at each point would slow the points down."""


def fault_point(name: str, /, **context: Any) -> None:
    """Mark a point at which a planned fault may fire; costs one look into the environment when there is no plan.

    `context` says where the code is (`step`, `key`, ...). `rank` is added from torchrun's environment when known.
    """
    if os.environ.get(ENVIRONMENT_VARIABLE):
        for plan, fault in _due(name, context):
            _fire(plan, fault)


def fault_factor(name: str, /, **context: Any) -> float:
    """What to multiply a value with at this point: 1, unless a planned `scale` fires here."""
    factor = 1.0
    if os.environ.get(ENVIRONMENT_VARIABLE):
        for plan, fault in _due(name, context):
            factor *= fault.factor
            _fire(plan, fault)
    return factor


def register(role: str) -> None:
    """Write this process's id to `<dir>/<role>.pid` so that a fault can name it; no-op without a plan."""
    path = os.environ.get(ENVIRONMENT_VARIABLE)
    if not path:
        return
    target = _load(path).directory / f"{role}.pid"
    # Renamed into place: a reader in another process never sees an empty file.
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    temporary.write_text(str(os.getpid()), encoding="utf-8")
    temporary.replace(target)


def _due(name: str, context: dict[str, Any]) -> Iterator[tuple[_Plan, _Fault]]:
    """The planned faults that fire here and now."""
    plan = _load(os.environ[ENVIRONMENT_VARIABLE])
    if "rank" not in context and "RANK" in os.environ:
        context["rank"] = int(os.environ["RANK"])
    for fault in plan.faults:
        if fault.point == name and _matches(fault, context) and _claim(plan, fault):
            yield plan, fault


def _load(path: str) -> _Plan:
    global _loaded
    if _loaded is None or _loaded[0] != path:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        faults = tuple(_parse(number, entry) for number, entry in enumerate(document["faults"]))
        _loaded = (path, _Plan(Path(document["dir"]), faults))
    return _loaded[1]


def _parse(number: int, entry: dict[str, Any]) -> _Fault:
    action = entry["action"]
    if action not in _ACTIONS:
        actions = ", ".join(_ACTIONS)
        raise ValueError(f"fault {number} of {ENVIRONMENT_VARIABLE}: action {action!r} is none of {actions}")
    return _Fault(
        number=number,
        point=entry["point"],
        action=action,
        target=entry.get("target", "self"),
        seconds=float(entry.get("seconds", 0.0)),
        error=entry.get("error"),
        factor=float(entry.get("factor", 1.0)),
        always=bool(entry.get("always", False)),
        match={key: value for key, value in entry.items() if key not in _OPTIONS},
    )


def _matches(fault: _Fault, context: dict[str, Any]) -> bool:
    for key, wanted in fault.match.items():
        if key not in context:
            return False
        found = context[key]
        if isinstance(wanted, str) and isinstance(found, str):
            if not fnmatch.fnmatchcase(found, wanted):
                return False
        elif found != wanted:
            return False
    return True


def _claim(plan: _Plan, fault: _Fault) -> bool:
    """Return True for the one caller, over all processes, that may fire the fault."""
    if fault.always:
        return True
    try:
        (plan.directory / f"fired-{fault.number}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _fire(plan: _Plan, fault: _Fault) -> None:
    if fault.action == "sleep":
        time.sleep(fault.seconds)
    elif fault.action == "raise":
        error: type[Exception] = getattr(errors, fault.error) if fault.error else InjectedFault
        raise error(f"Injected fault at {fault.point}.")
    elif fault.action == "scale":
        return  # the code that offers the value does it
    elif fault.target == "self":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        pid = int((plan.directory / f"{fault.target}.pid").read_text(encoding="utf-8"))
        started = start_time(pid)
        os.kill(pid, signal.SIGKILL)
        _wait_until_gone(pid, started)


def _wait_until_gone(pid: int, started: int | None) -> None:
    """Do not run on to the next point before the kernel has told our own death, when we die with the target."""
    deadline = time.monotonic() + GONE_SECONDS
    while pid_alive(pid, started) and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(SIGNAL_SECONDS)
