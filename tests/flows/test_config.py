"""The rules that go across the parts: each names the rule, the values given and the nearest valid ones."""

import typing
from pathlib import Path
from typing import Any

import annotated_types
import pytest

from flows.config import PipelineConfig, load_config, store_root
from headrace.config import identity_document, role_of, walk
from headrace.config_check import parse
from headrace.errors import ConfigError

BASE: dict[str, Any] = {"name": "t", "data": {"name": "t", "inputs": [{"path": "texts"}]}}


def with_values(**sections: Any) -> dict[str, Any]:
    return {**BASE, **sections}


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        (
            {
                "launch": {"ranks_per_node": 2},
                "layout": {"dp_shard": 3, "micro_batch_size": 1},
                "training": {"global_batch_size": 6},
            },
            "dp_shard is 3, but launch.nodes * launch.ranks_per_node = 1 * 2 = 2; set layout.dp_shard to 2",
        ),
        (
            {"launch": {"ranks_per_node": 3}, "layout": {"micro_batch_size": 2}, "training": {"global_batch_size": 16}},
            "16 is not a multiple of 2 * 3 = 6; set global_batch_size to one of 12 and 18",
        ),
        (
            {"launch": {"ranks_per_node": 2}, "layout": {"micro_batch_size": 3}, "training": {"global_batch_size": 8}},
            "or layout.micro_batch_size to one of 1, 2, 4",
        ),
        ({"training": {"seq_len": 512}}, "512 is above 256; raise model.max_seq_len to 512 or lower training.seq_len"),
        ({"tokenizer": {"vocab_size": 5000}}, "5000 is above 4096; set model.vocab_size to 5000"),
        (
            {"schedule": {"warmup_steps": 300}},
            "300 is above 256; set schedule.warmup_steps to 256 or less (26 would be a tenth)",
        ),
        ({"model": {"dim": 250, "num_heads": 6}}, "250 is not a multiple of 6; the nearest widths are 246 and 252"),
        ({"model": {"dim": 12, "num_heads": 4}}, "12 / 4 = 3; the nearest widths are 8 and 16"),
        ({"model": {"num_heads": 4, "num_kv_heads": 3}}, "with 4 heads num_kv_heads may be 1, 2, 4"),
        ({"training": {"init_from": "elsewhere"}}, "training.init_from must fit its description ("),
        (
            {"data": {"name": "../prod", "inputs": [{"path": "x"}]}},
            "data.name must fit its description (name of the dataset: lower case letters",
        ),
        ({"data": {"name": "t", "inputs": []}}, "data.inputs must have at least 1 of them, got []"),
        ({"storage": {"root": "ftp://host/x"}}, "storage.root must be a folder, file://… or s3://…, got ftp://host/x"),
        ({"storage": {"root": "s3://x"}}, "storage.root is not right: An S3 URL must look like s3://bucket/prefix"),
        ({"training": {"precision": "float64"}, "layout": {"device": "cuda"}}, "set layout.device to cpu"),
    ],
)
def test_a_broken_rule_names_values_and_valid_ones(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(PipelineConfig, with_values(**sections))
    assert sentence in str(caught.value)


@pytest.mark.parametrize(
    ("item", "fault"),
    [
        ("texts", "data.inputs.0 must be a section of keys, got 'texts'"),
        ({"path": ""}, "data.inputs.0.path must not be empty, got ''"),
        ({"path": "x", "include": [1]}, "data.inputs.0.include.0 must be text, got 1"),
    ],
    ids=["no section", "empty path", "two lists deep"],
)
def test_a_wrong_item_of_a_list_is_one_fault(item: Any, fault: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(PipelineConfig, with_values(data={"name": "t", "inputs": [item]}))
    assert str(caught.value) == fault


def test_broken_rules_are_told_together() -> None:
    with pytest.raises(ConfigError) as caught:
        parse(PipelineConfig, with_values(training={"seq_len": 512, "global_batch_size": 7}))
    assert len(str(caught.value).splitlines()) == 2


def test_every_leaf_has_a_role_and_a_description() -> None:
    for path, field in walk(PipelineConfig):
        assert role_of(field) in ("identity", "execution", "evaluation"), path
        description = field.description or ""
        assert description[:1].islower(), path


def test_every_number_of_things_has_an_upper_limit() -> None:
    """A slip of the keyboard is refused, instead of filling a disk, a loop or 64 bits."""
    limits = (annotated_types.Le, annotated_types.Lt)
    for path, field in walk(PipelineConfig):
        if int in (field.annotation, *typing.get_args(field.annotation)):
            assert any(isinstance(constraint, limits) for constraint in field.metadata), path


def test_the_longest_run_that_can_be_asked_for_counts_its_tokens_in_64_bits() -> None:
    longest = parse(
        PipelineConfig,
        with_values(
            training={"steps": 10**8, "global_batch_size": 2**16, "seq_len": 2**20}, model={"max_seq_len": 2**20}
        ),
    )
    assert longest.training.steps * longest.training.tokens_per_step < 2**63


@pytest.mark.parametrize("key", ["training.steps", "checkpoint.save_every", "schedule.warmup_steps"])
def test_an_absurd_count_is_refused_with_its_limit(key: str) -> None:
    section, name = key.split(".")
    with pytest.raises(ConfigError) as caught:
        parse(PipelineConfig, with_values(**{section: {name: 10**18}}))
    assert str(caught.value) == f"{key} must be 100_000_000 or less, got {10**18}"


def test_layout_and_intervals_stay_out_of_the_identity() -> None:
    one = parse(PipelineConfig, BASE)
    two = parse(
        PipelineConfig,
        with_values(
            launch={"ranks_per_node": 2},
            layout={"micro_batch_size": 4},
            checkpoint={"save_every": 7},
            evaluation={"every": 3, "max_tokens": 100},
            tracking={"experiment": "elsewhere"},
            storage={"root": "s3://bucket/x"},
            data={"name": "t", "inputs": [{"path": "moved/elsewhere"}]},
            tokenizer={"path": "moved/tokenizer.json"},
        ),
    )
    assert identity_document(one) == identity_document(two)


@pytest.mark.parametrize(
    "sections", [{"seed": 2}, {"optimizer": {"learning_rate": 1e-4}}, {"training": {"steps": 300}}, {"name": "u"}]
)
def test_what_decides_the_result_is_identity(sections: dict[str, Any]) -> None:
    assert identity_document(parse(PipelineConfig, BASE)) != identity_document(
        parse(PipelineConfig, with_values(**sections))
    )


def test_derived_numbers() -> None:
    config = parse(
        PipelineConfig,
        with_values(launch={"ranks_per_node": 2}, layout={"micro_batch_size": 2}, training={"global_batch_size": 16}),
    )
    assert (config.dp, config.grad_accum_steps, config.training.tokens_per_step) == (2, 4, 16 * 256)
    assert config.registered_name == "t"
    # 4 blocks of (2*256*256 + 2*256*128 attention, 3*256*704 feed-forward, 2*256 norms), the embedding, the last norm
    assert config.model.num_parameters == 4 * (196_608 + 540_672 + 512) + 4096 * 256 + 256


@pytest.mark.parametrize(
    "root",
    [
        "s3://key:canary@bucket/x",
        "s3://key:can/ary@bucket/x",
        "s3://bucket/x?secret=canary",
        "ftp://key:canary@host/x",
        "file://key:canary@host/x",
        "file:///x?secret=canary",
    ],
)
def test_credentials_in_the_root_are_refused_and_not_repeated(tmp_path: Path, root: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: t\ndata: {name: t, inputs: [{path: texts}]}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^storage\.root ") as caught:
        load_config(path, (f"storage.root={root}",))
    assert "canary" not in str(caught.value)
    assert "ary@" not in str(caught.value)


def test_store_root_defaults_to_the_state_folder(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("name: t\ndata: {name: t, inputs: [{path: texts}]}\n", encoding="utf-8")
    assert store_root(load_config(path), tmp_path) == str(tmp_path / "store")
    assert store_root(load_config(path, ("storage.root=s3://bucket/x",)), tmp_path) == "s3://bucket/x"
