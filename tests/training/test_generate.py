import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import save_file
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaForCausalLM

from headrace.errors import ConfigError, InputError
from tests.training.toy import MODEL
from training.export.folder import to_hf_config
from training.export.hf import to_hf_name
from training.generate import Sampling, generate, open_model
from training.model.config import ModelConfig
from training.model.init import initialise
from training.model.llama import Decoder

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
CONFIG = ModelConfig(**{**MODEL, "vocab_size": 258, "max_seq_len": 32})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with one token for each byte, an end token (256) and a begin token that is not used."""
    model = Decoder(CONFIG)
    initialise(model, CONFIG, seed=1)
    weights = {to_hf_name(name): tensor * 8 for name, tensor in model.state_dict().items() if name != "output.weight"}
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    write_json(tmp_path / "config.json", to_hf_config(CONFIG, dtype="float32", eos_id=256, bos_id=None))
    write_json(tmp_path / "tokenizer_config.json", {"eos_token": "<end>"})
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(ALPHABET)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>", "<begin>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def write_json(path: Path, document: object) -> None:
    path.write_text(json.dumps(document), encoding="utf-8")


def counting(tokens_BT: Tensor) -> Tensor:
    """A forward pass that is sure that each token is followed by the next number, modulo 10."""
    return torch.nn.functional.one_hot((tokens_BT + 1) % 10, 10).float() * 50


def test_greedy_takes_the_most_likely_token_each_time():
    assert generate(counting, [3], max_new_tokens=5, max_context=8, stop_id=None) == [4, 5, 6, 7, 8]


def test_it_ends_before_the_stop_token():
    assert generate(counting, [3], max_new_tokens=50, max_context=8, stop_id=7) == [4, 5, 6]


def test_the_model_sees_no_more_than_its_context():
    lengths = []

    def forward(tokens_BT: Tensor) -> Tensor:
        lengths.append(tokens_BT.shape[1])
        return counting(tokens_BT)

    generate(forward, [1, 2, 3], max_new_tokens=4, max_context=5, stop_id=None)
    assert lengths == [3, 4, 5, 5]


def uncertain(tokens_BT: Tensor) -> Tensor:
    logits = torch.tensor([0.0, 3.0, 1.0, 2.0, -5.0]).log_softmax(dim=-1)
    return logits.expand(*tokens_BT.shape, 5)


def test_sampling_follows_its_seed_and_the_probabilities():
    one, again, other = (
        generate(uncertain, [0], max_new_tokens=400, max_context=4, stop_id=None, sampling=Sampling(1.0, None, seed))
        for seed in (1, 1, 2)
    )
    assert one == again != other
    assert one.count(1) / 400 == pytest.approx(uncertain(torch.zeros(1, 1))[0, 0, 1].exp().item(), abs=0.08)


def test_top_k_draws_from_the_k_most_likely():
    drawn = generate(uncertain, [0], max_new_tokens=200, max_context=4, stop_id=None, sampling=Sampling(5.0, 2))
    assert set(drawn) == {1, 3}


def test_low_temperature_is_nearly_greedy():
    drawn = generate(uncertain, [0], max_new_tokens=50, max_context=4, stop_id=None, sampling=Sampling(0.01))
    assert set(drawn) == {1}


@pytest.mark.parametrize("prompt", ["def ", "é"])
def test_a_completion_equals_that_of_transformers(folder, prompt):
    model = open_model(folder, device="cpu")
    ids = model.tokenizer.encode(prompt).ids
    theirs = LlamaForCausalLM.from_pretrained(folder).generate(
        torch.tensor([ids]), max_new_tokens=20, do_sample=False, pad_token_id=256
    )
    expected = model.tokenizer.decode(theirs[0, len(ids) :].tolist(), skip_special_tokens=True)
    assert model.complete(prompt, max_new_tokens=20) == expected
    assert expected


def test_an_empty_prompt_begins_where_a_document_does(folder):
    model = open_model(folder, device="cpu")
    after_end = generate(model.engine.infer, [256], max_new_tokens=6, max_context=32, stop_id=256)
    assert model.complete("", max_new_tokens=6) == model.tokenizer.decode(after_end)


def test_a_begin_token_stands_before_every_prompt(folder):
    write_json(folder / "tokenizer_config.json", {"eos_token": "<end>", "bos_token": {"content": "<begin>"}})
    model = open_model(folder, device="cpu")
    assert model.bos_id == 257
    ids = [257, *model.tokenizer.encode("ab").ids]
    expected = generate(model.engine.infer, ids, max_new_tokens=6, max_context=32, stop_id=256)
    assert model.complete("ab", max_new_tokens=6) == model.tokenizer.decode(expected)


def test_a_folder_without_tokenizer_is_refused(folder):
    (folder / "tokenizer.json").unlink()
    with pytest.raises(InputError, match=r"There is no tokenizer.json in"):
        open_model(folder)


def test_a_tokenizer_larger_than_the_model_is_refused(folder):
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["more", "words"])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match="has 260 tokens, but the model only 258"):
        open_model(folder)


def test_an_empty_prompt_without_a_first_token_is_refused(folder):
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(InputError, match="The prompt is empty"):
        open_model(folder, device="cpu").complete("", max_new_tokens=3)
