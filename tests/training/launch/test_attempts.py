"""The attempt chain: over any history, with late writers, there is one true list of checkpoints."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from headrace.errors import DamagedData
from headrace.storage import Storage
from tests.training.checkpoint.test_catalog import commit
from tests.training.toy import run_spec
from training.checkpoint.catalog import choose_restore, list_commits, quarantine
from training.launch.attempts import (
    AttemptRecord,
    attempt_numbers,
    chain,
    claim_attempt,
    is_on_chain,
    make_record,
    newest_attempt,
    read_attempts,
)
from training.run_spec import RestorePoint

RUN = run_spec(training={"steps": 10_000})


TEMPLATE = make_record(RUN, 1, None)


def record(attempt, restore=None):
    point = RestorePoint(attempt=restore[0], step=restore[1]) if restore else None
    return TEMPLATE.model_copy(update={"attempt": attempt, "restore": point})


def test_a_record_says_who_launched_what_from_where(tmp_path):
    storage = Storage.open(tmp_path)
    assert claim_attempt(storage, RUN.run_prefix, record(1))
    assert claim_attempt(storage, RUN.run_prefix, record(2, (1, 10)))
    first, second = read_attempts(storage, RUN.run_prefix)
    assert (first.restore, second.restore) == (None, RestorePoint(attempt=1, step=10))
    assert first.layout == {"dp_shard": -1, "micro_batch_size": 8, "device": "cpu", "world_size": 1}
    assert len(first.code_digest) == 64
    assert "torch" in first.versions


def test_a_number_is_claimed_once(tmp_path):
    storage = Storage.open(tmp_path)
    with ThreadPoolExecutor(8) as threads:
        for attempt in range(1, 6):
            claims = threads.map(lambda number: claim_attempt(storage, RUN.run_prefix, record(number)), [attempt] * 8)
            assert sum(claims) == 1
    assert attempt_numbers(storage, RUN.run_prefix) == [1, 2, 3, 4, 5]
    assert newest_attempt(storage, RUN.run_prefix) == 5


def test_numbers_go_on_beyond_four_digits(tmp_path):
    storage = Storage.open(tmp_path)
    for attempt in (9_999, 10_000):
        assert claim_attempt(storage, RUN.run_prefix, record(attempt))
    storage.write_bytes(f"{RUN.run_prefix}/attempts/notes.txt", b"")
    assert attempt_numbers(storage, RUN.run_prefix) == [9_999, 10_000]


def test_the_chain_follows_restore_points_from_the_newest():
    attempts = [record(1), record(2, (1, 30)), record(3, (2, 50)), record(4, (1, 20)), record(5, (4, 25))]
    assert [(link.attempt, link.after_step, link.last_step) for link in chain(attempts)] == [
        (5, 25, None),
        (4, 20, 25),
        (1, -1, 20),
    ]
    links = chain(attempts)
    assert is_on_chain(links, attempt=5, step=26)
    assert is_on_chain(links, attempt=4, step=25)
    assert is_on_chain(links, attempt=1, step=0)
    assert not is_on_chain(links, attempt=5, step=25)
    assert not is_on_chain(links, attempt=4, step=20)
    assert not is_on_chain(links, attempt=2, step=40)
    assert chain([]) == []


@pytest.mark.parametrize(
    "attempts", [[record(2, (1, 10))], [record(1), record(2, (2, 10))], [record(1), record(3, (4, 1))]]
)
def test_a_chain_with_a_missing_or_impossible_link_is_refused(attempts):
    with pytest.raises(DamagedData, match="says that it started from attempt"):
        chain(attempts)


def test_a_record_of_another_number_or_form_is_refused(tmp_path):
    storage = Storage.open(tmp_path)
    key = f"{RUN.run_prefix}/attempts/0001.json"
    storage.write_json(key, record(2, (1, 3)).model_dump(mode="json"))
    with pytest.raises(DamagedData, match="is the record of attempt 2, not of 1"):
        read_attempts(storage, RUN.run_prefix)
    storage.write_json(key, {"attempt": 1})
    with pytest.raises(DamagedData, match="is not the record of an attempt"):
        read_attempts(storage, RUN.run_prefix)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_chain_is_one_rising_history_without_gaps(data):
    attempts: list[AttemptRecord] = []
    for number in range(1, data.draw(st.integers(min_value=1, max_value=8)) + 1):
        older = data.draw(st.sampled_from([None, *range(1, number)]))
        step = data.draw(st.integers(min_value=0, max_value=20))
        attempts.append(record(number, (older, step) if older else None))
    links = chain(attempts)
    assert links[0].attempt == len(attempts)
    assert links[0].last_step is None
    assert links[-1].after_step == -1
    for newer, older in itertools.pairwise(links):
        assert older.attempt < newer.attempt
        assert older.last_step == newer.after_step
    for step in range(25):
        covering = [link.attempt for link in links if link.covers(step)]
        rising = all(newer.after_step >= older.after_step for newer, older in itertools.pairwise(links))
        assert len(covering) == 1 or not rising


@dataclass
class Process:
    """One attempt as its process sees it: it saves in the order of its steps, as long as it lives, fenced or not."""

    attempt: int
    step: int


@dataclass
class Truth:
    """What is so, by definition: each launch keeps what it started from, and adds what it alone commits."""

    visible: dict[int, int] = field(default_factory=dict)
    """Attempt by step."""


class Histories(RuleBasedStateMachine):
    """Launches, saves, crashes, damage, and writers that do not know that they were replaced."""

    counter = itertools.count()

    def __init__(self):
        super().__init__()
        self.storage = Storage.open(f"memory://histories-{next(self.counter)}")
        self.truth = Truth()
        self.processes: list[Process] = []

    @rule()
    def launch(self):
        checkpoint = choose_restore(self.storage, RUN).checkpoint if self.truth.visible else None
        number = newest_attempt(self.storage, RUN.run_prefix) + 1
        restore = checkpoint.restore_point if checkpoint else None
        point = (restore.attempt, restore.step) if restore else None
        assert claim_attempt(self.storage, RUN.run_prefix, record(number, point))
        start = restore.step if restore else 0
        self.processes.append(Process(number, start))
        self.truth.visible = {step: a for step, a in self.truth.visible.items() if restore and step <= start}

    @precondition(lambda self: self.processes)
    @rule(data=st.data(), forward=st.integers(min_value=1, max_value=5))
    def save(self, data, forward):
        process = data.draw(st.sampled_from(self.processes))  # any of them: old ones may be late
        process.step += forward
        commit(self.storage, process.attempt, process.step, run=RUN)
        if process is self.processes[-1]:
            self.truth.visible[process.step] = process.attempt

    @precondition(lambda self: len(self.truth.visible) > 1)
    @rule(data=st.data())
    def find_damage(self, data):
        step = data.draw(st.sampled_from(sorted(self.truth.visible)))
        checkpoint = next(c for c in list_commits(self.storage, RUN.run_prefix) if c.step == step)
        quarantine(self.storage, checkpoint, reason="damaged", found_by_attempt=self.processes[-1].attempt)
        del self.truth.visible[step]

    @invariant()
    def the_store_tells_the_truth(self):
        found = [(c.step, c.attempt) for c in list_commits(self.storage, RUN.run_prefix)]
        assert found == sorted(self.truth.visible.items(), reverse=True)


def test_over_any_history_the_store_tells_one_truth():
    run_state_machine_as_test(Histories, settings=settings(max_examples=40, stateful_step_count=20, deadline=None))
