"""Which checkpoints exist and which one is chosen, with commits made by hand."""

import pytest

from headrace.commit import FileEntry, write_commit
from headrace.digest import sha256_bytes
from headrace.errors import DamagedData, InputError, Terminal
from headrace.storage import Storage
from tests.training.toy import run_spec
from training.checkpoint.catalog import (
    checkpoint_prefix,
    choose_restore,
    list_commits,
    newest_at,
    newest_commit,
    open_checkpoint,
    quarantine,
    quarantined_by,
    require_same_model,
)
from training.launch.attempts import claim_attempt, make_record
from training.run_spec import RestorePoint

RUN = run_spec()


@pytest.fixture
def storage(tmp_path):
    return Storage.open(tmp_path)


def claim(storage, attempt, restore=None):
    point = RestorePoint(attempt=restore[0], step=restore[1]) if restore else None
    assert claim_attempt(storage, RUN.run_prefix, make_record(RUN, attempt, point))


def commit(storage, attempt, step, run=RUN, prefix=None, **body):
    """A checkpoint whose one data file holds a word."""
    prefix = prefix or checkpoint_prefix(RUN.run_prefix, step=step, attempt=attempt)
    data = f"{attempt}/{step}".encode()
    storage.write_bytes(f"{prefix}/rank-0000.bin", data)
    whole = {
        "run_id": run.run_id,
        "run_key": run.run_key,
        "step": step,
        "attempt": attempt,
        "model": run.model.model_dump(mode="json"),
        "dataset_digest": run.dataset_digest,
        "tokenizer_digest": run.tokenizer_digest,
        **body,
    }
    files = {"rank-0000.bin": FileEntry(len(data), sha256_bytes(data))}
    write_commit(storage, prefix, kind="checkpoint", body=whole, files=files)
    return prefix


def chosen(storage):
    choice = choose_restore(storage, RUN)
    return (choice.checkpoint.attempt, choice.checkpoint.step) if choice.checkpoint else None


def test_nothing_was_ever_committed(storage):
    assert chosen(storage) is None
    claim(storage, 1)
    assert chosen(storage) is None
    assert list_commits(storage, RUN.run_prefix) == []
    assert newest_commit(storage, RUN.run_prefix) is None


def test_steps_are_numbers_not_names(storage):
    claim(storage, 1)
    for step in (9, 10, 99_999_999, 100_000_000):
        commit(storage, 1, step)
    assert [c.step for c in list_commits(storage, RUN.run_prefix)] == [100_000_000, 99_999_999, 10, 9]


def test_a_folder_without_a_commit_does_not_exist(storage):
    claim(storage, 1)
    commit(storage, 1, 10)
    storage.write_bytes(f"{checkpoint_prefix(RUN.run_prefix, step=20, attempt=1)}/rank-0000.bin", b"x")
    storage.write_bytes(f"{checkpoint_prefix(RUN.run_prefix, step=30, attempt=1)}/metadata.json", b"{}")
    storage.write_bytes(f"{RUN.run_prefix}/checkpoints/newest/COMMIT.json", b"{}")
    assert chosen(storage) == (1, 10)
    assert choose_restore(storage, RUN).refused == {}


def test_a_commit_beyond_its_successors_start_does_not_exist(storage):
    claim(storage, 1)
    commit(storage, 1, 10)
    commit(storage, 1, 20)
    claim(storage, 2, restore=(1, 10))
    assert chosen(storage) == (1, 10)
    commit(storage, 1, 30)  # by a process that should be dead
    commit(storage, 2, 15)
    assert [(c.attempt, c.step) for c in list_commits(storage, RUN.run_prefix)] == [(2, 15), (1, 10)]
    with pytest.raises(InputError, match="was never committed, or a later attempt went back behind it"):
        open_checkpoint(storage, RUN.run_prefix, RestorePoint(attempt=1, step=20))


def test_the_same_step_of_two_attempts_is_the_newer_attempts(storage):
    claim(storage, 1)
    commit(storage, 1, 10)
    commit(storage, 1, 20)
    claim(storage, 2, restore=(1, 10))
    commit(storage, 2, 20)
    assert newest_at(storage, RUN.run_prefix, 20).attempt == 2
    with pytest.raises(InputError, match="no committed checkpoint of step 30; its steps are: 10, 20"):
        newest_at(storage, RUN.run_prefix, 30)


def truncate(storage, prefix):
    storage.write_bytes(f"{prefix}/rank-0000.bin", b"")


def remove_file(storage, prefix):
    storage.delete(f"{prefix}/rank-0000.bin")


def tear_commit(storage, prefix):
    storage.write_bytes(f"{prefix}/COMMIT.json", storage.read_bytes(f"{prefix}/COMMIT.json")[:50])


def edit_commit(storage, prefix):
    text = storage.read_bytes(f"{prefix}/COMMIT.json").replace(b'"attempt": 1', b'"attempt": 2')
    storage.write_bytes(f"{prefix}/COMMIT.json", text)


def copy_commit_of_another_step(storage, prefix):
    other = prefix.replace("step-00000020", "step-00000010")
    storage.write_bytes(f"{prefix}/COMMIT.json", storage.read_bytes(f"{other}/COMMIT.json"))


def set_aside(storage, prefix):
    quarantine(storage, newest_at(storage, RUN.run_prefix, 20), reason="a byte was wrong", found_by_attempt=1)


DAMAGES = {
    truncate: "has 0 bytes, but its commit says 4",
    remove_file: "is missing",
    tear_commit: "not a complete JSON",
    edit_commit: "was changed after it was written",
    copy_commit_of_another_step: "copied here from another folder",
    set_aside: "was set aside: a byte was wrong",
}


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.__name__)
def test_a_damaged_checkpoint_is_passed_over_with_its_reason(storage, damage):
    claim(storage, 1)
    commit(storage, 1, 10)
    prefix = commit(storage, 1, 20)
    damage(storage, prefix)
    choice = choose_restore(storage, RUN)
    assert choice.checkpoint.step == 10
    assert list(choice.refused) == [prefix]
    assert DAMAGES[damage] in choice.refused[prefix]
    assert [c.step for c in list_commits(storage, RUN.run_prefix)] == [10]
    assert newest_commit(storage, RUN.run_prefix).step == 10
    with pytest.raises(DamagedData):
        open_checkpoint(storage, RUN.run_prefix, RestorePoint(attempt=1, step=20))


@pytest.mark.parametrize("damage", [d for d in DAMAGES if d is not copy_commit_of_another_step])
def test_a_run_whose_checkpoints_are_all_damaged_never_starts_from_nothing(storage, damage):
    claim(storage, 1)
    damage(storage, commit(storage, 1, 20))
    with pytest.raises(Terminal, match="will not silently start from nothing"):
        choose_restore(storage, RUN)


def test_a_run_whose_checkpoints_were_removed_never_starts_from_nothing(storage):
    claim(storage, 1)
    prefix = commit(storage, 1, 20)
    claim(storage, 2, restore=(1, 20))
    storage.delete_prefix(prefix)
    with pytest.raises(Terminal, match="Attempt 2 started from the checkpoint of step 20, but there is no committed"):
        choose_restore(storage, RUN)


def test_who_set_checkpoints_aside_is_remembered(storage):
    claim(storage, 1)
    commit(storage, 1, 10)
    checkpoint = newest_at(storage, RUN.run_prefix, 10)
    quarantine(storage, checkpoint, reason="first", found_by_attempt=3)
    quarantine(storage, checkpoint, reason="second rank, same finding", found_by_attempt=3)
    assert quarantined_by(storage, RUN.run_prefix) == {3}
    assert storage.read_json(f"{checkpoint.prefix}/DAMAGED.json")["reason"] == "first"


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (run_spec(run_key="other"), "run_key is 'other' there and 'key' here"),
        (run_spec(run_id="1" * 32), f"run_id is '{'1' * 32}' there"),
        (run_spec(model={"dim": 64}), "model.dim is 64 there and 32 here"),
        (run_spec(dataset_digest="c" * 64), "dataset_digest is 'cccc"),
        (run_spec(tokenizer_digest="d" * 64), "tokenizer_digest is 'dddd"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_field(storage, other, words):
    claim(storage, 1)
    commit(storage, 1, 10, run=other)
    with pytest.raises(InputError, match="belongs to another run") as caught:
        choose_restore(storage, RUN)
    assert words in str(caught.value)


def test_weights_of_another_model_are_refused_by_field():
    require_same_model(RUN.model, RUN.model.model_dump(mode="json"), "there")
    saved = {**RUN.model.model_dump(mode="json"), "num_layers": 5}
    with pytest.raises(InputError, match=r"at there belong to another model: model.num_layers is 5 there and 2 here"):
        require_same_model(RUN.model, saved, "there")
