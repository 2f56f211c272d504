"""What `mlflow.pyfunc.load_model` loads: the MLmodel file of an export names this module.

    model = mlflow.pyfunc.load_model("models:/NAME@champion")
    model.predict(["def read"])                                  a list of strings: what follows each prompt

No mlflow here: MLflow calls `_load_pyfunc` with the local folder, and `predict` with what the user gave.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import InputError
from training.generate import Sampling, TextModel, open_model

PROMPT_COLUMN = "prompt"
MAX_NEW_TOKENS = 64
PARAMETERS = ("max_new_tokens", "temperature", "top_k", "seed")


class Completer:
    """Continues prompts with the exported model."""

    def __init__(self, model: TextModel) -> None:
        self._model = model

    def predict(self, model_input: Any, params: Mapping[str, Any] | None = None) -> list[str]:
        """The text that follows each prompt, greedy unless `params` has a temperature.

        `model_input` is a prompt, a list of prompts, or a table (DataFrame, dict of lists) with a column `prompt` or
        with one column. `params`: `max_new_tokens` (64), `temperature` (0), `top_k` (all), `seed` (0).
        Raises InputError for anything else.
        """
        options = dict(params or {})
        unknown = sorted(set(options) - set(PARAMETERS))
        if unknown:
            raise InputError(f"There is no parameter {', '.join(unknown)}; there are {', '.join(PARAMETERS)}.")
        max_new_tokens = int(options.pop("max_new_tokens", MAX_NEW_TOKENS))
        sampling = Sampling(**options)
        prompts = _prompts(model_input)
        return [self._model.complete(p, max_new_tokens=max_new_tokens, sampling=sampling) for p in prompts]


def _load_pyfunc(path: str) -> Completer:
    """Open the exported folder; raises DamagedData when it is not what its commit says."""
    return Completer(open_model(Path(path)))


def _prompts(model_input: Any) -> list[str]:
    if isinstance(model_input, str):
        return [model_input]
    if hasattr(model_input, "columns"):
        model_input = {str(name): list(model_input[name]) for name in model_input.columns}
    if isinstance(model_input, Mapping):
        model_input = _column(model_input)
    if isinstance(model_input, str):
        return [model_input]
    if not isinstance(model_input, Iterable):
        raise InputError(f"Prompts must be texts, got {type(model_input).__name__}.")
    # MLflow makes one row of a dictionary of lists.
    prompts = [text for entry in model_input for text in (entry if isinstance(entry, list) else [entry])]
    wrong = next((prompt for prompt in prompts if not isinstance(prompt, str)), None)
    if wrong is not None:
        raise InputError(f"Each prompt must be a text, but one is {type(wrong).__name__}.")
    return [str(prompt) for prompt in prompts]


def _column(table: Mapping[str, Any]) -> Any:
    if PROMPT_COLUMN in table:
        return table[PROMPT_COLUMN]
    if len(table) != 1:
        raise InputError(
            f"The table has the columns {', '.join(map(str, table))}; name the one with the prompts {PROMPT_COLUMN!r}."
        )
    return next(iter(table.values()))
