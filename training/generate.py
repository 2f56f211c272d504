"""Text from a model folder, one token after the other: greedy, or drawn from the most likely tokens.

The whole context is computed again for each token. That is simple, and enough for samples and for trying a model;
serving is the work of those who read the exported folder.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tokenizers
import torch
from torch import Tensor

from headrace.errors import ConfigError, InputError
from training.export.folder import TOKENIZER_CONFIG_NAME, require_tokenizer
from training.export.hf import load_hf_dir
from training.model.config import ModelConfig
from training.parallel.engine import Engine
from training.parallel.world import World, detect_device


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen; a temperature of 0 takes the most likely one."""

    temperature: float = 0.0
    top_k: int | None = None
    """Draw from this many of the most likely tokens; None: from all."""
    seed: int = 0


def generate(
    forward: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    max_new_tokens: int,
    max_context: int,
    stop_id: int | None,
    sampling: Sampling = Sampling(),
    device: torch.device | None = None,
) -> list[int]:
    """Token ids that continue `prompt` (at least one id), up to `max_new_tokens`, without the stop token.

    `forward` gives logits (1, T, V) for ids (1, T). The model sees the last `max_context` tokens.
    """
    generator = torch.Generator().manual_seed(sampling.seed)
    ids = list(prompt)
    for _ in range(max_new_tokens):
        context_1T = torch.tensor([ids[-max_context:]], dtype=torch.int64, device=device)
        logits_V = forward(context_1T)[0, -1].float().cpu()
        chosen = _choose(logits_V, sampling, generator)
        if chosen == stop_id:
            break
        ids.append(chosen)
    return ids[len(prompt) :]


def _choose(logits_V: Tensor, sampling: Sampling, generator: torch.Generator) -> int:
    if sampling.temperature == 0.0:
        return int(logits_V.argmax())
    if sampling.top_k is not None:
        values, indices = logits_V.topk(min(sampling.top_k, len(logits_V)))
    else:
        values, indices = logits_V, torch.arange(len(logits_V))
    probabilities = torch.softmax(values.double() / sampling.temperature, dim=-1)
    return int(indices[torch.multinomial(probabilities, 1, generator=generator)])


@dataclass(frozen=True)
class TextModel:
    """A model folder, opened: weights in float32 on a device, and its tokenizer."""

    config: ModelConfig
    engine: Engine
    tokenizer: tokenizers.Tokenizer
    bos_id: int | None
    eos_id: int | None

    def complete(self, prompt: str, *, max_new_tokens: int, sampling: Sampling = Sampling()) -> str:
        """The text that follows `prompt`, without it."""
        ids = self.tokenizer.encode(prompt, add_special_tokens=False).ids
        if self.bos_id is not None:
            ids = [self.bos_id, *ids]
        if not ids:
            if self.eos_id is None:
                raise InputError("The prompt is empty, and the model has no token that begins a text.")
            ids = [self.eos_id]  # what stands before every document in training
        new = generate(
            self.engine.infer,
            ids,
            max_new_tokens=max_new_tokens,
            max_context=self.config.max_seq_len,
            stop_id=self.eos_id,
            sampling=sampling,
            device=self.engine.world.device,
        )
        text: str = self.tokenizer.decode(new, skip_special_tokens=True)
        return text


def open_model(
    folder: Path, *, device: Literal["auto", "cpu", "cuda"] = "auto", precision: str = "float32"
) -> TextModel:
    """Open a Hugging Face folder with a Llama-style model and a `tokenizer.json`.

    Raises InputError for another kind of folder, DamagedData for one that is not what its commit says.
    """
    config, weights = load_hf_dir(folder)
    tokenizer = tokenizers.Tokenizer.from_file(str(require_tokenizer(folder)))
    size = tokenizer.get_vocab_size()
    if size > config.vocab_size:
        raise ConfigError(f"The tokenizer in {folder} has {size} tokens, but the model only {config.vocab_size}.")
    engine = Engine.from_weights(config, weights, World(0, 1, detect_device(device)), precision=precision)
    special = _special_tokens(folder)
    return TextModel(
        config,
        engine,
        tokenizer,
        bos_id=tokenizer.token_to_id(special["bos_token"]) if "bos_token" in special else None,
        eos_id=tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None,
    )


def _special_tokens(folder: Path) -> dict[str, str]:
    """The begin and end tokens that the folder names: a string each, or an object with `content`."""
    path = folder / TOKENIZER_CONFIG_NAME
    if not path.is_file():
        return {}
    document = json.loads(path.read_text(encoding="utf-8"))
    found = {name: document.get(name) for name in ("bos_token", "eos_token")}
    return {name: token["content"] if isinstance(token, dict) else token for name, token in found.items() if token}
