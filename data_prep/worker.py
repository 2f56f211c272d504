"""A process that builds units: `python -m data_prep.worker`, started by `data_prep.workers`.

It reads one JSON line of set-up and then one line for each unit from its input, and answers with JSON lines on its
output: `progress`, then `built` or `error`. It ends with its input, and is killed when its parent ends.
"""

import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from pydantic import TypeAdapter

from data_prep.plan import UnitPlan
from data_prep.tokenizers import Encoder, PinnedTokenizer, load_json
from data_prep.units import UnitProgress, build_unit
from headrace.errors import HeadraceError
from headrace.process import set_parent_death_signal
from headrace.storage import Storage

UNIT = TypeAdapter(UnitPlan)
TOKENIZER = TypeAdapter(PinnedTokenizer)


def main() -> None:
    """Serve units until the input ends."""
    # The tar writer works without torch. Loading it would cost each process 1.4 s and 180 MiB.
    sys.modules["torch"] = None  # type: ignore[assignment]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends its workers itself
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    answers = _private_output()
    setup = json.loads(sys.stdin.buffer.readline())
    set_parent_death_signal(signal.SIGKILL, setup["parent_pid"])
    storage = Storage.open(setup["storage"])
    tokenizer = TOKENIZER.validate_python(setup["tokenizer"])
    encoder = Encoder(load_json(storage, tokenizer.key), tokenizer.eos_id, tokenizer.bos_id)
    for line in sys.stdin.buffer:
        _serve(UNIT.validate_json(line), storage, encoder, Path(setup["scratch"]), answers)


def _serve(unit: UnitPlan, storage: Storage, encoder: Encoder, scratch: Path, answers: BinaryIO) -> None:
    def report(progress: UnitProgress) -> None:
        _answer(answers, "progress", documents=progress.documents, tokens=progress.tokens, bytes=progress.text_bytes)

    try:
        commit = build_unit(storage, unit, encoder, scratch, report)
    except HeadraceError as error:
        _answer(answers, "error", error=type(error).__name__, message=str(error))
    else:
        _answer(answers, "built", digest=commit.digest)


def _answer(answers: BinaryIO, kind: str, **values: Any) -> None:
    answers.write(json.dumps({"kind": kind, **values}).encode("utf-8") + b"\n")
    answers.flush()


def _private_output() -> BinaryIO:
    """Keep standard output for answers alone: what a library prints goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return answers


if __name__ == "__main__":
    main()
