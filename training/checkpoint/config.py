"""When the state is saved, and how long it is kept."""

from headrace.config import Part, execution


class CheckpointConfig(Part):
    """Asynchronous saves, the last step always; and which of them are kept."""

    save_every: int = execution(100, description="optimizer steps between two saves", ge=1, le=10**8)
    save_timeout_seconds: float = execution(
        600.0, description="seconds after which a save in flight counts as failed", gt=0, le=30 * 86_400
    )
    max_failed_saves: int = execution(3, description="failed saves in a row that stop the attempt", ge=1, le=1000)
    keep_last: int = execution(
        5,
        description="newest checkpoints that are kept; older ones are deleted after a newer one was read back",
        ge=2,
        le=10**6,
    )
    keep_every: int | None = execution(
        None,
        description="checkpoints whose step is a multiple of this are kept for good; none keeps no further ones",
        ge=1,
        le=10**8,
    )
    keep_best: int = execution(
        0, description="so many checkpoints with the lowest bits per byte in the loop are kept", ge=0, le=10**6
    )
