"""The commands below `headrace checkpoints`."""

import sys
from collections import Counter
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.tables import print_table, size
from headrace.errors import ConfigError, HeadraceError, NotFound
from headrace.terminal import Terminal, emit_json

if TYPE_CHECKING:
    from flows.checkpoints import Line
    from training.checkpoint.verify import Finding

checkpoints = typer.Typer(
    help="The checkpoints of runs: list, verify, delete, export, compare.", no_args_is_help=True, rich_markup_mode=None
)

ASKING = "Asking MLflow which runs there are ..."

Run = Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, the beginning of it, or a name.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else on stderr.")]


class ExportType(StrEnum):
    """Types of exported weights."""

    float32 = "float32"
    bfloat16 = "bfloat16"


@checkpoints.command("ls")
def ls(run: Run, as_json: Json = False) -> None:
    """List the checkpoints of a run, newest first, with who refers to them. Contents are not read: see `verify`.

    \b
    headrace checkpoints ls quickstart
    headrace checkpoints ls quickstart --json
    """
    from flows.checkpoints import list_checkpoints
    from flows.look import find_place
    from flows.services_file import using_services

    with using_services(), Terminal().waiting(ASKING):
        place = find_place(run)
        lines = list_checkpoints(place)
    if as_json:
        emit_json({"run_id": place.run_id, "name": place.name, "checkpoints": [_line(line) for line in lines]})
        return
    if not lines:
        Terminal().note(f"The run {place.name} has no checkpoints yet.")
        return
    rows = [["step", "attempt", "state", "size", "ranks", "notes"]]
    for line in lines:
        notes = "; ".join([*line.kept_for, line.reason] if line.reason else line.kept_for)
        ranks = "" if line.ranks is None else str(line.ranks)
        rows.append([str(line.step), str(line.attempt), line.state, size(line.num_bytes), ranks, notes])
    print_table(rows)


@checkpoints.command("verify")
def verify(
    run: Run,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only the checkpoint of this step.")] = None,
    content: Annotated[bool, typer.Option("--content", help="Read every byte and compare its SHA-256.")] = False,
    as_json: Json = False,
) -> None:
    """Check the checkpoints of a run and name each damaged file; exit code 1 when there is one. Nothing is changed.

    Without --content: the commits' own digests and the sizes of all files.

    \b
    headrace checkpoints verify quickstart
    headrace checkpoints verify quickstart --step 512 --content
    """
    from flows.checkpoints import verify_checkpoints
    from flows.look import find_place
    from flows.services_file import using_services

    terminal = Terminal(json=as_json)
    with using_services(), terminal.waiting(ASKING):
        place = find_place(run)
    found = verify_checkpoints(place, step=step, content=content, terminal=terminal)
    damaged = sum(not finding.ok for finding in found)
    if as_json:
        emit_json(
            {
                "run_id": place.run_id,
                "name": place.name,
                "content": content,
                "damaged": damaged,
                "checkpoints": [_finding(finding) for finding in found],
            }
        )
    elif not found:
        terminal.note(f"The run {place.name} has no checkpoints yet.")
    else:
        rows = [["step", "attempt", "files", "size", "state"]]
        for f in found:
            rows.append(
                [str(f.step), str(f.attempt), str(f.num_files), size(f.num_bytes), "whole" if f.ok else "DAMAGED"]
            )
        print_table(rows)
        for f in found:
            for damage in f.damage:
                terminal.note(f"step {f.step}: {place.storage.url(f'{f.prefix}/{damage.file}')}: {damage.reason}")
    if damaged:
        raise typer.Exit(1)


@checkpoints.command("gc")
def gc(
    run: Annotated[
        str | None, typer.Argument(metavar="RUN", help="Id of a run, the beginning of it, or a name; or --all.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="Every run that MLflow knows; those in use are left out.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only say what would be deleted, and why.")] = False,
    keep_last: Annotated[
        int | None, typer.Option("--keep-last", min=2, help="Keep so many newest ones, instead of what the run says.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Delete the old checkpoints of a run and what killed saves left, as a run does by itself after each commit.

    What stays: the newest ones that the run's config keeps, and whatever exports, forks and attempts refer to. The
    newest one is read back first; when none is whole, no checkpoint is deleted.

    \b
    headrace checkpoints gc quickstart --dry-run
    headrace checkpoints gc --all
    """
    from flows.checkpoints import InUse, collect, collection_document
    from flows.look import every_place, find_place
    from flows.services_file import using_services

    if (run is None) is not every:
        raise ConfigError("Name one run, or give --all for every run. See `headrace checkpoints gc --help`.")
    terminal = Terminal(json=as_json)
    with using_services(), terminal.waiting(ASKING):
        places = [find_place(run)] if run is not None else every_place()
    documents, failed = [], 0
    for place in places:
        try:
            found = collect(place, keep_last=keep_last, dry_run=dry_run, terminal=terminal)
        except HeadraceError as error:
            if not every:
                raise
            failed += not isinstance(error, InUse | NotFound)  # without a document it has not begun
            documents.append({"run_id": place.run_id, "name": place.name, "left_out": str(error)})
            terminal.note(f"{place.name}: left out. {error}")
            continue
        document = collection_document(place, found, dry_run=dry_run)
        documents.append(document)
        if not as_json:
            _tell_collection(document, terminal)
    if as_json:
        emit_json({"runs": documents})
    if failed:
        raise typer.Exit(1)


@checkpoints.command("export")
def export(
    run: Run,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or an empty folder.")],
    step: Annotated[int | None, typer.Option("--step", min=0, help="Of this step; else the newest.")] = None,
    dtype: Annotated[ExportType, typer.Option("--dtype", help="Type of the weights.")] = ExportType.float32,
    as_json: Json = False,
) -> None:
    """Write a checkpoint as a Hugging Face model: weights as safetensors, config, tokenizer.

    \b
    headrace checkpoints export quickstart --step 256 model-256
    headrace generate ./model-256 --prompt "import "
    """
    from flows.checkpoints import export_checkpoint
    from flows.look import find_place
    from flows.services_file import using_services

    terminal = Terminal(json=as_json)
    with using_services(), terminal.waiting(ASKING):
        place = find_place(run)
    document = export_checkpoint(place, folder, step=step, dtype=dtype.value, terminal=terminal)
    if as_json:
        emit_json(document)
    else:
        sys.stdout.write(f"{document['target']}\n")


@checkpoints.command("diff")
def diff(
    first: Annotated[str, typer.Argument(metavar="RUN@STEP", help="A checkpoint.")],
    second: Annotated[str, typer.Argument(metavar="RUN@STEP", help="Another one, of the same or another run.")],
    as_json: Json = False,
) -> None:
    """Compare two checkpoints tensor by tensor, whatever layouts wrote them. Every byte is verified before it is used.

    The exit code is 0 whether they are equal or not; with --json the document says `equal`.

    \b
    headrace checkpoints diff quickstart@256 quickstart@512
    headrace checkpoints diff 3f2a@100 77b0@100 --json
    """
    from flows.checkpoints import compare_checkpoints
    from flows.services_file import using_services

    terminal = Terminal(json=as_json)
    with using_services():
        document = compare_checkpoints(first, second, terminal)
    if as_json:
        emit_json(document)
        return
    rows = [["tensor", "status", "differing", "max abs difference"]]
    for tensor in document["tensors"]:
        if tensor["status"] != "equal":
            rows.append([tensor["name"], tensor["status"], *_differences(tensor)])
    if len(rows) > 1:
        print_table(rows)
    counts = Counter(tensor["status"] for tensor in document["tensors"])
    told = ", ".join(f"{count} {status}" for status, count in sorted(counts.items()))
    terminal.note(f"{len(document['tensors'])} tensors: {told}")


def _line(line: "Line") -> dict[str, Any]:
    return {
        "step": line.step,
        "attempt": line.attempt,
        "state": line.state,
        "reason": line.reason,
        "bytes": line.num_bytes,
        "ranks": line.ranks,
        "kept_for": line.kept_for,
    }


def _finding(finding: "Finding") -> dict[str, Any]:
    return {
        "step": finding.step,
        "attempt": finding.attempt,
        "ok": finding.ok,
        "files": finding.num_files,
        "bytes": finding.num_bytes,
        "damage": [vars(damage) for damage in finding.damage],
    }


def _tell_collection(document: dict[str, Any], terminal: Terminal) -> None:
    verb = "would delete" if document["dry_run"] else "deleted"
    going = [*document["delete"], *document["sweep"]]
    rows: list[Sequence[str]] = []
    if document["dry_run"]:
        rows += [["stays", str(v["step"]), str(v["attempt"]), size(v["bytes"]), v["reason"]] for v in document["keep"]]
    rows += [["goes", str(v["step"]), str(v["attempt"]), size(v["bytes"]), v["reason"]] for v in going]
    if rows:
        print_table([["", "step", "attempt", "size", "why"], *rows])
    uploads = f", {len(document['uploads'])} unfinished uploads" if document["uploads"] else ""
    terminal.note(f"{document['name']}: {verb} {len(going)} folders, {size(document['bytes'])}{uploads}")
    if not document["dry_run"] and not document["complete"]:
        terminal.note(f"{document['name']}: a new attempt was launched meanwhile; the rest is left to it.")


def _differences(tensor: dict[str, Any]) -> tuple[str, str]:
    if tensor["status"] != "differs":
        return "", tensor["detail"]
    largest = tensor["max_abs_difference"]
    return f"{tensor['differing']:,} of {tensor['elements']:,}", "not finite" if largest is None else f"{largest:.4g}"
