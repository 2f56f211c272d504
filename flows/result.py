"""What a pipeline comes back with: the answer of `headrace run`, as a document and as a table."""

from typing import Any, Literal

from pydantic import Field

from headrace.config import Part


class StageResult(Part):
    """One stage of a pipeline."""

    name: str
    outcome: Literal["done", "reused"] = Field(description="reused: its commit was there already, nothing was computed")
    seconds: float = Field(description="time of the stage in this command")
    detail: str = Field(description="what it made or found, in one line")


class Scores(Part):
    """Bits per byte of the validation split; lower is better."""

    model: float
    untrained: float | None = Field(description="the same model before its first step")
    unigram: float = Field(description="a model that knows how often each token occurs")
    bigram: float = Field(description="a model that knows how often each pair of tokens occurs")


class PretrainResult(Part):
    """One run, from text to a registered model."""

    run_id: str
    run_key: str
    name: str
    dataset: str = Field(description="directory name of the dataset below `datasets/`")
    step: int = Field(description="completed optimizer steps")
    attempts: int = Field(description="launches over the whole life of the run")
    stages: tuple[StageResult, ...]
    bits_per_byte: Scores
    evaluation: dict[str, Any] = Field(description="loss, perplexity, bits per byte, tokens, bytes; and its digest")
    model_name: str
    version: str = Field(description="version of the registered model that holds this run's export")
    new_version: bool
    champion: bool = Field(description="whether the alias champion points to that version")
    verdict: str = Field(description="why the champion is what it is")
    export: str = Field(description="where the exported model lies")
    seconds: float = Field(description="time of this command")
    pages: dict[str, str] = Field(description="pages of servers that answered, by name")

    def rows(self) -> list[list[Any]]:
        """The summary for people."""
        score = self.bits_per_byte
        others = {"untrained": score.untrained, "unigram": score.unigram, "bigram": score.bigram}
        compared = ", ".join(f"{name} {value:.3f}" for name, value in others.items() if value is not None)
        return [
            *([stage.name, stage.outcome, f"{stage.seconds:.1f} s", stage.detail] for stage in self.stages),
            ["bits per byte", f"{score.model:.3f}", "", f"against {compared}"],
            ["attempts", str(self.attempts), "", "over the whole life of the run"],
            ["version", self.version, "", f"of {self.model_name}: {self.verdict}"],
            ["all of it", "", f"{self.seconds:.1f} s", "of this command"],
        ]

    def markdown(self) -> str:
        """The same as an artifact of the flow run."""
        return _page(self.name, f"Run `{self.run_id}`, step {self.step}.", self.rows(), self.pages)


class StagesResult(Part):
    """The first stages of a run: what they made, and null for what comes later."""

    name: str
    dataset: str = Field(description="directory name of the dataset below `datasets/`")
    run_id: str | None = Field(description="null when only the dataset was made")
    step: int | None = Field(description="completed optimizer steps")
    attempts: int | None = Field(description="launches over the whole life of the run")
    export: str | None = Field(description="where the exported model lies")
    bits_per_byte: float | None = Field(description="of the validation split; lower is better")
    stages: tuple[StageResult, ...]
    seconds: float = Field(description="time of this command")
    pages: dict[str, str] = Field(description="pages of servers that answered, by name")

    def rows(self) -> list[list[Any]]:
        """The summary for people."""
        rows = [[stage.name, stage.outcome, f"{stage.seconds:.1f} s", stage.detail] for stage in self.stages]
        if self.bits_per_byte is not None:
            rows.append(["bits per byte", f"{self.bits_per_byte:.3f}", "", "of the validation split"])
        return rows

    def markdown(self) -> str:
        """The same as an artifact of the flow run."""
        what = f"Run `{self.run_id}`, step {self.step}." if self.run_id else f"Dataset `{self.dataset}`."
        return _page(self.name, what, self.rows(), self.pages)


def _page(title: str, what: str, rows: list[list[Any]], pages: dict[str, str]) -> str:
    lines = [f"# {title}", "", what, "", "| | | | |", "|---|---|---|---|"]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    lines += [f"\n[{name}]({page})" for name, page in pages.items()]
    return "\n".join(lines)
