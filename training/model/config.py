"""The shape of the decoder."""

from pydantic import model_validator

from headrace.config import Part, identity


class ModelConfig(Part):
    """A Llama-style decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU."""

    vocab_size: int = identity(
        4096, description="rows of the embedding; at least the tokenizer's vocabulary", ge=2, le=2**24
    )
    dim: int = identity(256, description="width of the residual stream", ge=2, le=2**17)
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

    @model_validator(mode="after")
    def _heads_fit(self) -> "ModelConfig":
        if self.dim % self.num_heads:
            raise ValueError(
                f"model.dim must be a multiple of model.num_heads: {self.dim} is not a multiple of {self.num_heads}; "
                f"the nearest widths are {_multiples_around(self.dim, self.num_heads)}"
            )
        if self.head_dim % 2:
            raise ValueError(
                f"model.dim / model.num_heads must be even for rotary positions: {self.dim} / {self.num_heads} = "
                f"{self.head_dim}; the nearest widths are {_multiples_around(self.dim, 2 * self.num_heads)}"
            )
        if self.num_heads % self.num_kv_heads:
            divisors = [n for n in range(1, self.num_heads + 1) if self.num_heads % n == 0]
            raise ValueError(
                f"model.num_heads must be a multiple of model.num_kv_heads: {self.num_heads} is not a multiple of "
                f"{self.num_kv_heads}; with {self.num_heads} heads num_kv_heads may be "
                f"{', '.join(map(str, divisors))}"
            )
        return self


def _multiples_around(value: int, step: int) -> str:
    below = value // step * step
    return f"{below} and {below + step}" if below else str(step)
