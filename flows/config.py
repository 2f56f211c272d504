"""The whole pipeline's configuration: the parts put together, and the rules that go across them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from data_prep.config import DataConfig, TokenizerConfig
from headrace.config import NAME_MAX_LENGTH, NAME_PATTERN, NAME_WORDS, Part, execution, identity, load_document
from headrace.config_check import parse
from headrace.config_rules import Rule, nearest_multiples, one_of
from headrace.errors import ConfigError
from headrace.storage import Storage
from training.checkpoint.config import CheckpointConfig
from training.config import MOST_SEQUENCES, TrainingConfig
from training.evaluation.config import EvaluationConfig
from training.health.config import StabilityConfig
from training.launch.config import LaunchConfig
from training.model.config import ModelConfig
from training.optim.config import OptimizerConfig, ScheduleConfig
from training.parallel.config import LayoutConfig

STORES = ("file", "s3", "memory")
"""Schemes of store URLs; memory is for tests: nothing else sees it."""


SHOWN_PASSES = 8
"""Micro-batches that a sentence offers: those nearest to the given one."""


class StorageConfig(Part):
    """Where units, datasets, checkpoints and exports lie."""

    root: str | None = execution(
        None, description="root URL of the store (a folder or s3://bucket/prefix); none is HEADRACE_HOME/store"
    )


class TrackingConfig(Part):
    """Where the run is shown."""

    experiment: str = execution(
        "headrace", description="name of the MLflow experiment of the run", min_length=1, max_length=200
    )


class RegisterConfig(Part):
    """The model version at the end."""

    model_name: str | None = execution(
        None,
        description="registered model that gets the version, named as a run is; none takes the run's name",
        pattern=NAME_PATTERN,
        max_length=NAME_MAX_LENGTH,
    )
    dtype: Literal["float32", "bfloat16"] = execution("float32", description="type of the exported weights")


class PipelineConfig(Part):
    """One run, from raw text to a registered model."""

    name: str = identity(description=f"name of the run: {NAME_WORDS}", pattern=NAME_PATTERN, max_length=NAME_MAX_LENGTH)
    seed: int = identity(1, description="seed of the initial weights and of the sample order", ge=0, lt=2**63)
    data: DataConfig
    tokenizer: TokenizerConfig = TokenizerConfig()
    model: ModelConfig = ModelConfig()
    training: TrainingConfig = TrainingConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    layout: LayoutConfig = LayoutConfig()
    launch: LaunchConfig = LaunchConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    stability: StabilityConfig = StabilityConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    registration: RegisterConfig = RegisterConfig()
    storage: StorageConfig = StorageConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def dp(self) -> int:
        """Data-parallel ranks."""
        return self.launch.world_size if self.layout.dp_shard == -1 else self.layout.dp_shard

    @property
    def grad_accum_steps(self) -> int:
        """Micro-batches of one rank in one optimizer step."""
        return self.training.global_batch_size // (self.layout.micro_batch_size * self.dp)

    @property
    def registered_name(self) -> str:
        """Name of the registered model."""
        return self.registration.model_name or self.name

    @classmethod
    def rules(cls) -> Sequence[Rule]:
        """The rules across the parts."""
        return RULES


def _ranks_fit(config: PipelineConfig) -> str | None:
    degree, world = config.layout.dp_shard, config.launch.world_size
    if degree in (-1, world):
        return None
    # 0 is no number of ranks; the ranks of a machine times the machines must give the degree.
    ranks, rest = divmod(degree, config.launch.nodes)
    return (
        f"layout.dp_shard must be -1 or the number of ranks: dp_shard is {degree}, but launch.nodes * "
        f"launch.ranks_per_node = {config.launch.nodes} * {config.launch.ranks_per_node} = {world}; "
        f"set layout.dp_shard to {world}" + (f" or launch.ranks_per_node to {ranks}" if ranks and not rest else "")
    )


def _batch_fits(config: PipelineConfig) -> str | None:
    batch, micro, ranks = config.training.global_batch_size, config.layout.micro_batch_size, config.dp
    per_pass = micro * ranks
    if per_pass <= 0 or batch % per_pass == 0:
        return None
    return (
        f"training.global_batch_size must be a multiple of layout.micro_batch_size * data-parallel ranks: "
        f"{batch} is not a multiple of {micro} * {ranks} = {per_pass}; {_ways_to_fit(batch, micro, ranks)}"
    )


def _ways_to_fit(batch: int, micro: int, ranks: int) -> str:
    """Which batches fit the passes, and which passes the batch; there may be none of either."""
    batches = nearest_multiples(batch, micro * ranks, MOST_SEQUENCES)
    per_rank = batch // ranks if batch % ranks == 0 else 0
    passes = sorted((n for n in range(1, per_rank + 1) if per_rank % n == 0), key=lambda n: abs(n - micro))
    micro_way = f"layout.micro_batch_size to {one_of(sorted(passes[:SHOWN_PASSES]))}" if passes else ""
    if not batches:
        batches = nearest_multiples(batch, ranks, MOST_SEQUENCES)
        other = f"layout.micro_batch_size to 1 and training.global_batch_size to {one_of(batches)}"
        return f"set {micro_way or other}"
    batch_way = f"training.global_batch_size to {one_of(batches)}"
    if not passes:
        return f"set {batch_way} ({ranks} ranks cannot share {batch} sequences evenly)"
    return f"set {batch_way}, or {micro_way}"


def _sequence_fits(config: PipelineConfig) -> str | None:
    length, longest = config.training.seq_len, config.model.max_seq_len
    way_out = f"raise model.max_seq_len to {length} or lower training.seq_len"
    return _above("training.seq_len", length, "model.max_seq_len", longest, way_out)


def _vocabulary_fits(config: PipelineConfig) -> str | None:
    if config.tokenizer.path is not None:
        return None
    tokens, rows = config.tokenizer.vocab_size, config.model.vocab_size
    return _above("tokenizer.vocab_size", tokens, "model.vocab_size", rows, f"set model.vocab_size to {tokens}")


def _warmup_fits(config: PipelineConfig) -> str | None:
    warmup, steps = config.schedule.warmup_steps, config.training.steps
    way_out = f"set schedule.warmup_steps to {steps} or less ({round(steps / 10)} would be a tenth)"
    return _above("schedule.warmup_steps", warmup, "training.steps", steps, way_out)


def _above(name: str, value: int, limit_name: str, limit: int, way_out: str) -> str | None:
    if value <= limit:
        return None
    return f"{name} must not be above {limit_name}: {value} is above {limit}; {way_out}"


def _device_fits(config: PipelineConfig) -> str | None:
    if config.training.precision == "float64" and config.layout.device == "cuda":
        return "training.precision float64 is for proofs on the CPU: set layout.device to cpu, or precision to bfloat16"
    return None


def _store_is_known(config: PipelineConfig) -> str | None:
    root = config.storage.root or ""
    scheme, separator, place = root.partition("://")
    if not separator:
        return None
    if "@" in place.partition("/")[0]:
        # Not repeated: messages are logged, and a refused config must not reach any database.
        return (
            "storage.root must hold no credentials: they come from the environment (AWS_ACCESS_KEY_ID, "
            "AWS_SECRET_ACCESS_KEY); write s3://bucket/prefix"
        )
    if scheme not in STORES:
        return f"storage.root must be a folder, file://… or s3://…, got {root}"
    try:
        Storage.open(root)  # contacts nothing
    except ConfigError as error:
        return f"storage.root is not right: {error}"
    return None


RANKS = ("layout.dp_shard", "launch.nodes", "launch.ranks_per_node")
RULES = (
    Rule(RANKS, _ranks_fit),
    Rule((*RANKS, "layout.micro_batch_size", "training.global_batch_size"), _batch_fits),
    Rule(("training.seq_len", "model.max_seq_len"), _sequence_fits),
    Rule(("tokenizer.path", "tokenizer.vocab_size", "model.vocab_size"), _vocabulary_fits),
    Rule(("schedule.warmup_steps", "training.steps"), _warmup_fits),
    Rule(("training.precision", "layout.device"), _device_fits),
    Rule(("storage.root",), _store_is_known),
)


def require_vocabulary(config: PipelineConfig, tokens: int) -> None:
    """Refuse a tokenizer whose ids the model cannot hold. Raises ConfigError."""
    if tokens > config.model.vocab_size:
        raise ConfigError(
            f"The tokenizer has {tokens} tokens, but model.vocab_size is {config.model.vocab_size}; set "
            f"model.vocab_size to {tokens} or more."
        )


def load_config(path: Path, overrides: tuple[str, ...] = ()) -> PipelineConfig:
    """The validated config of a file, with relative data and tokenizer paths resolved against the working folder.

    Raises ConfigError with every fault of the document.
    """
    return parse(PipelineConfig, load_document(path, overrides))


def store_root(config: PipelineConfig, home: Path) -> str:
    """Root URL of the store: the configured one, or the default below the state folder."""
    root = config.storage.root
    if root is None:
        return str(home / "store")
    return root if "://" in root else str(Path(root).expanduser())
