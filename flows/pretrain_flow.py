"""The flow `pretrain`: all stages."""

from prefect import flow

from flows.config import PipelineConfig
from flows.result import PretrainResult
from flows.stages import whole_way


@flow(name="pretrain", persist_result=False)
def pretrain(config: PipelineConfig) -> PretrainResult:
    """Turn the config's text into a registered, evaluated model; whatever is committed already is reused."""
    return whole_way(config)
