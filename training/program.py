"""What the programs have in common that a stage runs in a process of their own: `python -m MODULE spec.json`.

Standard output carries one JSON object a line: reports on the way, and as the last one the result, or `error` and
`retryable`. The exit code is that of the error's class. Everything else goes to standard error.
"""

import json
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from headrace.config import Part
from headrace.errors import HeadraceError, InputError

logger = logging.getLogger(__name__)

Spec = TypeVar("Spec", bound=Part)


def read_spec(kind: type[Spec], path: Path, what: str) -> Spec:
    """Read the spec of `what`; raises InputError when the file is none."""
    try:
        return kind.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise InputError(f"{path} is not the spec of {what}: {error}") from error


def say(document: Mapping[str, Any]) -> None:
    """Write one report."""
    sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
    sys.stdout.flush()


def run_program(kind: type[Spec], what: str, work: Callable[[Spec], Mapping[str, Any]]) -> None:
    """Read the spec that the command line names, do the work and say its result; ends the process on an error."""
    form = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
    try:
        result = work(read_spec(kind, Path(sys.argv[1]), what))
    except HeadraceError as error:
        logger.error("%s", error)
        say({"error": str(error), "retryable": error.retryable})
        sys.exit(error.exit_code)
    say(result)
