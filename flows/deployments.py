"""The deployments and automations that come with the project, as documents.

They lie in `deployments/` of a checkout; the wheel carries the same files inside this package.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from headrace.errors import HeadraceError

POOL = "headrace"


@dataclass(frozen=True)
class Deployment:
    """One deployment of `prefect.yaml`."""

    name: str
    entrypoint: str
    """Module path of the flow."""

    description: str
    tags: tuple[str, ...]
    parameters: dict[str, Any]
    job_variables: dict[str, Any]
    schedules: tuple[dict[str, Any], ...]
    queue: str | None
    """Work queue of its flow runs; None is the pool's default one."""
    limit: int | None
    """Runs of it at the same time. None is no limit."""
    collision_strategy: str | None
    """What becomes of a run that is one too many."""


def folder() -> Path:
    """Where the files are. Raises HeadraceError when the installation lacks them."""
    here = Path(__file__).resolve().parent
    for candidate in (here / "deployments", here.parent / "deployments"):
        if (candidate / "prefect.yaml").is_file():
            return candidate
    raise HeadraceError(f"There is no deployments/prefect.yaml in {here} or beside it. Install headrace again.")


def deployments() -> list[Deployment]:
    """Every deployment, in the order of the file."""
    document = yaml.safe_load((folder() / "prefect.yaml").read_text(encoding="utf-8"))
    return [_deployment(item) for item in document["deployments"]]


def queues() -> dict[str, int]:
    """The work queues, with the number of flow runs at a time."""
    document = yaml.safe_load((folder() / "prefect.yaml").read_text(encoding="utf-8"))
    return dict(document.get("definitions", {}).get("queues", {}))


def automations() -> list[dict[str, Any]]:
    """Every automation, by file name."""
    files = sorted((folder() / "automations").glob("*.yaml"))
    return [yaml.safe_load(file.read_text(encoding="utf-8")) for file in files]


def _deployment(item: dict[str, Any]) -> Deployment:
    limit = item.get("concurrency_limit", {})
    return Deployment(
        name=item["name"],
        entrypoint=item["entrypoint"],
        description=item["description"],
        tags=tuple(item.get("tags", ())),
        parameters=item.get("parameters", {}),
        job_variables=item["work_pool"].get("job_variables", {}),
        schedules=tuple(item.get("schedules", ())),
        queue=item["work_pool"].get("work_queue_name"),
        limit=limit.get("limit"),
        collision_strategy=limit.get("collision_strategy"),
    )
