"""Many processes claim one attempt number at the same moment: exactly one gets it, on every kind of store."""

import os
from collections import Counter

import pytest
import torch.distributed as dist

from headrace.storage import Storage
from tests.headrace.conftest import s3_root, s3_server  # noqa: F401 - fixtures
from tests.training.toy import run_spec
from training.launch.attempts import attempt_numbers, claim_attempt, make_record, read_attempts

RUN = run_spec()
PROCESSES = 8
ROUNDS = 50


def claim_every_number(world, root, rounds, environment):
    """What this process won, all starting each round together; records differ, so that the winner's can be told."""
    os.environ.update(environment)
    storage = Storage.open(root)
    record = make_record(RUN, 1, None)
    won = []
    for number in range(1, rounds + 1):
        dist.barrier()
        mine = record.model_copy(update={"attempt": number, "host": f"machine-{world.rank}"})
        if claim_attempt(storage, RUN.run_prefix, mine):
            won.append(number)
    return won


def check(ranks, root):
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    won = ranks(PROCESSES, claim_every_number, root, ROUNDS, environment)
    storage = Storage.open(root)
    counts = Counter(number for numbers in won for number in numbers)
    assert counts == dict.fromkeys(range(1, ROUNDS + 1), 1)
    assert attempt_numbers(storage, RUN.run_prefix) == list(range(1, ROUNDS + 1))
    winners = {number: f"machine-{rank}" for rank, numbers in enumerate(won) for number in numbers}
    assert {record.attempt: record.host for record in read_attempts(storage, RUN.run_prefix)} == winners


@pytest.mark.slow
def test_of_eight_processes_one_claims_each_number_in_a_folder(run_ranks, tmp_path):
    check(run_ranks, str(tmp_path / "store"))


@pytest.mark.slow
def test_of_eight_processes_one_claims_each_number_on_s3(run_ranks, s3_root):  # noqa: F811 - the fixture
    check(run_ranks, s3_root)
