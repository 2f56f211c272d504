"""What a flow run leaves for those who look at Prefect: links while it works, and a report at its end."""

from collections.abc import Mapping, Sequence
from typing import Any

from prefect.artifacts import create_link_artifact, create_markdown_artifact, create_table_artifact

from flows.result import PretrainResult, StagesResult
from tasks.curve import markdown


def show_pages(pages: Mapping[str, str]) -> None:
    """Link the run from the flow run, as soon as there is one to look at."""
    for name, page in pages.items():
        create_link_artifact(page, link_text=name, key=name.lower(), description=f"The run in {name}, live")


def publish(result: PretrainResult | StagesResult, curve: Sequence[Mapping[str, Any]]) -> None:
    """The summary with the loss, and the same as tables."""
    report = result.markdown()
    if curve:
        report += f"\n\n## Loss\n\n{markdown(curve)}"
        rows = [dict(row) for row in curve]
        create_table_artifact(rows, key="loss", description="What was learned, up to the last commit")
    create_markdown_artifact(report, key="summary", description="What the pipeline came back with")
    create_table_artifact(
        [stage.model_dump() for stage in result.stages], key="stages", description="Stages done or reused"
    )
