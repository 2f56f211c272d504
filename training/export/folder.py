"""A Hugging Face model folder, and whether it is one that we can use: without torch, which takes seconds to load."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.commit import COMMIT_NAME
from headrace.config_check import parse
from headrace.errors import ConfigError, DamagedData, InputError
from training.model.config import ModelConfig

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"


def require_model(folder: Path) -> None:
    """Refuse a folder that no text can come from: no config, another kind of model, no weights, no tokenizer.

    Raises InputError and DamagedData. A folder with a commit is compared with that when it is opened: what it lacks
    was there.
    """
    require_config(folder)
    if (folder / COMMIT_NAME).is_file():
        return
    read_config(folder)
    weight_files(folder)
    require_tokenizer(folder)


def require_config(folder: Path) -> None:
    """Raises InputError for a folder without a config."""
    if not (folder / CONFIG_NAME).is_file():
        raise InputError(f"There is no {CONFIG_NAME} in {folder}: it is not a Hugging Face model folder.")


def require_tokenizer(folder: Path) -> Path:
    """The tokenizer's file; raises InputError when there is none."""
    path = folder / TOKENIZER_NAME
    if not path.is_file():
        raise InputError(f"There is no {TOKENIZER_NAME} in {folder}: text cannot be turned into tokens.")
    return path


def read_config(folder: Path) -> ModelConfig:
    """The model that the folder's config describes; raises InputError and DamagedData."""
    path = folder / CONFIG_NAME
    document = _read_json(path)
    if not isinstance(document, dict):
        raise InputError(f"{path} must hold a JSON object, got a {type(document).__name__}: it describes no model.")
    return from_hf_config(document, str(path))


def weight_files(folder: Path) -> list[Path]:
    """The files that hold the weights: one, or those of the index. Raises InputError and DamagedData."""
    if (folder / WEIGHTS_NAME).is_file():
        return [folder / WEIGHTS_NAME]
    if (folder / INDEX_NAME).is_file():
        names = sorted(set(_read_json(folder / INDEX_NAME)["weight_map"].values()))
        paths = [folder / name for name in names if Path(name).name == name]
        missing = [path.name for path in paths if not path.is_file()]
        if missing or len(paths) != len(names):
            raise DamagedData(f"{folder / INDEX_NAME} names files that are not in {folder}: {', '.join(missing)}.")
        return paths
    raise InputError(f"There are no weights in {folder}: neither {WEIGHTS_NAME} nor {INDEX_NAME}.")


def to_hf_config(model: ModelConfig, *, dtype: str, eos_id: int, bos_id: int | None) -> dict[str, Any]:
    """`config.json` of a model. The rotary base is there twice: readers from version 5 on look for the second."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": model.vocab_size,
        "hidden_size": model.dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": model.max_seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": model.rope_theta},
        "tie_word_embeddings": model.tie_embeddings,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "use_cache": True,
        "bos_token_id": bos_id,
        "eos_token_id": eos_id,
        "dtype": dtype,
    }


def from_hf_config(config: Mapping[str, Any], where: str) -> ModelConfig:
    """The model that a `config.json` describes; raises InputError naming what our decoder cannot be."""
    _require_llama(config, where)
    rope = config.get("rope_parameters") or {}
    heads = config["num_attention_heads"]
    document = {
        "vocab_size": config["vocab_size"],
        "dim": config["hidden_size"],
        "num_layers": config["num_hidden_layers"],
        "num_heads": heads,
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "ffn_dim": config["intermediate_size"],
        "max_seq_len": config["max_position_embeddings"],
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        "norm_eps": config["rms_norm_eps"],
        "tie_embeddings": config.get("tie_word_embeddings", False),
    }
    try:
        return parse(ModelConfig, document)
    except ConfigError as error:
        reasons = "; ".join(str(error).splitlines())
        raise InputError(f"{where} describes a model that cannot be used here: {reasons}.") from None


def _require_llama(config: Mapping[str, Any], where: str) -> None:
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    heads, width = config.get("num_attention_heads"), config.get("hidden_size")
    head_dim = config.get("head_dim") or (width // heads if heads and width else None)
    wanted = {
        "model_type": (config.get("model_type"), "llama"),
        "hidden_act": (config.get("hidden_act", "silu"), "silu"),
        "attention_bias": (config.get("attention_bias", False), False),
        "mlp_bias": (config.get("mlp_bias", False), False),
        "rope_type": (rope.get("rope_type", rope.get("type", "default")), "default"),
        "head_dim * num_attention_heads": (head_dim * heads if head_dim and heads else None, width),
    }
    wrong = [f"{name} is {found!r} and must be {right!r}" for name, (found, right) in wanted.items() if found != right]
    needed = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
    missing = [name for name in (*needed, "max_position_embeddings", "rms_norm_eps") if name not in config]
    wrong += [f"{name} is missing" for name in missing]
    if wrong:
        raise InputError(f"{where} describes a model that cannot be used here: {'; '.join(wrong)}.")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedData(f"{path} is not a complete JSON document ({error}).") from error
