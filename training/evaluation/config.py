"""What is measured, in the loop and at the end."""

from headrace.config import Part, evaluation, execution


class EvaluationConfig(Part):
    """Validation loss, bits per byte and greedy samples."""

    every: int = execution(100, description="optimizer steps between two evaluations in the loop", ge=1, le=10**8)
    batch_size: int = execution(16, description="sequences in one forward pass of one rank", ge=1, le=2**16)
    max_tokens: int | None = evaluation(
        None, description="tokens of the validation split that are used, from its start; none takes all", ge=2, lt=2**63
    )
    prompts: tuple[str, ...] = evaluation(
        ("The ", "def ", "import "), description="texts that the greedy samples continue"
    )
    sample_tokens: int = evaluation(48, description="tokens of one greedy sample", ge=1, le=4096)
