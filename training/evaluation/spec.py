"""What an evaluation measures, as one document with a digest: two results compare only when their digests are equal."""

from typing import Literal

from pydantic import Field, PositiveInt

from headrace.config import Part
from headrace.digest import digest_json
from training.evaluation.config import EvaluationConfig

COMMIT_KIND = "evaluation"
PROTOCOL_VERSION: Literal[1] = 1
"""Raise it when the same spec and the same model would give another number."""


class EvalSpec(Part):
    """The protocol of an evaluation; the number of ranks and the batch size do not belong to it."""

    protocol_version: Literal[1] = PROTOCOL_VERSION
    dataset_digest: str = Field(description="commit digest of the dataset whose split is scored")
    tokenizer_digest: str = Field(description="digest of the dataset's tokenizer")
    split: Literal["train", "validation"] = "validation"
    window: PositiveInt = Field(description="tokens of one window; windows do not overlap")
    max_tokens: int | None = Field(None, ge=2, description="tokens of the split that are used, from its start")
    precision: Literal["float32", "bfloat16", "float64"] = Field(description="type that logits are computed in")
    prompts: tuple[str, ...] = Field((), description="texts that the greedy samples continue")
    sample_tokens: PositiveInt = Field(48, description="tokens of one greedy sample")

    @classmethod
    def of(
        cls, config: EvaluationConfig, *, dataset_digest: str, tokenizer_digest: str, window: int, precision: str
    ) -> "EvalSpec":
        """The spec of a config's evaluation of one dataset."""
        return cls.model_validate(
            {
                "dataset_digest": dataset_digest,
                "tokenizer_digest": tokenizer_digest,
                "window": window,
                "max_tokens": config.max_tokens,
                "precision": precision,
                "prompts": config.prompts,
                "sample_tokens": config.sample_tokens,
            }
        )

    @property
    def digest(self) -> str:
        """Identity of the evaluation, and the name of its directory below `evaluations/`."""
        return digest_json(self.model_dump(mode="json"))


class EvaluationTask(Part):
    """What the stage gets: `python -m training.evaluation.main task.json` reads this."""

    storage_root: str = Field(description="URL of the store")
    model: str = Field(description="storage key of the exported model folder")
    dataset_key: str = Field(description="directory name of the dataset below `datasets/`")
    spec: EvalSpec
    target: str = Field(description="storage key of the folder that takes the result")
    work_dir: str = Field(description="local folder for copies of the model and of shards")
    batch_size: PositiveInt = Field(16, description="sequences in one forward pass")
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int = Field(0, ge=0, description="computing threads on CPU; 0 takes every core")
