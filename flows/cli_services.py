"""The commands `up`, `status` and `down`."""

from typing import Annotated, Any

import typer

from headrace.terminal import Terminal, emit_json

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else on stderr.")]


def up(
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port of Prefect's API and pages; 0 takes a free one.")
    ] = 4200,
    mlflow_port: Annotated[
        int, typer.Option("--mlflow-port", min=0, max=65535, help="Port of MLflow on loopback; 0 takes a free one.")
    ] = 5000,
    host: Annotated[
        str, typer.Option("--host", help="Address of Prefect's server; others than loopback need a login.")
    ] = "127.0.0.1",
    as_json: Json = False,
) -> None:
    """Serve Prefect, MLflow, the deployments and a worker on this state folder, until Ctrl-C.

    \b
    headrace up
    headrace up --port 0 --mlflow-port 0 --json
    """
    from flows.services import Options, serve
    from flows.services_file import ServicesRecord

    terminal = Terminal(json=as_json)

    def on_live(record: ServicesRecord) -> None:
        terminal.note(f"Prefect: {record.prefect_ui}")
        terminal.note(f"MLflow:  {record.mlflow_page}")
        terminal.note("Next: start the deployment `quickstart` on Prefect's page, or headrace run CONFIG elsewhere.")
        terminal.note("      headrace status shows what runs; Ctrl-C or headrace down ends it.")
        if as_json:
            emit_json(record.model_dump(mode="json"))

    serve(Options(host=host, port=port, mlflow_port=mlflow_port), terminal, on_live)


def status(as_json: Json = False) -> None:
    """Say what `headrace up` runs here; exit code 1 when not all of it is live.

    \b
    headrace status
    """
    from flows.services_status import status

    found = status()
    if as_json:
        emit_json(found)
    else:
        _tell_status(found, Terminal())
    if not found["live"]:
        raise typer.Exit(1)


def down(as_json: Json = False) -> None:
    """End `headrace up` of this state folder and all that it started, and nothing else.

    \b
    headrace down
    """
    from flows.services_status import down

    found = down()
    if as_json:
        emit_json(found)
        return
    terminal = Terminal()
    if not found["ended"]:
        terminal.note(f"`headrace up` does not run on {found['home']}; nothing was ended.")
        return
    for process in found["ended"]:
        terminal.note(f"ended {process['name']} (process {process['pid']})")


def register(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    for command in (up, status, down):
        app.command()(command)


def _tell_status(found: dict[str, Any], terminal: Terminal) -> None:
    if found["up"] is None:
        what = "is starting" if found["starting"] else "does not run"
        terminal.note(f"`headrace up` {what} on {found['home']}.")
        return
    rows = [["service", "process", "state", "since", "address"]]
    for service in found["services"]:
        state = "live" if service["answers"] else "does not answer" if service["alive"] else "dead"
        rows.append([service["name"], f"{service['pid']}", state, service["since"], service["url"] or ""])
    terminal.summary(f"headrace up on {found['home']}, process {found['up']['pid']}", rows)
    rows = [[item["name"], f"next {item['next']}" if item["next"] else ""] for item in found["deployments"]]
    terminal.summary("Deployments", rows)
    rows = [[run["flow"], run["name"], run["state"], run["page"]] for run in found["runs"]]
    terminal.summary("Runs in progress", rows or [["none"]])
    for name, page in found["pages"].items():
        terminal.note(f"  {name}: {page}")
