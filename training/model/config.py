"""The shape of the decoder."""

from collections.abc import Sequence

from headrace.config import Part, identity
from headrace.config_rules import Rule, nearest_multiples, one_of

MOST_DIM = 2**17


class ModelConfig(Part):
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    vocab_size: int = identity(
        4096, description="rows of the embedding; at least the tokenizer's vocabulary", ge=2, le=2**24
    )
    dim: int = identity(256, description="width of the residual stream", ge=2, le=MOST_DIM)
    num_layers: int = identity(4, description="transformer blocks", ge=1, le=1024)
    num_heads: int = identity(4, description="query heads", ge=1, le=1024)
    num_kv_heads: int = identity(
        2, description="key and value heads, each shared by a group of query heads", ge=1, le=1024
    )
    ffn_dim: int = identity(704, description="inner width of the feed-forward layer", ge=1, le=2**20)
    max_seq_len: int = identity(256, description="tokens of the longest sequence", ge=2, le=2**24)
    rope_theta: float = identity(10_000.0, description="base of the rotary frequencies", gt=1)
    norm_eps: float = identity(1e-5, description="added to the mean square inside RMSNorm", gt=0, lt=0.1)
    tie_embeddings: bool = identity(True, description="use the embedding as the output projection")

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.dim // self.num_heads

    @property
    def num_parameters(self) -> int:
        """Trainable parameters, exactly."""
        attention = 2 * self.dim * self.dim + 2 * self.dim * self.num_kv_heads * self.head_dim
        block = attention + 3 * self.dim * self.ffn_dim + 2 * self.dim
        embeddings = self.vocab_size * self.dim * (1 if self.tie_embeddings else 2)
        return self.num_layers * block + embeddings + self.dim

    @classmethod
    def rules(cls) -> Sequence[Rule]:
        """How the heads fit the width, and each other."""
        return (Rule(("dim", "num_heads"), _width_fits), Rule(("num_heads", "num_kv_heads"), _groups_fit))


def _width_fits(model: ModelConfig) -> str | None:
    step = 2 * model.num_heads
    if model.dim % step == 0:
        return None
    return (
        "model.dim must be a multiple of 2 * model.num_heads, as rotary positions need heads of an even width: "
        f"{model.dim} is not a multiple of 2 * {model.num_heads} = {step}; set model.dim to "
        f"{one_of(nearest_multiples(model.dim, step, MOST_DIM))}"
    )


def _groups_fit(model: ModelConfig) -> str | None:
    heads = model.num_heads
    if heads % model.num_kv_heads == 0:
        return None
    divisors = [n for n in range(1, heads + 1) if heads % n == 0]
    return (
        f"model.num_heads must be a multiple of model.num_kv_heads: {heads} is not a multiple of "
        f"{model.num_kv_heads}; set model.num_kv_heads to {one_of(divisors)}"
    )
