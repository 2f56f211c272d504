"""The rules that go across the parts: each names the rule, the values given and the nearest valid ones."""

import itertools
import re
import typing
from pathlib import Path
from typing import Any

import annotated_types
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flows.config import PipelineConfig, load_config, store_root
from headrace.config import identity_document, merge, role_of, walk
from headrace.config_check import parse
from headrace.errors import ConfigError
from training.model.config import ModelConfig

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
            "2 * 3 = 6; set training.global_batch_size to 12 or 18 (3 ranks cannot share 16 sequences evenly)",
        ),
        (
            {"launch": {"ranks_per_node": 2}, "layout": {"micro_batch_size": 3}, "training": {"global_batch_size": 8}},
            "= 6; set training.global_batch_size to 6 or 12, or layout.micro_batch_size to 1, 2 or 4",
        ),
        (
            {"launch": {"ranks_per_node": 3}, "layout": {"micro_batch_size": 2}, "training": {"global_batch_size": 2}},
            "set training.global_batch_size to 6 (3 ranks cannot share 2 sequences evenly)",
        ),
        (
            {"launch": {"ranks_per_node": 2}, "layout": {"micro_batch_size": 2**16}},
            "set layout.micro_batch_size to 1, 2, 4 or 8",
        ),
        (
            {"launch": {"ranks_per_node": 3}, "layout": {"micro_batch_size": 2**16}},
            "set layout.micro_batch_size to 1 and training.global_batch_size to 15 or 18",
        ),
        ({"layout": {"dp_shard": 0}}, "layout.dp_shard must be -1 or the number of ranks: dp_shard is 0, "),
        ({"training": {"seq_len": 512}}, "512 is above 256; raise model.max_seq_len to 512 or lower training.seq_len"),
        ({"tokenizer": {"vocab_size": 5000}}, "5000 is above 4096; set model.vocab_size to 5000"),
        (
            {"schedule": {"warmup_steps": 300}},
            "300 is above 256; set schedule.warmup_steps to 256 or less (26 would be a tenth)",
        ),
        ({"model": {"dim": 250, "num_heads": 6}}, "250 is not a multiple of 2 * 6 = 12; set model.dim to 240 or 252"),
        ({"model": {"dim": 12, "num_heads": 4}}, "12 is not a multiple of 2 * 4 = 8; set model.dim to 8 or 16"),
        ({"model": {"dim": 4, "num_heads": 4}}, "4 is not a multiple of 2 * 4 = 8; set model.dim to 8"),
        (
            {"model": {"num_heads": 4, "num_kv_heads": 3}},
            "4 is not a multiple of 3; set model.num_kv_heads to 1, 2 or 4",
        ),
        ({"training": {"init_from": "elsewhere"}}, "training.init_from must fit its description ("),
        (
            {"data": {"name": "../prod", "inputs": [{"path": "x"}]}},
            "data.name must hold only lower case letters, digits, dot, dash and underscore, not '/', got '../prod'",
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
    ("name", "fault"),
    [
        ("a" * 63, None),
        ("a" * 128, f"name must have at most 63 characters, got '{'a' * 76}..."),
        ("..", "name must begin with a lower case letter or a digit, got '..'"),
        ("", "name must not be empty, got ''"),
        (
            "My run",
            "name must hold only lower case letters, digits, dot, dash and underscore, not ' ', 'M', got 'My run'",
        ),
    ],
)
def test_a_wrong_name_is_told_its_cause(name: str, fault: str | None) -> None:
    assert faults(with_values(name=name)) == ([fault] if fault else [])


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


def faults(document: dict[str, Any]) -> list[str]:
    try:
        parse(PipelineConfig, document)
    except ConfigError as error:
        return str(error).splitlines()
    return []


def keys(document: dict[str, Any]) -> list[str]:
    return sorted(fault.split(" ")[0] for fault in faults(document))


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"training": {"seq_len": 512, "global_batch_size": 7}}, ["training.global_batch_size", "training.seq_len"]),
        (
            {"model": {"num_heads": 5, "num_kv_heads": 2}, "launch": {"ranks_per_node": 3}},
            ["model.dim", "model.num_heads", "training.global_batch_size"],
        ),
        (
            {"model": {"dim": -1, "num_kv_heads": 3}, "training": {"steps": 0.5, "seq_len": 512}},
            ["model.dim", "model.num_heads", "training.seq_len", "training.steps"],
        ),
        ({"storage": {"root": "ftp://host/x"}, "seed": -1}, ["seed", "storage.root"]),
    ],
    ids=["across the parts", "in a part and across", "beside wrong values", "beside a wrong value elsewhere"],
)
def test_broken_rules_are_told_together(sections: dict[str, Any], expected: list[str]) -> None:
    assert keys(with_values(**sections)) == expected


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"model": {"num_heads": 5, "dims": 320}}, ["Unknown"]),
        ({"models": {"max_seq_len": 512}, "training": {"seq_len": 512}}, ["Unknown"]),
        ({"model": 3, "training": {"seq_len": 512}}, ["model"]),
        ({"model": {"max_seq_len": "long"}, "training": {"seq_len": 512}}, ["model.max_seq_len"]),
    ],
    ids=["an unknown key may be the field", "an unknown section may be the part", "no section", "a wrong value"],
)
def test_a_rule_says_nothing_of_values_that_nobody_gave(sections: dict[str, Any], expected: list[str]) -> None:
    assert keys(with_values(**sections)) == expected


def test_rules_need_fields_that_there_are() -> None:
    leaves = {".".join(path) for path, _ in walk(PipelineConfig)}
    assert {need for rule in PipelineConfig.rules() for need in rule.needs} <= leaves
    assert {f"model.{need}" for rule in ModelConfig.rules() for need in rule.needs} <= leaves


def offers(sentence: str) -> list[dict[str, int]]:
    """Every value that the sentence says to set, as section.field and number, each a way out of its own."""
    ways = []
    for way in re.split(r", or |\bset ", sentence.partition("; ")[2]):
        first, *rest = re.findall(r"(\w+\.\w+) to (\d+(?:, \d+)*(?: or \d+)?)", way) or [("", "")]
        fixed = {key: int(value) for key, value in [first] if rest}
        for key, values in rest or [first]:
            ways += [{**fixed, key: int(number)} for number in re.findall(r"\d+", values)]
    return ways


def test_the_offers_of_a_sentence() -> None:
    assert offers("x; set a.b to 1, 2 or 4, or c.d to 5 (3 ranks)") == [{"a.b": 1}, {"a.b": 2}, {"a.b": 4}, {"c.d": 5}]
    assert offers("x; set a.b to 1 and c.d to 5 or 6") == [{"a.b": 1, "c.d": 5}, {"a.b": 1, "c.d": 6}]


def laid_on(document: dict[str, Any], values: dict[str, int]) -> dict[str, Any]:
    for key, value in values.items():
        section, name = key.split(".")
        document = merge(document, {section: {name: value}})
    return document


@given(
    dim=st.one_of(st.integers(2, 600), st.integers(2**17 - 3000, 2**17)),
    heads=st.integers(1, 1024),
    kv_heads=st.integers(1, 1024),
)
def test_every_offered_shape_is_accepted(dim: int, heads: int, kv_heads: int) -> None:
    document = with_values(model={"dim": dim, "num_heads": heads, "num_kv_heads": kv_heads})
    told = [offers(fault) for fault in faults(document)]
    assert all(told), "every sentence offers something"
    for chosen in itertools.product(*told):
        assert not faults(laid_on(document, {key: value for way in chosen for key, value in way.items()}))


@given(
    batch=st.one_of(st.integers(1, 64), st.integers(1, 2**16)),
    micro=st.one_of(st.integers(1, 16), st.integers(1, 2**16)),
    ranks=st.one_of(st.integers(1, 9), st.integers(1, 1024)),
)
def test_every_offered_batch_is_accepted(batch: int, micro: int, ranks: int) -> None:
    document = with_values(
        training={"global_batch_size": batch}, layout={"micro_batch_size": micro}, launch={"ranks_per_node": ranks}
    )
    for fault in faults(document):
        assert offers(fault)
        for way in offers(fault):
            assert not faults(laid_on(document, way))


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
