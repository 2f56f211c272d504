"""The command `headrace`.

Heavy libraries are imported by the command that needs them: `--help`, `validate` and `init` load neither prefect nor
mlflow nor torch.
"""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flows.cli_checkpoints import checkpoints
from flows.cli_health import register as register_health
from flows.cli_services import register as register_services
from flows.tables import print_table
from headrace.errors import Cancelled, ConfigError, HeadraceError
from headrace.terminal import Terminal, emit_json

if TYPE_CHECKING:
    from flows.config import PipelineConfig

# Typer brings its own copy of click, or uses click itself, depending on its version; the base class is public in both.
USAGE_ERRORS: tuple[type[Exception], ...] = (typer.BadParameter.__mro__[2],)

INTERRUPTED = 130
"""What typer makes of Ctrl-C inside a command."""

ASKING = "Asking MLflow which runs there are ..."
"""Shown meanwhile: its library takes seconds to load, and nobody else knows the runs of all stores."""

app = typer.Typer(
    name="headrace",
    help="Raw text in, a registered and evaluated language model out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
runs = typer.Typer(help="What there is.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(runs, name="runs")
app.add_typer(checkpoints, name="checkpoints")

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; `headrace init DATA` writes one.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one field; may be given many times.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else on stderr.")]


@app.command()
def init(
    data: Annotated[str, typer.Argument(metavar="DATA", help="A folder, a file, a quoted glob, or python-stdlib:")],
    name: Annotated[
        str | None, typer.Option("--name", help="Name of the run; else that of the file it is written to.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a commented config, sized to this machine and to the text.

    \b
    headrace init DATA > my.yaml
    headrace init "texts/*.txt" --name novels > novels.yaml
    """
    import yaml

    from flows.config import PipelineConfig
    from flows.sizing import Machine, write_config
    from headrace.config_check import parse

    text = write_config(data, name, Machine.here())
    document = yaml.safe_load(text)
    parse(PipelineConfig, document)
    if as_json:
        emit_json({"config": document, "yaml": text})
    else:
        sys.stdout.write(text)


@app.command()
def validate(
    config: Config,
    sets: Sets = None,
    show: Annotated[bool, typer.Option("--show", help="Print the resolved document.")] = False,
    as_json: Json = False,
) -> None:
    """Check a config: every fault at once, before anything starts.

    \b
    headrace validate my.yaml --show
    headrace validate my.yaml --set optimizer.learning_rate=0.001
    """
    from headrace.config import to_yaml

    loaded = _load(config, sets)
    if as_json:
        emit_json({"valid": True, "config": loaded.model_dump(mode="json")})
    elif show:
        sys.stdout.write(to_yaml(loaded))
    else:
        Terminal().note(f"{config} is valid; its inputs are looked at by the run. Next: headrace run {config}")


@app.command()
def run(config: Config, sets: Sets = None, as_json: Json = False) -> None:
    """Prepare, train, export, evaluate and register; what is done already is reused.

    The same command again continues what was stopped, killed or failed.

    \b
    headrace run configs/quickstart.yaml
    headrace run my.yaml --set training.steps=500 --json
    """
    from flows.command import run_pipeline

    loaded = _load(config, sets)
    terminal = Terminal(json=as_json)
    result = run_pipeline(loaded, terminal)
    if as_json:
        emit_json(result.model_dump(mode="json"))
        return
    terminal.summary(f"{result.name}: run {result.run_id}", result.rows())
    for page in result.pages.values():
        terminal.note(f"  {page}")
    following = [f'headrace generate {result.model_name} --prompt "..."', f"headrace runs show {result.name}"]
    terminal.note(f"  next: {'   '.join(following if result.pages else [*following, 'headrace ui'])}")


@app.command()
def trigger(
    config: Annotated[Path, typer.Option("--config", metavar="CONFIG", help="YAML file, as `headrace run` takes it.")],
    sets: Sets = None,
    idempotency_key: Annotated[
        str | None, typer.Option("--idempotency-key", help="The same key never makes two runs; a commit's id, say.")
    ] = None,
    deployment: Annotated[
        str, typer.Option("--deployment", metavar="FLOW/NAME", help="The deployment to run.")
    ] = "pretrain/pretrain",
    wait: Annotated[
        bool, typer.Option("--wait", help="Watch the run to its end and leave with its result; a signal cancels it.")
    ] = False,
    timeout: Annotated[
        float | None, typer.Option("--timeout", metavar="SECONDS", help="With --wait: stop waiting; the run goes on.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Ask a Prefect server for a run of a deployment, and see it through.

    The server is that of PREFECT_API_URL, or of the `headrace up` of this state folder.

    \b
    headrace trigger --config my.yaml --wait
    headrace trigger --config my.yaml --set training.steps=500 --idempotency-key release-7
    """
    from flows.trigger import Request, for_worker, trigger_run

    terminal = Terminal(json=as_json)
    request = Request(for_worker(_load(config, sets), terminal), deployment, idempotency_key)
    document = trigger_run(request, terminal, wait=wait, timeout=timeout)
    if as_json:
        emit_json(document)
        return
    rows = [[s["name"], s["outcome"], f"{s['seconds']:.1f} s", s["detail"]] for s in document.get("stages", [])]
    if rows:
        terminal.summary(f"{document['flow_run']}: {document['state']}", rows)
    for page in document["pages"].values():
        terminal.note(f"  {page}")


@runs.command("ls")
def runs_ls(as_json: Json = False) -> None:
    """List every run, newest first.

    \b
    headrace runs ls
    """
    from flows.look import list_runs
    from flows.services_file import using_services

    with using_services(), Terminal().waiting(ASKING):
        found = list_runs()
    if as_json:
        emit_json({"runs": [vars(line) for line in found]})
        return
    if not found:
        Terminal().note("There are no runs yet. Next: headrace init DATA > my.yaml, then headrace run my.yaml")
        return
    rows = [["run", "name", "status", "step", "attempts", "bits per byte", "version"]]
    for line in found:
        score = f"{line.bits_per_byte:.3f}" if line.bits_per_byte is not None else ""
        step = f"{line.step}/{line.steps}"
        rows.append([line.run_id, line.name, line.status, step, str(line.attempts), score, line.model or ""])
    print_table(rows)
    for line in found:
        if line.problem is not None:
            Terminal().note(f"{line.run_id}: {line.problem}")


@runs.command("show")
def runs_show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="Id of a run, the beginning of it, or a name.")],
    as_json: Json = False,
) -> None:
    """Show one run: how far it came, its attempts, checkpoints, exports and config.

    \b
    headrace runs show quickstart
    headrace runs show 3f2a --json
    """
    from flows.look import show_run
    from flows.services_file import using_services

    with using_services(), Terminal().waiting(ASKING):
        shown = show_run(run)
    if as_json:
        emit_json(shown)
        return
    import yaml

    sys.stdout.write(yaml.safe_dump(shown, sort_keys=False, allow_unicode=True, width=120))


@app.command()
def generate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="A registered model, models:/NAME@ALIAS, the id of a run, or a folder."),
    ],
    prompt: Annotated[str, typer.Option("--prompt", help="The text to continue.")],
    as_json: Json = False,
) -> None:
    """Continue a text, greedily.

    \b
    headrace generate quickstart --prompt "import "
    headrace generate models:/quickstart@champion --prompt "def " --json
    """
    from flows.command import continue_text
    from flows.services_file import using_services

    with using_services(), Terminal().waiting(f"Opening {model} and continuing the text ..."):
        folder, text = continue_text(model, prompt)
    if as_json:
        emit_json({"model": str(folder), "prompt": prompt, "text": text})
    else:
        sys.stdout.write(f"{prompt}{text}\n")


@app.command()
def ui(
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="Port on loopback; 0 takes a free one.")] = 5000,
    as_json: Json = False,
) -> None:
    """Serve MLflow on the state of this folder and print its page, until Ctrl-C.

    \b
    headrace ui
    headrace ui --port 0
    """
    from flows.command import serve_pages

    def on_page(page: str) -> None:
        if as_json:
            emit_json({"page": page})
        else:
            sys.stdout.write(f"{page}\n")
            sys.stdout.flush()  # a pipe is read while the server runs

    serve_pages(port, Terminal(json=as_json), on_page)


register_services(app)
register_health(app)


def _load(config: Path, sets: list[str] | None) -> "PipelineConfig":
    from flows.config import load_config

    return load_config(config, tuple(sets or ()))


def execute(arguments: list[str]) -> int:
    """Run one command and return its exit code; a failure is one sentence, or one document with --json."""
    as_json = "--json" in arguments
    try:
        code = app(arguments, standalone_mode=False)
    except HeadraceError as error:
        return _fail(error, as_json)
    except USAGE_ERRORS as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # known by its name, as Typer's two copies of click have two
            sys.stderr.write(f"{error}\n")
            return ConfigError.exit_code
        return _fail(_usage(error), as_json)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except BrokenPipeError:
        return 0  # the reader has seen enough
    if code == INTERRUPTED:
        return _fail(Cancelled("Stopped. The same command continues from what is committed."), as_json)
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> ConfigError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "headrace"
    return ConfigError(f"{error.format_message()} See `{path} --help`.")


def _fail(error: HeadraceError, as_json: bool) -> int:
    if as_json:
        emit_json({"error": {"kind": type(error).__name__, "message": str(error)}, "exit_code": error.exit_code})
    else:
        Terminal().error(str(error))
    return error.exit_code


def main() -> None:
    """Entry point of the console script."""
    sys.exit(execute(sys.argv[1:]))


if __name__ == "__main__":
    main()
