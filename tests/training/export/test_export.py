"""From a committed checkpoint to a folder that others read."""

import json
from dataclasses import dataclass

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace.commit import read_commit
from headrace.errors import CommitConflict, ConfigError, DamagedData, InputError
from headrace.faults import InjectedFault
from headrace.storage import Storage
from tests.training.checkpoint.saved import claim, plan_faults, train_saved
from tests.training.toy import run_spec
from training.checkpoint.catalog import newest_at
from training.checkpoint.reader import read_tensors
from training.export import main as export_main
from training.export.hf import load_hf_dir
from training.export.main import export
from training.export.pyfunc import _load_pyfunc
from training.export.spec import ExportSpec
from training.model.llama import Decoder
from training.run_spec import RestorePoint

VOCABULARY = 300
RUN = run_spec(
    model={"vocab_size": VOCABULARY, "max_seq_len": 32},
    training={"steps": 2, "precision": "float32"},
    checkpoint={"save_every": 1},
)
TARGET = "runs/models/m-1/artifacts"


@pytest.fixture(scope="module")
def tokenizer_json():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - 10, special_tokens=["<|endoftext|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(["def read(self): return self", "to be or not to be"], trainer)
    return tokenizer.to_str().encode()


@dataclass
class FakeDataset:
    """What an export asks of the run's dataset."""

    tokenizer: bytes
    eos_id: int = 0
    bos_id: int | None = None

    def tokenizer_json(self):
        return self.tokenizer


@pytest.fixture(scope="module")
def trained(_warm_ranks, tmp_path_factory):
    """A store with a finished run of two ranks."""
    folder = tmp_path_factory.mktemp("trained")
    _warm_ranks.run(2, train_saved, claim(folder, RUN))
    Storage.open(folder / "store").write_json(f"{RUN.run_prefix}/run.json", RUN.model_dump(mode="json"))
    return folder / "store"


@pytest.fixture
def store(trained, tmp_path, tokenizer_json, monkeypatch):
    """The same checkpoints behind an own place for exports, free to be damaged."""
    root = tmp_path / "store"
    for path in trained.rglob("*"):
        copy = root / path.relative_to(trained)
        copy.mkdir(parents=True) if path.is_dir() else copy.write_bytes(path.read_bytes())
    monkeypatch.setattr(export_main, "open_dataset", lambda storage, key: FakeDataset(tokenizer_json))
    return root


def spec_of(store, **changes):
    whole = {
        "storage_root": str(store),
        "run_id": RUN.run_id,
        "checkpoint": {"attempt": 1, "step": 2},
        "target": TARGET,
        "extra_files": {"MLmodel": "flavors: {}\n"},
        **changes,
    }
    return ExportSpec.model_validate(whole)


def decoder_of(store, dtype=torch.float32):
    storage = Storage.open(store)
    checkpoint = newest_at(storage, RUN.run_prefix, 2)
    stored = read_tensors(storage, checkpoint.prefix, checkpoint.commit)
    model = Decoder(RUN.model)
    parameters = {n.removeprefix("model."): t for n, t in stored.items() if n.startswith("model.")}
    model.load_state_dict({**parameters, "output.weight": parameters["embed.weight"]})
    return model.to(dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_transformers_reads_the_same_logits(store, dtype):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    commit = export(spec_of(store, dtype=dtype))
    theirs = AutoModelForCausalLM.from_pretrained(store / TARGET)
    assert str(theirs.dtype) == f"torch.{dtype}"
    assert theirs.num_parameters() == commit.body["num_parameters"]
    theirs = theirs.float()  # the weights are what was exported; how a processor rounds bfloat16 products is its own
    tokens = torch.randint(0, VOCABULARY, (2, 32), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        ours = decoder_of(store, getattr(torch, dtype)).float()(tokens)
        logits = theirs(tokens).logits
    torch.testing.assert_close(logits, ours, rtol=0, atol=1e-5)

    tokenizer = AutoTokenizer.from_pretrained(store / TARGET)
    assert tokenizer.decode(tokenizer("to be")["input_ids"]) == "to be"
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|endoftext|>", 0)
    prompt = tokenizer("to be", return_tensors="pt")
    assert theirs.generate(**prompt, max_new_tokens=3).shape[1] > prompt["input_ids"].shape[1]


def test_the_commit_names_every_file_and_where_the_weights_come_from(store):
    commit = export(spec_of(store))
    assert set(commit.files) | {"COMMIT.json"} == {path.name for path in (store / TARGET).iterdir()}
    assert {"MLmodel", "config.json", "model.safetensors", "tokenizer.json"} < set(commit.files)
    checkpoint = newest_at(Storage.open(store), RUN.run_prefix, 2)
    assert commit.body["checkpoint_digest"] == checkpoint.commit.digest
    assert (commit.body["run_id"], commit.body["step"], commit.body["dtype"]) == (RUN.run_id, 2, "float32")


def test_a_begin_token_is_written_where_there_is_one(store, tokenizer_json, monkeypatch):
    monkeypatch.setattr(export_main, "open_dataset", lambda storage, key: FakeDataset(tokenizer_json, 0, 0))
    export(spec_of(store))
    assert json.loads((store / TARGET / "special_tokens_map.json").read_text())["bos_token"] == "<|endoftext|>"
    assert json.loads((store / TARGET / "generation_config.json").read_text())["bos_token_id"] == 0


def test_the_folder_reads_back_as_the_run_of_its_weights(store):
    export(spec_of(store))
    model, parameters = load_hf_dir(store / TARGET)
    assert model == RUN.model
    expected = dict(decoder_of(store).named_parameters())
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(parameters[name], expected[name]) for name in expected)


@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_a_changed_export_is_refused(store, file):
    export(spec_of(store))
    path = store / TARGET / file
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData, match=file):
        load_hf_dir(store / TARGET)


@pytest.mark.parametrize("damage", ["flip", "cut", "loss"])
@pytest.mark.parametrize("file", ["model.safetensors", "config.json", "tokenizer.json"])
def test_an_export_whose_files_were_damaged_is_written_again_to_the_same_bytes(store, file, damage):
    commit = export(spec_of(store))
    path = store / TARGET / file
    whole = path.read_bytes()
    if damage == "loss":
        path.unlink()
    else:
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]) if damage == "flip" else whole[:-3])
    assert export(spec_of(store)) == commit
    assert path.read_bytes() == whole
    load_hf_dir(store / TARGET)


def test_the_same_export_again_writes_nothing(store):
    first = export(spec_of(store))
    times = {path.name: path.stat().st_mtime_ns for path in (store / TARGET).iterdir()}
    assert export(spec_of(store)) == first
    assert {path.name: path.stat().st_mtime_ns for path in (store / TARGET).iterdir()} == times
    with pytest.raises(CommitConflict, match="already holds the export of step 2"):
        export(spec_of(store, checkpoint={"attempt": 1, "step": 1}))


def test_an_export_to_another_place_leaves_nothing_in_the_store(store, tmp_path):
    before = sorted(store.rglob("*"))
    spec = spec_of(store, target="model", target_root=str(tmp_path / "elsewhere"), extra_files={})
    commit = export(spec)
    assert sorted(store.rglob("*")) == before
    model, parameters = load_hf_dir(tmp_path / "elsewhere" / "model")
    assert model == RUN.model
    assert torch.equal(parameters["embed.weight"], decoder_of(store).state_dict()["embed.weight"])
    assert export(spec) == commit
    with pytest.raises(CommitConflict, match="choose an empty folder"):
        export(spec.model_copy(update={"checkpoint": RestorePoint(attempt=1, step=1)}))


@pytest.mark.parametrize("point", ["export.begun", "export.files_written"])
def test_an_export_that_was_interrupted_does_not_exist_and_can_be_made_again(store, tmp_path, monkeypatch, point):
    storage = Storage.open(store)
    monkeypatch.setenv("HEADRACE_FAULTS", plan_faults(tmp_path / "f", {"point": point, "action": "raise"}))
    with pytest.raises(InjectedFault):
        export(spec_of(store))
    assert read_commit(storage, TARGET, kind="export") is None
    assert export(spec_of(store)) == read_commit(storage, TARGET, kind="export")


def test_a_damaged_checkpoint_is_not_exported(store):
    path = next((store / RUN.run_prefix / "checkpoints").glob("step-00000002/*/rank-0001.bin"))
    data = bytearray(path.read_bytes())
    data[200] ^= 1
    path.write_bytes(data)
    with pytest.raises(DamagedData, match=r"rank-0001\.bin is damaged"):
        export(spec_of(store))
    assert not (store / TARGET / "COMMIT.json").exists()


def test_a_checkpoint_off_the_chain_is_not_exported(store):
    later = RUN.model_copy(update={"training": RUN.training.model_copy(update={"steps": 9})})
    claim(store.parent, later, RestorePoint(attempt=1, step=1), attempt=2)
    with pytest.raises(InputError, match="went back behind it"):
        export(spec_of(store))


def test_extra_files_replace_none_of_ours(store):
    with pytest.raises(ConfigError, match=r"config\.json"):
        export(spec_of(store, extra_files={"config.json": "{}"}))


# --------------------------------------------------------------------------------------------------- the program


def run_main(monkeypatch, capsys, spec_file):
    monkeypatch.setattr("sys.argv", ["export", str(spec_file)])
    try:
        export_main.main()
        code = 0
    except SystemExit as end:
        code = end.code
    return code, json.loads(capsys.readouterr().out.splitlines()[-1])


def test_the_program_says_what_it_wrote(store, tmp_path, monkeypatch, capsys):
    (tmp_path / "spec.json").write_text(spec_of(store).model_dump_json())
    code, said = run_main(monkeypatch, capsys, tmp_path / "spec.json")
    assert code == 0
    assert said["digest"] == read_commit(Storage.open(store), TARGET, kind="export").digest
    assert said["step"] == 2
    assert said["bytes"] == sum(p.stat().st_size for p in (store / TARGET).iterdir() if p.name != "COMMIT.json")


def test_the_program_says_why_it_failed_and_whether_to_try_again(store, tmp_path, monkeypatch, capsys):
    (tmp_path / "spec.json").write_text(spec_of(store, checkpoint={"attempt": 1, "step": 7}).model_dump_json())
    code, said = run_main(monkeypatch, capsys, tmp_path / "spec.json")
    assert (code, said["retryable"]) == (2, False)
    assert "no committed checkpoint of step 7" in said["error"]
    code, said = run_main(monkeypatch, capsys, tmp_path / "missing.json")
    assert code == 2
    assert "is not the spec of an export" in said["error"]


# ------------------------------------------------------------------------------------------------------- pyfunc


@pytest.fixture
def completer(store):
    export(spec_of(store))
    return _load_pyfunc(str(store / TARGET))


def test_predict_takes_prompts_in_every_usual_form(completer):
    import pandas as pd

    prompts = ["to be", "def read"]
    params = {"max_new_tokens": 4}
    expected = completer.predict(prompts, params)
    assert len(expected) == 2
    assert all(isinstance(text, str) for text in expected)
    for form in (
        pd.DataFrame({"prompt": prompts, "other": [1, 2]}),
        pd.DataFrame({"text": prompts}),
        pd.Series(prompts),
        {"prompt": prompts},
        tuple(prompts),
    ):
        assert completer.predict(form, params) == expected
    assert completer.predict("to be", params) == expected[:1]
    assert completer.predict({"prompt": "to be"}, params) == expected[:1]
    assert completer.predict(prompts, params) == expected


def test_predict_samples_by_seed(completer):
    params = {"max_new_tokens": 12, "temperature": 2.0, "top_k": 200}
    texts = [completer.predict(["to"], {**params, "seed": seed})[0] for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize(
    ("model_input", "params", "words"),
    [
        ([1, 2], None, "one is int"),
        (7, None, "must be texts, got int"),
        ({"a": ["x"], "b": ["y"]}, None, "name the one with the prompts 'prompt'"),
        (["x"], {"max_tokens": 3}, "no parameter max_tokens"),
    ],
)
def test_predict_refuses_other_things(completer, model_input, params, words):
    with pytest.raises(InputError, match=words):
        completer.predict(model_input, params)
