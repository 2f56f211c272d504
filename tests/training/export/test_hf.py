"""Names, configs and folders in the format of Hugging Face."""

import json

import pytest
import torch
from safetensors.torch import save_file

from headrace.errors import DamagedData, InputError
from training.export.folder import from_hf_config, to_hf_config
from training.export.hf import from_hf_name, load_hf_dir, parameter_shapes, to_hf_name
from training.model.config import ModelConfig
from training.model.llama import Decoder

MODEL = ModelConfig(
    vocab_size=40, dim=16, num_layers=2, num_heads=4, num_kv_heads=2, ffn_dim=24, max_seq_len=12, tie_embeddings=False
)
TIED = MODEL.model_copy(update={"tie_embeddings": True})


def config_of(model, **changes):
    return {**to_hf_config(model, dtype="float32", eos_id=0, bos_id=None), **changes}


def weights(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in parameter_shapes(model).items()}


@pytest.fixture
def write(tmp_path):
    """Write a folder as others do: `write(model, parameters, **changes of the config)`."""

    def write_folder(model, parameters, **changes):
        (tmp_path / "config.json").write_text(json.dumps(config_of(model, **changes)))
        save_file({to_hf_name(name): t for name, t in parameters.items()}, tmp_path / "model.safetensors")
        return tmp_path

    return write_folder


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
def test_the_table_of_shapes_is_the_decoders(model):
    shapes = {name: tuple(p.shape) for name, p in Decoder(model).named_parameters()}
    assert parameter_shapes(model) == shapes


@pytest.mark.parametrize("name", parameter_shapes(MODEL))
def test_names_go_there_and_back(name):
    assert from_hf_name(to_hf_name(name)) == name


def test_names_of_other_models_are_unknown():
    for name in ("model.layers.0.self_attn.q_proj.bias", "transformer.h.0.attn.c_attn.weight", "model.layers.x.y"):
        with pytest.raises(KeyError):
            from_hf_name(name)


def test_the_config_goes_there_and_back():
    assert from_hf_config(config_of(MODEL), "there") == MODEL
    assert from_hf_config(config_of(TIED), "there") == TIED


def test_both_places_of_the_rotary_base_are_written_and_either_is_read():
    model = MODEL.model_copy(update={"rope_theta": 500_000.0})
    config = config_of(model)
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 500_000.0
    for key in ("rope_theta", "rope_parameters"):
        one_only = {name: value for name, value in config.items() if name != key}
        assert from_hf_config(one_only, "there").rope_theta == 500_000.0


def test_old_configs_leave_out_what_has_a_default():
    config = config_of(MODEL, num_attention_heads=4, num_key_value_heads=None, head_dim=None)
    del config["rope_theta"], config["rope_parameters"]
    model = from_hf_config(config, "there")
    assert (model.num_kv_heads, model.rope_theta) == (4, 10_000.0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "mistral"}, "model_type is 'mistral' and must be 'llama'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": None}, "rope_type is 'linear'"),
        ({"head_dim": 8}, "head_dim"),
    ],
)
def test_a_model_that_the_decoder_cannot_be_is_refused_by_field(changes, words):
    with pytest.raises(InputError, match="describes a model that cannot be used") as caught:
        from_hf_config(config_of(MODEL, **changes), "there")
    assert words in str(caught.value)


def test_a_missing_field_is_named():
    config = config_of(MODEL)
    del config["intermediate_size"]
    with pytest.raises(InputError, match="intermediate_size is missing"):
        from_hf_config(config, "there")


@pytest.mark.parametrize("model", [MODEL, TIED], ids=["untied", "tied"])
def test_a_folder_is_read_to_what_was_written(write, model):
    parameters = weights(model)
    found, loaded = load_hf_dir(write(model, parameters))
    assert found == model
    assert loaded.keys() == parameters.keys()
    assert all(torch.equal(loaded[name], parameters[name]) for name in parameters)


def test_a_folder_of_several_files_is_read_through_its_index(write):
    parameters = weights(MODEL)
    folder = write(MODEL, {})
    (folder / "model.safetensors").unlink()
    names = sorted(parameters)
    parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
    for file, held in parts.items():
        save_file({to_hf_name(name): parameters[name] for name in held}, folder / file)
    index = {"weight_map": {to_hf_name(name): file for file, held in parts.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    _, loaded = load_hf_dir(folder)
    assert all(torch.equal(loaded[name], parameters[name]) for name in parameters)

    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(DamagedData, match=r"model-00002-of-00002\.safetensors"):
        load_hf_dir(folder)


def test_an_index_cannot_name_files_elsewhere(write):
    folder = write(MODEL, {})
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(DamagedData, match="names files that are not in"):
        load_hf_dir(folder)


def test_a_tied_projection_that_is_stored_again_must_be_the_embedding(write):
    parameters = weights(TIED)
    _, loaded = load_hf_dir(write(TIED, {**parameters, "output.weight": parameters["embed.weight"].clone()}))
    assert "output.weight" not in loaded
    with pytest.raises(InputError, match=r"lm_head\.weight differs"):
        load_hf_dir(write(TIED, {**parameters, "output.weight": parameters["embed.weight"] + 1}))


def test_frequencies_that_old_folders_store_are_ignored(write):
    folder = write(TIED, weights(TIED))
    stored = {to_hf_name(name): tensor for name, tensor in weights(TIED).items()}
    stored["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(2)
    save_file(stored, folder / "model.safetensors")
    assert load_hf_dir(folder)[1].keys() == weights(TIED).keys()


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        (lambda p: p.pop("norm.weight"), DamagedData, r"model\.norm\.weight is missing"),
        (lambda p: p.update({"norm.weight": torch.ones(3)}), DamagedData, r"shape \[3\] instead of \[16\]"),
        (lambda p: p.update({"layers.2.attn_norm.weight": torch.ones(16)}), DamagedData, "does not belong there"),
    ],
)
def test_weights_that_do_not_fit_their_config_are_refused_by_name(write, change, error, words):
    parameters = weights(MODEL)
    change(parameters)
    with pytest.raises(error, match=words):
        load_hf_dir(write(MODEL, parameters))


def test_other_folders_are_refused(write, tmp_path):
    with pytest.raises(InputError, match=r"no config\.json"):
        load_hf_dir(tmp_path)
    folder = write(MODEL, weights(MODEL))
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(DamagedData, match="not a complete safetensors file"):
        load_hf_dir(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="There are no weights"):
        load_hf_dir(folder)
    save_file({"transformer.wte.weight": torch.ones(2)}, folder / "model.safetensors")
    with pytest.raises(InputError, match=r"the tensor 'transformer\.wte\.weight'"):
        load_hf_dir(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(DamagedData, match="not a complete JSON"):
        load_hf_dir(folder)
