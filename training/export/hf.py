"""Our models as Hugging Face folders, and such folders as our models.

The arithmetic of the decoder is Llama's, so a model only changes its tensors' names:

    embed.weight                    model.embed_tokens.weight
    layers.3.attn_norm.weight       model.layers.3.input_layernorm.weight
    layers.3.attn.wq.weight         model.layers.3.self_attn.q_proj.weight
    layers.3.ffn.w_gate.weight      model.layers.3.mlp.gate_proj.weight
    norm.weight                     model.norm.weight
    output.weight                   lm_head.weight                  (absent with tied embeddings)
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.commit import COMMIT_NAME, check_files, read_commit
from headrace.errors import DamagedData, InputError
from headrace.storage import Storage
from training.export.spec import COMMIT_KIND
from training.model.config import ModelConfig

WEIGHTS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
CONFIG_NAME = "config.json"
TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
GENERATION_CONFIG_NAME = "generation_config.json"
SPECIAL_TOKENS_NAME = "special_tokens_map.json"

_OUTSIDE_LAYERS = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_A_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn.wq.weight": "self_attn.q_proj.weight",
    "attn.wk.weight": "self_attn.k_proj.weight",
    "attn.wv.weight": "self_attn.v_proj.weight",
    "attn.wo.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn.w_gate.weight": "mlp.gate_proj.weight",
    "ffn.w_up.weight": "mlp.up_proj.weight",
    "ffn.w_down.weight": "mlp.down_proj.weight",
}
_OUTSIDE_LAYERS_BACK = {theirs: ours for ours, theirs in _OUTSIDE_LAYERS.items()}
_IN_A_LAYER_BACK = {theirs: ours for ours, theirs in _IN_A_LAYER.items()}

_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
"""Old folders store the rotary frequencies, which follow from the config."""


def to_hf_name(name: str) -> str:
    """The name of one of our parameters in a Hugging Face folder; raises KeyError for one that Llama has not."""
    if name in _OUTSIDE_LAYERS:
        return _OUTSIDE_LAYERS[name]
    _, number, rest = name.split(".", 2)
    return f"model.layers.{number}.{_IN_A_LAYER[rest]}"


def from_hf_name(name: str) -> str:
    """The inverse of `to_hf_name`; raises KeyError for a name that our decoder has not."""
    if name in _OUTSIDE_LAYERS_BACK:
        return _OUTSIDE_LAYERS_BACK[name]
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
    if match is None:
        raise KeyError(name)
    return f"layers.{match[1]}.{_IN_A_LAYER_BACK[match[2]]}"


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every stored parameter by our name; with tied embeddings the output projection is not stored."""
    kv_dim = model.num_kv_heads * model.head_dim
    layer = {
        "attn_norm.weight": (model.dim,),
        "attn.wq.weight": (model.dim, model.dim),
        "attn.wk.weight": (kv_dim, model.dim),
        "attn.wv.weight": (kv_dim, model.dim),
        "attn.wo.weight": (model.dim, model.dim),
        "ffn_norm.weight": (model.dim,),
        "ffn.w_gate.weight": (model.ffn_dim, model.dim),
        "ffn.w_up.weight": (model.ffn_dim, model.dim),
        "ffn.w_down.weight": (model.dim, model.ffn_dim),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (model.vocab_size, model.dim), "norm.weight": (model.dim,)}
    for number in range(model.num_layers):
        shapes |= {f"layers.{number}.{name}": shape for name, shape in layer.items()}
    if not model.tie_embeddings:
        shapes["output.weight"] = (model.vocab_size, model.dim)
    return shapes


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
    heads = int(config["num_attention_heads"])
    return ModelConfig(
        vocab_size=config["vocab_size"],
        dim=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        ffn_dim=config["intermediate_size"],
        max_seq_len=config["max_position_embeddings"],
        rope_theta=rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        norm_eps=config["rms_norm_eps"],
        tie_embeddings=config.get("tie_word_embeddings", False),
    )


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


def load_hf_dir(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model in a Hugging Face folder: its config, and its parameters by our names, in their stored type, on CPU.

    One `model.safetensors`, or the files of its index. A folder that we exported is compared with its commit first.
    Raises InputError for a folder of another kind, DamagedData when files are missing, damaged, or do not fit.
    """
    config_path = folder / CONFIG_NAME
    if not config_path.is_file():
        raise InputError(f"There is no {CONFIG_NAME} in {folder}: it is not a Hugging Face model folder.")
    verify_folder(folder)
    model = from_hf_config(_read_json(config_path), str(config_path))
    stored: dict[str, Tensor] = {}
    for path in _weight_files(folder):
        stored |= _read_safetensors(path)
    parameters = {from_hf_name(name): t for name, t in stored.items() if _known(name, folder)}
    if model.tie_embeddings:
        # Some writers store the tied projection a second time; it must be the same then, and is the embedding.
        output = parameters.pop("output.weight", None)
        if output is not None and not torch.equal(output, parameters["embed.weight"]):
            raise InputError(f"{folder} says tie_word_embeddings, but its lm_head.weight differs from the embedding.")
    _require_shapes(model, parameters, folder)
    return model, parameters


def verify_folder(folder: Path) -> None:
    """Compare an exported folder with its commit, byte for byte; a folder without a commit is somebody else's."""
    if not (folder / COMMIT_NAME).is_file():
        return
    storage = Storage.open(folder.parent)
    commit = read_commit(storage, folder.name, kind=COMMIT_KIND)
    assert commit is not None
    check_files(storage, folder.name, commit, content=True)


def _weight_files(folder: Path) -> list[Path]:
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


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - the file is no mapping
    except SafetensorError as error:
        raise DamagedData(f"{path} is not a complete safetensors file ({error}).") from error


def _known(name: str, folder: Path) -> bool:
    if _IGNORED.fullmatch(name):
        return False
    try:
        from_hf_name(name)
    except KeyError:
        raise InputError(f"{folder} holds the tensor {name!r}, which this decoder has not.") from None
    return True


def _require_shapes(model: ModelConfig, parameters: Mapping[str, Tensor], folder: Path) -> None:
    shapes = parameter_shapes(model)
    problems = [f"{to_hf_name(name)} is missing" for name in shapes if name not in parameters]
    problems += [f"{to_hf_name(name)} does not belong there" for name in parameters if name not in shapes]
    problems += [
        f"{to_hf_name(name)} has shape {list(parameters[name].shape)} instead of {list(shape)}"
        for name, shape in shapes.items()
        if name in parameters and tuple(parameters[name].shape) != shape
    ]
    if problems:
        raise DamagedData(f"The weights in {folder} are not those of its {CONFIG_NAME}: {'; '.join(problems[:4])}.")


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DamagedData(f"{path} is not a complete JSON document ({error}).") from error
