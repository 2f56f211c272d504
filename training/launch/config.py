"""How an attempt is started, watched and ended."""

from headrace.config import Part, execution


class LaunchConfig(Part):
    """Processes of one attempt."""

    nodes: int = execution(1, description="machines that take part", ge=1, le=1)
    ranks_per_node: int = execution(1, description="processes on each machine", ge=1, le=1024)
    threads_per_rank: int = execution(
        0, description="computing threads of one rank on CPU; 0 shares the cores evenly", ge=0, le=1024
    )
    hang_timeout_seconds: float = execution(
        120.0,
        description="seconds of silence of a rank that count as a hang; five learned step times when longer",
        gt=0,
        le=30 * 86_400,
    )
    stop_grace_seconds: float = execution(
        25.0, description="seconds that a stopping attempt has to save before it is killed", gt=0, le=86_400
    )
    max_attempts_without_progress: int = execution(
        3, description="attempts in a row without a new committed step that end the run", ge=1, le=1000
    )

    @property
    def world_size(self) -> int:
        """Ranks over all nodes."""
        return self.nodes * self.ranks_per_node
