"""The command `headrace`.

Heavy libraries are imported by the command that needs them: `--help` and `validate` load neither prefect nor mlflow
nor torch.
"""

import logging
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.errors import Cancelled, ConfigError, HeadraceError
from headrace.terminal import Terminal, emit_json

if TYPE_CHECKING:
    from flows.config import PipelineConfig

# Typer brings its own copy of click, or uses click itself, depending on its version; the base class is public in both.
USAGE_ERRORS: tuple[type[Exception], ...] = (typer.BadParameter.__mro__[2],)

app = typer.Typer(
    name="headrace",
    help="Raw text in, a registered and evaluated language model out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Config = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file; `headrace init DATA` writes one.")]
Sets = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one field; may be given many times.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout; everything else on stderr.")]


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
        Terminal().note(f"{config} is valid. Next: headrace run {config}")


@app.command()
def run(config: Config, sets: Sets = None, as_json: Json = False) -> None:
    """Prepare, train, export, evaluate and register; what is done already is reused.

    \b
    headrace run configs/quickstart.yaml
    headrace run my.yaml --set training.steps=500 --json
    """
    from flows.embedded import prefect_api

    loaded = _load(config, sets)
    terminal = Terminal(json=as_json)
    _show_logs(terminal)
    with _stopping(), prefect_api() as wait:
        from flows.pretrain_flow import pretrain
        from tasks.console import showing_on

        wait()
        with showing_on(terminal):
            result = pretrain(loaded)
    if as_json:
        emit_json(result.model_dump(mode="json"))
    else:
        terminal.summary(f"{result.name}: run {result.run_id}", result.rows())


def _load(config: Path, sets: list[str] | None) -> "PipelineConfig":
    from flows.config import load_config

    return load_config(config, tuple(sets or ()))


def _show_logs(terminal: Terminal) -> None:
    """Warnings of our own packages appear above the live bars; other libraries have said nothing a user can act on."""
    from headrace.environment import PACKAGES

    handler = terminal.log_handler()
    for name in PACKAGES:
        logger = logging.getLogger(name)
        logger.handlers = [handler]
        logger.setLevel(logging.WARNING)
        logger.propagate = False


class _stopping:
    """SIGTERM and a closed terminal end the command as Ctrl-C does: children first, then exit code 3."""

    def __enter__(self) -> None:
        self._before = {s: signal.signal(s, _interrupt) for s in (signal.SIGTERM, signal.SIGHUP)}

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def execute(arguments: list[str]) -> int:
    """Run one command and return its exit code; a failure is one sentence, or one document with --json."""
    as_json = "--json" in arguments
    try:
        code = app(arguments, standalone_mode=False)
    except HeadraceError as error:
        return _fail(error, as_json)
    except typer.Abort:
        return _fail(Cancelled("Stopped."), as_json)
    except USAGE_ERRORS as error:
        return _fail(_usage(error), as_json)
    except KeyboardInterrupt:
        return _fail(Cancelled("Stopped. The same command continues from the last commit."), as_json)
    return code if isinstance(code, int) else 0


def _usage(error: Any) -> ConfigError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "headrace"
    return ConfigError(f"{error.format_message()} See `{path} --help`.")


def _fail(error: HeadraceError, as_json: bool) -> int:
    if as_json:
        emit_json({"error": {"kind": type(error).__name__, "message": str(error)}, "exit_code": error.exit_code})
    Terminal().error(str(error))
    return error.exit_code


def main() -> None:
    """Entry point of the console script."""
    sys.exit(execute(sys.argv[1:]))


if __name__ == "__main__":
    main()
