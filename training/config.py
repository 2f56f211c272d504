"""What one training run does, however many machines do it."""

from typing import Literal

from headrace.config import Part, identity

INIT_PATTERN = r"^(run:[0-9a-f]{32}@[0-9]+|hf://.+)$"
MOST_SEQUENCES = 2**16


class TrainingConfig(Part):
    """Steps, batch and precision.

    The upper limits lie far above every run that was ever made, and all of them together below 2**63 tokens: counts
    fit in 64 bits, and a slip of the keyboard is refused.
    """

    steps: int = identity(256, description="optimizer steps of the whole run", ge=1, le=10**8)
    global_batch_size: int = identity(
        16, description="sequences in one optimizer step, over all data-parallel ranks", ge=1, le=MOST_SEQUENCES
    )
    seq_len: int = identity(256, description="tokens in one sequence", ge=2, le=2**20)
    precision: Literal["bfloat16", "float32", "float64"] = identity(
        "bfloat16",
        description="type of the computation; weights and optimizer state are kept in float32 (float64 for float64)",
    )
    init_from: str | None = identity(
        None,
        description="weights to start from: run:ID@STEP of another run, or hf://FOLDER with a Hugging Face model",
        pattern=INIT_PATTERN,
    )

    @property
    def tokens_per_step(self) -> int:
        """Target tokens of one optimizer step."""
        return self.global_batch_size * self.seq_len
