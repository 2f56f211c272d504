"""What `headrace init` writes is valid for any amount of text on any machine."""

import io
from pathlib import Path

import pytest
import yaml

from flows.config import PipelineConfig
from flows.sizing import BYTES_PER_TOKEN, CPU_TOKENS, Machine, choose_sizes, default_name, write_config
from headrace.config_check import parse
from headrace.errors import InputError

MACHINES = [Machine(1, 0), Machine(2, 0), Machine(64, 0), Machine(16, 1), Machine(96, 3), Machine(96, 8)]
SIZES = [1, 100, 10_000, 300_000, 1_000_000, 30_000_000, 10**9, 10**12]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "My Texts"
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.txt").write_text("some words " * 500)
    return folder


@pytest.mark.parametrize("machine", MACHINES, ids=str)
@pytest.mark.parametrize("corpus_bytes", SIZES)
def test_every_size_makes_a_valid_config(corpus_bytes, machine, monkeypatch, texts):
    sizes = choose_sizes(corpus_bytes, machine)
    monkeypatch.setattr("flows.sizing.choose_sizes", lambda *_: sizes)
    config = parse(PipelineConfig, yaml.safe_load(write_config(str(texts), "x", machine)))
    assert config.launch.ranks_per_node == sizes.ranks
    assert config.grad_accum_steps >= 1
    assert config.model.vocab_size == config.tokenizer.vocab_size
    assert config.training.steps >= 20


@pytest.mark.parametrize("corpus_bytes", SIZES)
def test_a_laptop_is_done_within_minutes(corpus_bytes):
    sizes = choose_sizes(corpus_bytes, Machine(2, 0))
    assert sizes.tokens <= max(CPU_TOKENS, 20 * sizes.global_batch_size * sizes.seq_len)
    assert sizes.ranks == 2


def test_a_small_corpus_is_not_read_hundreds_of_times():
    sizes = choose_sizes(1_000_000, Machine(2, 0))
    assert sizes.tokens / (1_000_000 / BYTES_PER_TOKEN) < 13


def test_more_text_means_a_larger_vocabulary_and_model():
    chosen = [choose_sizes(size, Machine(8, 1)) for size in SIZES]
    assert [s.vocab_size for s in chosen] == sorted(s.vocab_size for s in chosen)
    assert [s.dim for s in chosen] == sorted(s.dim for s in chosen)


def test_the_config_says_what_it_was_made_for(texts):
    text = write_config(str(texts), "mine", Machine(2, 0))
    assert "for 5 files, one document each (0.03 MB), sized to 2 cores" in text
    assert "headrace generate mine" in text
    document = yaml.safe_load(text)
    assert document["name"] == "mine"
    assert document["data"]["inputs"][0]["path"] == str(texts)


def test_a_path_of_any_spelling_survives_yaml(tmp_path):
    folder = tmp_path / "a: 'strange' #name \"x\" ä"
    folder.mkdir()
    (folder / "a.txt").write_text("text " * 100)
    document = yaml.safe_load(write_config(str(folder), "x", Machine(2, 0)))
    assert document["data"]["inputs"][0]["path"] == str(folder)


def test_sources_get_prompts_of_code(tmp_path, texts):
    (tmp_path / "a.py").write_text("def f(): return 1\n" * 100)
    assert '"def "' in write_config(str(tmp_path / "a.py"), "x", Machine(2, 0))
    assert '"def "' not in write_config(str(texts), "x", Machine(2, 0))


def test_jsonl_is_called_what_it_is(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "words"}\n' * 100)
    assert "for 1 jsonl file, one document a line (" in write_config(str(tmp_path), "x", Machine(2, 0))


def test_one_is_not_said_as_several(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)
    text = write_config(str(tmp_path), "x", Machine(1, 0))
    assert "for 1 file, one document each (" in text
    assert "sized to 1 core." in text
    assert "of one rank, 2 passes in a step;" in text
    assert "of one rank, 1 pass in a step;" in write_config(str(tmp_path), "x", Machine(2, 0))
    assert "sized to 3 GPUs." in write_config(str(tmp_path), "x", Machine(96, 3))


@pytest.mark.parametrize(
    ("data", "name"),
    [
        ("texts/My Novels/", "my-novels"),
        ("python-stdlib:", "python-stdlib"),
        ("/data/.hidden", "hidden"),
        ("corpus.jsonl", "corpus"),
        ("*", "my-model"),
        ("x" * 100, "x" * 63),
    ],
)
def test_the_data_name_the_run(data, name, monkeypatch):
    monkeypatch.setattr("sys.stdout", io.StringIO())
    assert default_name(data) == name


def test_the_file_it_is_written_to_names_the_run(monkeypatch, tmp_path):
    with (tmp_path / "My Run.yaml").open("w") as file:
        monkeypatch.setattr("sys.stdout", file)
        assert default_name("texts") == "my-run"
    with (tmp_path / "log").open("w") as file:
        monkeypatch.setattr("sys.stdout", file)
        assert default_name("texts") == "texts"


def test_a_place_without_text_is_refused(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        write_config(str(tmp_path / "nothing"), None, Machine(2, 0))


def test_this_machine_is_asked_without_torch(tmp_path, monkeypatch):
    assert Machine.here().cores >= 1
    monkeypatch.setattr("flows.sizing.GPU_FOLDER", tmp_path)
    for bus in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / bus).mkdir()
    assert Machine.here().gpus == 2


@pytest.mark.parametrize(("bfloat16", "precision"), [(True, "bfloat16"), (False, "float32")])
def test_a_cpu_that_emulates_bfloat16_gets_float32(texts: Path, bfloat16: bool, precision: str) -> None:
    document = yaml.safe_load(write_config(str(texts), "x", Machine(2, 0, bfloat16=bfloat16)))
    assert document["training"]["precision"] == precision


@pytest.mark.parametrize(
    ("cpuinfo", "known"),
    [
        ("flags\t\t: fpu avx2\n", False),
        ("flags\t\t: fpu avx512_bf16 avx2\n", True),
        ("Features : fp bf16\n", True),
        ("", False),
    ],
)
def test_bfloat16_is_read_off_the_processor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cpuinfo: str, known: bool
) -> None:
    monkeypatch.setattr("flows.sizing.CPU_FILE", tmp_path / "cpuinfo")
    monkeypatch.setattr("flows.sizing.GPU_FOLDER", tmp_path / "no-gpus")
    (tmp_path / "cpuinfo").write_text(cpuinfo, encoding="utf-8")
    assert Machine.here().bfloat16 is known


def test_a_name_of_digits_stays_a_name(texts: Path) -> None:
    document = yaml.safe_load(write_config(str(texts), "2024", Machine(2, 0)))
    assert (document["name"], document["data"]["name"]) == ("2024", "2024")


def test_empty_files_are_no_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(InputError, match="1 file, all empty"):
        write_config(str(tmp_path), "x", Machine(2, 0))
