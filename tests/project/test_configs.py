"""Every file in configs/ is a config that validates, and says what its comments say."""

from pathlib import Path

import pytest
import yaml

from flows.config import PipelineConfig, load_config
from headrace.config import to_yaml
from headrace.config_check import parse

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
FILES = sorted(CONFIGS.rglob("*.y*ml"))


def test_there_are_configs():
    assert {"quickstart.yaml", "small.yaml", "125m.yaml"} <= {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_it_validates_and_its_resolved_form_is_the_same_config(file: Path):
    config = load_config(file)

    assert config.name == file.stem, "a run is named as its file, so that two files are two runs"
    assert parse(PipelineConfig, yaml.safe_load(to_yaml(config))) == config


def test_the_quickstart_is_what_it_says():
    config = load_config(CONFIGS / "quickstart.yaml")

    assert config.model.num_parameters == 3_671_296
    assert config.training.steps * config.training.tokens_per_step == 1_048_576
    assert (config.launch.world_size, config.dp, config.grad_accum_steps) == (2, 2, 1)
    assert (config.tokenizer.vocab_size, config.training.seq_len) == (4096, 256)
    assert [source.path for source in config.data.inputs] == ["python-stdlib:"]
    assert config.data.on_error == "skip", "some sources of the standard library are not UTF-8 on purpose"


@pytest.mark.parametrize(
    ("name", "parameters", "tokens", "accumulated"),
    [
        ("small", 26_089_984, 65_536_000, 8),
        ("125m", 124_622_592, 2_621_440_000, 2),
        ("350m", 347_132_928, 7_340_032_000, 4),
    ],
)
def test_the_sizes_are_what_their_comments_say(name: str, parameters: int, tokens: int, accumulated: int):
    config = load_config(CONFIGS / f"{name}.yaml")

    assert config.model.num_parameters == parameters
    assert config.training.steps * config.training.tokens_per_step == tokens
    assert config.grad_accum_steps == accumulated


def test_350m_shares_the_prepared_data_of_125m():
    small, large = load_config(CONFIGS / "125m.yaml"), load_config(CONFIGS / "350m.yaml")

    assert (small.data, small.tokenizer) == (large.data, large.tokenizer)
    assert small.model.dim < large.model.dim
