"""The commands `goodput`, `doctor` and `replay`: what a run did, and whether it was right."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from flows.tables import print_table
from headrace.terminal import Terminal, emit_json

if TYPE_CHECKING:
    from training.health.goodput import Goodput

Run = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, the beginning of it, or a name.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else on stderr.")]

WAITING = "Reading the run's events ..."

REPLAY_TOLERANCE = 1e-5
"""Relative: sums over ranks and micro-batches are made in another order than in the run."""

SHOWN_STEPS = 20


def goodput(
    run: Run,
    price: Annotated[
        float | None, typer.Option("--price", min=0, help="What one device costs in an hour, in your currency.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say where the time of a run went, and how often it should save.

    \b
    headrace goodput quickstart
    headrace goodput quickstart --price 2.50 --json
    """
    from flows.look import run_account
    from flows.services_file import using_services

    with using_services(), Terminal().waiting(WAITING):
        record, account = run_account(run)
    hours = account.device_seconds / 3600
    if as_json:
        emit_json(
            {
                "run_id": record.run_id,
                "seconds": account.seconds,
                "wall_seconds": account.wall_seconds,
                "productive_share": account.productive_share,
                "failures": account.failures,
                "device_hours": hours,
                "cost": None if price is None else price * hours,
                "save_advice": vars(account.advice) if account.advice else None,
                "why_no_save_advice": account.why_no_advice,
            }
        )
        return
    rows = [
        [name.replace("_", " "), f"{value:.1f} s", _share(value, account)] for name, value in account.seconds.items()
    ]
    rows.append(["wall", f"{account.wall_seconds:.1f} s", ""])
    rows.append(["device-hours", f"{hours:.3f}", "" if price is None else f"{price * hours:.2f} at {price:g} an hour"])
    terminal = Terminal(stream=sys.stdout)
    terminal.summary(f"{record.name}: run {record.run_id}", rows)
    if account.advice is not None:
        advice = account.advice
        terminal.note(
            f"  checkpoint.save_every {advice.steps} would lose least: a save costs {advice.save_seconds:.3f} s and is "
            f"durable after {advice.durable_seconds:.1f} s; one failure in {advice.between_failures_seconds:.0f} s"
            + ("" if account.failures else " assumed, none was seen")
        )
    elif account.why_no_advice is not None:
        terminal.note(f"  {account.why_no_advice}")


def _share(value: float, account: "Goodput") -> str:
    return f"{value / account.wall_seconds:.1%}" if account.wall_seconds else ""


def doctor(run: Run, as_json: Json = False) -> None:
    """Say what is wrong with a run, with the evidence and what to do.

    \b
    headrace doctor quickstart
    headrace doctor 3f2a --json
    """
    from flows.look import examine_run
    from flows.services_file import using_services
    from training.health.doctor import as_document

    with using_services(), Terminal().waiting(WAITING):
        record, findings = examine_run(run)
    if as_json:
        emit_json({"run_id": record.run_id, **as_document(findings)})
        return
    lines = [f"{record.name}: {findings[0].verdict}"]
    for finding in findings:
        if finding is not findings[0]:
            lines.append(f"also: {finding.verdict}")
        lines += [f"  {evidence}" for evidence in finding.evidence]
        lines += [f"  {finding.advice}"] if finding.advice else []
    sys.stdout.write("\n".join(lines) + "\n")


def replay(
    run: Run,
    step: Annotated[int, typer.Option("--step", min=1, help="The step to do again.")],
    as_json: Json = False,
) -> None:
    """Do one step of a run again, in one process, and compare it with what was logged; exit code 1 when it differs.

    It begins at the newest checkpoint before the step, and writes nothing to the run.

    \b
    headrace replay quickstart --step 100
    headrace replay 3f2a --step 100 --json
    """
    from flows.checkpoints import replay_step
    from flows.look import find_place
    from flows.services_file import using_services

    terminal = Terminal(json=as_json)
    with using_services(), terminal.waiting(WAITING):
        place = find_place(run)
    report = replay_step(place, step, terminal)
    same = report["largest_difference"] <= REPLAY_TOLERANCE
    if as_json:
        emit_json({"run_id": place.run_id, "tolerance": REPLAY_TOLERANCE, "equal": same, **report})
    else:
        rows = [["step", "first sample", "loss", "logged", "grad norm", "logged"]]
        rows += [
            [
                *(str(done["step"]), str(done["first_sample"])),
                *(f"{done[name]:.9g}" for name in ("loss", "logged_loss", "grad_norm", "logged_grad_norm")),
            ]
            for done in report["steps"][-SHOWN_STEPS:]
        ]
        print_table(rows)
        how = "equal" if same else "NOT equal"
        sys.stdout.write(
            f"{how}: largest relative difference {report['largest_difference']:.1e}, {REPLAY_TOLERANCE:g} is allowed\n"
        )
    if not same:
        raise typer.Exit(1)


def register(app: typer.Typer) -> None:
    """Add the commands to `app`."""
    app.command()(goodput)
    app.command()(doctor)
    app.command()(replay)
