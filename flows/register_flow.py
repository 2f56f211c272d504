"""The flow `register-model`: the same way as `pretrain`, for who looks for its last stage by name."""

from prefect import flow

from flows.config import PipelineConfig
from flows.result import PretrainResult
from flows.stages import whole_way


@flow(name="register-model", persist_result=False)
def register_model(config: PipelineConfig) -> PretrainResult:
    """Give the config's model its version and compare it with the champion; what is done already is reused."""
    return whole_way(config)
