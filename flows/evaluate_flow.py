"""The flow `evaluate-model`: up to the score of the exported model."""

from prefect import flow

from flows.config import PipelineConfig
from flows.result import StagesResult
from flows.stages import part_way


@flow(name="evaluate-model", persist_result=False)
def evaluate_model(config: PipelineConfig) -> StagesResult:
    """Export and score the config's model; a changed evaluation trains nothing again."""
    return part_way(config, "evaluate")
