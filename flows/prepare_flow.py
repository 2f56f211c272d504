"""The flow `prepare-data`: text to a dataset."""

from prefect import flow

from flows.config import PipelineConfig
from flows.result import StagesResult
from flows.stages import part_way


@flow(name="prepare-data", persist_result=False)
def prepare_data(config: PipelineConfig) -> StagesResult:
    """Turn the config's text into a dataset; units that are there are reused."""
    return part_way(config, "prepare")
