"""Our models as Hugging Face folders, and such folders as our models.

The arithmetic of the decoder is Llama's, so a model only changes its tensors' names:

    embed.weight                    model.embed_tokens.weight
    layers.3.attn_norm.weight       model.layers.3.input_layernorm.weight
    layers.3.attn.wq.weight         model.layers.3.self_attn.q_proj.weight
    layers.3.ffn.w_gate.weight      model.layers.3.mlp.gate_proj.weight
    norm.weight                     model.norm.weight
    output.weight                   lm_head.weight                  (absent with tied embeddings)
"""

import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.commit import COMMIT_NAME, check_files, read_commit
from headrace.errors import DamagedData, InputError
from headrace.storage import Storage
from training.export.folder import CONFIG_NAME, read_config, require_config, weight_files
from training.export.spec import COMMIT_KIND
from training.model.config import ModelConfig

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


def load_hf_dir(folder: Path) -> tuple[ModelConfig, dict[str, Tensor]]:
    """The model in a Hugging Face folder: its config, and its parameters by our names, in their stored type, on CPU.

    One `model.safetensors`, or the files of its index. A folder that we exported is compared with its commit first.
    Raises InputError for a folder of another kind, DamagedData when files are missing, damaged, or do not fit.
    """
    require_config(folder)
    verify_folder(folder)
    model = read_config(folder)
    stored: dict[str, Tensor] = {}
    for path in weight_files(folder):
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
    try:
        check_files(storage, folder.name, commit, content=True)
    except DamagedData as error:
        raise DamagedData(f"{error} `headrace run` with the config of its run writes the export again.") from error


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
