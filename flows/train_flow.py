"""The flow `train-model`: up to the last checkpoint."""

from prefect import flow

from flows.config import PipelineConfig
from flows.result import StagesResult
from flows.stages import part_way


@flow(name="train-model", persist_result=False)
def train_model(config: PipelineConfig) -> StagesResult:
    """Train the config's model to its last step; the dataset and committed steps are reused."""
    return part_way(config, "train")
