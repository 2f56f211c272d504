"""What a pipeline comes back with: the answer of `headrace run`, as a document and as a table."""

from typing import Any, Literal

from pydantic import Field

from headrace.config import Part

Done = Literal["done", "reused"]


class StageResult(Part):
    """One stage of a pipeline."""

    name: str
    outcome: Done = Field(description="done: something was computed; reused: its commit was there already")
    seconds: float = Field(description="time of the stage in this command")
    detail: str = Field(description="what it made or found, in one line")


class Scores(Part):
    """Bits per byte of the validation split; lower is better."""

    model: float
    untrained: float | None = Field(description="the same model before its first step")
    unigram: float | None = Field(description="a model that knows how often each token occurs")
    bigram: float | None = Field(description="a model that knows how often each pair of tokens occurs")


class PretrainResult(Part):
    """One run, from text to a registered model."""

    run_id: str
    run_key: str
    name: str
    dataset: str
    step: int = Field(description="completed optimizer steps")
    attempts: int = Field(description="launches over the whole life of the run")
    stages: tuple[StageResult, ...]
    scores: Scores
    evaluation: dict[str, Any] = Field(description="loss, perplexity, bits per byte, tokens")
    model_name: str
    version: str = Field(description="version of the registered model that holds this run's export")
    new_version: bool
    champion: bool = Field(description="whether the alias champion points to that version")
    verdict: str = Field(description="why the champion is what it is")
    seconds: float
    pages: dict[str, str] = Field(description="pages of servers that answered, by name")

    def rows(self) -> list[list[Any]]:
        """The summary for people."""
        return [
            *[[stage.name, stage.outcome, f"{stage.seconds:.1f} s", stage.detail] for stage in self.stages],
        ]
