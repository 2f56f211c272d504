"""`headrace trigger`: one run of a deployment, asked for from outside: CI, a script, another machine.

The config is merged and checked here, and posted whole: a part of it would replace the nested defaults of the
deployment. An idempotency key makes the request safe to repeat: the same key is the same flow run.
"""

import json
import os
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.config import PipelineConfig
from flows.embedded import apply_settings
from headrace.config_check import parse
from headrace.environment import home
from headrace.errors import ConfigError, HeadraceError, Retryable
from headrace.terminal import Terminal

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.schemas.objects import FlowRun
    from prefect.client.schemas.responses import DeploymentResponse

SERVICES = "services.json"
"""Below HEADRACE_HOME while `headrace up` runs: the addresses of what it started."""

SCHEMES = ("http://", "https://")


@dataclass(frozen=True)
class Request:
    """What is asked for."""

    config: PipelineConfig
    deployment: str = "pretrain/pretrain"
    idempotency_key: str | None = None


@dataclass(frozen=True)
class Posted:
    """The flow run of a request."""

    flow_run: "FlowRun"
    page: str
    is_new: bool
    """Whether this request made it; else an earlier one with the same key did."""


def trigger_run(
    request: Request, terminal: Terminal, *, wait: bool = False, timeout: float | None = None
) -> dict[str, Any]:
    """Ask for the run and, with `wait`, watch it to its end; returns the document that the command prints.

    Raises ConfigError when the request is refused, Terminal for a run that failed, Cancelled for one that was
    cancelled, and Retryable when the API is away or `timeout` seconds have passed.
    """
    url = api_url()
    apply_settings()
    os.environ["PREFECT_API_URL"] = url
    # Outages are ridden out in `flows.watching`, which says so; in here a lost request is a lost request.
    os.environ.setdefault("PREFECT_CLIENT_MAX_RETRIES", "1")
    from prefect.client.orchestration import get_client

    from flows.watching import Watch

    with get_client(sync_client=True) as client, api_errors(url):
        posted = post(client, request)
        _say(posted, request, terminal)
        if not wait:
            return _document(posted)
        ended = Watch(client, posted.flow_run, terminal, timeout=timeout).to_the_end()
        return {**_document(posted), **ended}


def api_url() -> str:
    """The Prefect API: PREFECT_API_URL, or that of a `headrace up` of this state folder. Raises ConfigError."""
    given = os.environ.get("PREFECT_API_URL") or _started_here()
    if given is None:
        raise ConfigError(
            f"No Prefect API is known. Set PREFECT_API_URL to the server that has the deployments, or start one with "
            f"`headrace up` (its addresses would be in {home() / SERVICES})."
        )
    if not given.startswith(SCHEMES):
        raise ConfigError(f"PREFECT_API_URL is {given!r}, but it must start with http:// or https://.")
    return given


def _started_here() -> str | None:
    path = home() / SERVICES
    try:
        document: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} cannot be read ({error}). Set PREFECT_API_URL, or start `headrace up` again."
        ) from error
    found = document.get("prefect_api") if isinstance(document, dict) else None
    return found if isinstance(found, str) else None


def for_worker(config: PipelineConfig, terminal: Terminal) -> PipelineConfig:
    """The config with the paths that a worker can use: relative ones are made absolute, and that is said.

    Raises ConfigError for a relative input that does not exist here: then nobody knows which file is meant.
    """
    inputs = tuple(
        part.model_copy(update={"path": _absolute(part.path, f"data.inputs.{index}.path", terminal)})
        for index, part in enumerate(config.data.inputs)
    )
    data = config.data.model_copy(update={"inputs": inputs})
    tokenizer, storage = config.tokenizer, config.storage
    if tokenizer.path is not None:
        path = _absolute(tokenizer.path, "tokenizer.path", terminal)
        tokenizer = tokenizer.model_copy(update={"path": path})
    if storage.root is not None:
        root = _absolute(storage.root, "storage.root", terminal, must_exist=False)
        storage = storage.model_copy(update={"root": root})
    return config.model_copy(update={"data": data, "tokenizer": tokenizer, "storage": storage})


def _absolute(text: str, key: str, terminal: Terminal, *, must_exist: bool = True) -> str:
    if urllib.parse.urlsplit(text).scheme or text.startswith(("/", "~")):
        return text
    path = Path(text).absolute()
    fixed = next((p for p in (path, *path.parents) if not any(c in str(p) for c in "*?[")), path)
    if must_exist and not fixed.exists():
        raise ConfigError(
            f"{key} is {text!r}, relative to where this command runs, but {fixed} does not exist here. Give the "
            f"absolute path as the worker sees it, for example --set {key}={path}."
        )
    terminal.note(f"{key} is sent as {path}: the worker has to see it there.")
    return str(path)


def post(client: "SyncPrefectClient", request: Request) -> Posted:
    """Make the flow run, or find the one that the key has already. Raises ConfigError when the server refuses."""
    from prefect.utilities.urls import url_for

    deployment = find_deployment(client, request.deployment)
    key = request.idempotency_key
    known = _by_key(client, deployment, key) if key else None
    flow_run = known or _create(client, deployment, request)
    if key:
        _require_same(flow_run, deployment, request)
    page = url_for("flow-run", flow_run.id) or f"flow run {flow_run.id}"
    return Posted(flow_run, page, is_new=known is None)


def find_deployment(client: "SyncPrefectClient", name: str) -> "DeploymentResponse":
    """The deployment of that name, FLOW/NAME. Raises ConfigError, saying which there are."""
    from prefect.exceptions import ObjectNotFound

    if name.count("/") != 1:
        raise ConfigError(f"--deployment takes FLOW/NAME, such as pretrain/pretrain, got {name!r}.")
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        flows = {flow.id: flow.name for flow in client.read_flows()}
        names = sorted(f"{flows.get(d.flow_id, '?')}/{d.name}" for d in client.read_deployments())
        there = f"it has {', '.join(names)}" if names else "it has none; `headrace up` makes them"
        raise ConfigError(f"The Prefect server has no deployment {name!r}: {there}.") from None


def _by_key(client: "SyncPrefectClient", deployment: "DeploymentResponse", key: str) -> "FlowRun | None":
    from prefect.client.schemas.filters import (
        FlowFilter,
        FlowFilterId,
        FlowRunFilter,
        FlowRunFilterIdempotencyKey,
    )

    found = client.read_flow_runs(
        flow_filter=FlowFilter(id=FlowFilterId(any_=[deployment.flow_id])),
        flow_run_filter=FlowRunFilter(idempotency_key=FlowRunFilterIdempotencyKey(any_=[key])),
    )
    return found[0] if found else None


def _create(client: "SyncPrefectClient", deployment: "DeploymentResponse", request: Request) -> "FlowRun":
    from prefect.exceptions import PrefectHTTPStatusError

    document = request.config.model_dump(mode="json")
    try:
        return client.create_flow_run_from_deployment(
            deployment.id, parameters={"config": document}, idempotency_key=request.idempotency_key
        )
    except PrefectHTTPStatusError as error:
        if error.response.status_code not in (400, 409, 422):
            raise
        raise ConfigError(
            f"The Prefect server refuses this config for {request.deployment}: {_detail(error.response)} Its "
            "deployment may be of another version of headrace: deploy it again."
        ) from None


def _detail(response: Any) -> str:
    """What the server says, in one sentence."""
    try:
        said = response.json()
    except ValueError:
        said = response.text
    if isinstance(said, dict):
        said = said.get("detail", said.get("exception_message", said))
    text = " ".join(str(said).split()).removeprefix("Error creating flow run: ")
    return text[:500].rstrip(".") + "."


def _require_same(flow_run: "FlowRun", deployment: "DeploymentResponse", request: Request) -> None:
    """Refuse a key that stands for another request."""
    key = request.idempotency_key
    if flow_run.deployment_id != deployment.id:
        raise ConfigError(
            f"The idempotency key {key!r} belongs to the flow run {flow_run.id} of another deployment than "
            f"{request.deployment}. Take another key."
        )
    different = differences(flow_run.parameters.get("config"), request.config)
    if different:
        raise ConfigError(
            f"The idempotency key {key!r} belongs to the flow run {flow_run.id}, which has another config: "
            f"{'; '.join(different)}. Take another key for another config."
        )


def differences(posted: Any, config: PipelineConfig) -> list[str]:
    """In which fields a config differs from one that was posted earlier, in words; at most four of them."""
    if not isinstance(posted, Mapping):
        return ["it is no config"]
    try:
        # The earlier one may lack fields that are new: they have their defaults.
        before = parse(PipelineConfig, posted).model_dump(mode="json")
    except HeadraceError:
        before = dict(posted)
    found = list(_differences(before, config.model_dump(mode="json"), ""))
    return [*found[:3], f"and {len(found) - 3} more"] if len(found) > 4 else found


def _differences(before: Any, now: Any, key: str) -> Iterator[str]:
    if isinstance(before, Mapping) and isinstance(now, Mapping):
        for name in dict.fromkeys([*before, *now]):
            yield from _differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield f"{key} is {before!r} there, {now!r} here"


@contextmanager
def api_errors(url: str) -> Iterator[None]:
    """Say what a failed request means: the API is away, or it does not let us in."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        code = error.response.status_code
        if code in (401, 403):
            raise ConfigError(
                f"The Prefect API at {url} refuses access ({code}). Set PREFECT_API_KEY or PREFECT_API_AUTH_STRING."
            ) from None
        raise Retryable(
            f"The Prefect API at {url} answered {code}: {_detail(error.response)} Give the same command again."
        ) from None
    except httpx.TransportError as error:
        raise Retryable(
            f"The Prefect API at {url} does not answer ({type(error).__name__}). Start it or correct PREFECT_API_URL; "
            "then give the same command again."
        ) from None


def _say(posted: Posted, request: Request, terminal: Terminal) -> None:
    name = posted.flow_run.name
    if posted.is_new:
        terminal.note(f"Flow run {posted.flow_run.id} ({name}) of {request.deployment} is asked for.")
    else:
        terminal.note(
            f"The idempotency key {request.idempotency_key!r} has the flow run {posted.flow_run.id} ({name}) already; "
            "no second one is made."
        )
    terminal.note(f"  {posted.page}")


def _document(posted: Posted) -> dict[str, Any]:
    state = posted.flow_run.state
    return {
        "flow_run_id": str(posted.flow_run.id),
        "flow_run": posted.flow_run.name,
        "state": state.name if state else None,
        "created": posted.is_new,
        "pages": {"Prefect": posted.page},
    }
