"""When the state is saved."""

from headrace.config import Part, execution


class CheckpointConfig(Part):
    """Asynchronous saves; the last step is always saved."""

    save_every: int = execution(100, description="optimizer steps between two saves", ge=1, le=10**8)
    save_timeout_seconds: float = execution(
        600.0, description="seconds after which a save in flight counts as failed", gt=0, le=30 * 86_400
    )
    max_failed_saves: int = execution(3, description="failed saves in a row that stop the attempt", ge=1, le=1000)
