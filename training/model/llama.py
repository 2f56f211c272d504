"""The decoder: RMSNorm, rotary positions, grouped-query attention and SwiGLU, as Llama has them.

Shapes are in the names: B batch, T time, D width of the residual stream, N query heads, K key and value heads,
H width of a head, F inner width of the feed-forward layer, V vocabulary.

The arithmetic follows `transformers.LlamaForCausalLM` (half-split rotary pairs, float32 angles), so an export only
renames tensors. Layers are keyed by their global number, so FQNs are the same however the model is divided.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from training.model.config import ModelConfig


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dimension; statistics in float32 or wider."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(dim))

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Normalised input, in the input's type."""
        return F.rms_norm(x_BTD, self.weight.shape, self.weight, self.eps)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """Attention of every position to itself and the positions before."""
        q_BNTH = rotate(self._split(self.wq(x_BTD)), cos_TH, sin_TH)
        k_BKTH = rotate(self._split(self.wk(x_BTD)), cos_TH, sin_TH)
        v_BKTH = self._split(self.wv(x_BTD))
        y_BNTH = F.scaled_dot_product_attention(q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=True)
        output: Tensor = self.wo(y_BNTH.transpose(1, 2).flatten(2))
        return output

    def _split(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        return x.view(batch, length, width // self.head_dim, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.w_gate = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w_up = nn.Linear(config.dim, config.ffn_dim, bias=False)
        self.w_down = nn.Linear(config.ffn_dim, config.dim, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The layer's output, to be added to the residual stream."""
        output: Tensor = self.w_down(F.silu(self.w_gate(x_BTD)) * self.w_up(x_BTD))
        return output


class Block(nn.Module):
    """One layer: attention and feed-forward, each behind a norm and beside the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.dim, config.norm_eps)
        self.attn = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.ffn = FeedForward(config)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        """The residual stream after this layer."""
        x_BTD = x_BTD + self.attn(self.attn_norm(x_BTD), cos_TH, sin_TH)
        output: Tensor = x_BTD + self.ffn(self.ffn_norm(x_BTD))
        return output


class Decoder(nn.Module):
    """The whole model: token ids in, logits out."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(number): Block(config) for number in range(config.num_layers)})
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)
        self._tie()

    def materialise(self, device: torch.device) -> None:
        """Give a model that was made on the meta device memory, without values."""
        self.to_empty(device=device)
        self._tie()  # to_empty gives each name memory of its own

    def _tie(self) -> None:
        if self.config.tie_embeddings:
            self.output.weight = self.embed.weight

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Logits (B, T, V) of the token after each position; T is at most `max_seq_len`."""
        length = tokens_BT.shape[1]
        if length > self.config.max_seq_len:
            raise ValueError(f"{length} tokens do not fit into a model of max_seq_len {self.config.max_seq_len}")
        x_BTD = self.embed(tokens_BT)
        cos_TH, sin_TH = rotary_table(length, self.config, x_BTD)
        for block in self.layers.values():
            x_BTD = block(x_BTD, cos_TH, sin_TH)
        logits_BTV: Tensor = self.output(self.norm(x_BTD))
        return logits_BTV


def rotary_table(length: int, config: ModelConfig, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine (T, H) of every position's angles, with the device and type of `like`.

    The angles are float32 whatever the model computes in: that is what readers of the export do.
    """
    pairs = torch.arange(0, config.head_dim, 2, dtype=torch.int64, device=like.device).float()
    frequencies = 1.0 / (config.rope_theta ** (pairs / config.head_dim))
    positions = torch.arange(length, device=like.device).float()
    angles_TH = torch.outer(positions, frequencies).repeat(1, 2)
    return angles_TH.cos().to(like.dtype), angles_TH.sin().to(like.dtype)


def rotate(x_BNTH: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    """Turn the pairs (i, i + H/2) of each head by their position's angle."""
    first, second = x_BNTH.chunk(2, dim=-1)
    turned_BNTH = torch.cat((-second, first), dim=-1)
    return x_BNTH * cos_TH + turned_BNTH * sin_TH
