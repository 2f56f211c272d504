import threading

import numpy as np
import pytest
import torch

from data_prep.order import SampleOrder
from tests.training.toy import ArrayTokens, UnevenBatches, corpus
from training.batches import Batch, Batches, num_samples
from training.model.loss import IGNORED

SEQ_LEN = 16
NUM_SAMPLES = 62  # of 1000 tokens


def batches(dp_rank: int = 0, dp: int = 1, tokens: ArrayTokens | None = None, kind: type[Batches] = Batches) -> Batches:
    return kind(
        tokens or corpus(1000, 67),
        SampleOrder("plan", 7, NUM_SAMPLES),
        seq_len=SEQ_LEN,
        global_batch_size=8,
        dp_rank=dp_rank,
        dp=dp,
    )


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_union_over_ranks_is_the_same_for_any_dp(dp):
    whole = batches()
    parts = [batches(rank, dp) for rank in range(dp)]
    for position in (0, 8, 56, 640):
        joined = torch.cat([part.read(position).tokens_BT for part in parts])
        assert torch.equal(joined, whole.read(position).tokens_BT)


def test_a_sample_is_its_tokens_with_targets_one_further():
    tokens = corpus(1000, 67)
    batch = batches(tokens=tokens).read(24)
    for row, index in enumerate(batches().sample_indices(24)):
        expected = tokens.read_many(np.array([index * SEQ_LEN]), SEQ_LEN + 1)[0]
        assert batch.tokens_BT[row].tolist() == expected[:-1].tolist()
        assert batch.targets_BT[row].tolist() == expected[1:].tolist()
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == torch.int64
    assert batch.num_valid == 8 * SEQ_LEN


def test_every_sample_is_taken_once_an_epoch_though_batches_cross_its_end():
    reader = batches()
    seen = np.concatenate([reader.sample_indices(position) for position in range(0, 2 * NUM_SAMPLES, 8)])
    for epoch in (0, 1):
        assert sorted(seen[epoch * NUM_SAMPLES : (epoch + 1) * NUM_SAMPLES]) == list(range(NUM_SAMPLES))
    assert seen[:NUM_SAMPLES].tolist() != seen[NUM_SAMPLES : 2 * NUM_SAMPLES].tolist()


def test_position_alone_decides_so_a_resume_in_a_later_epoch_sees_what_the_straight_run_saw():
    straight, resumed = batches(), batches()
    taken = {position: straight.take(position).tokens_BT for position in range(0, 240, 8)}
    for position in (136, 144, 152):  # in the third epoch
        assert torch.equal(resumed.take(position).tokens_BT, taken[position])


def test_the_next_batch_is_read_ahead_on_a_thread():
    reads: list[tuple[int, str]] = []

    class Noting(Batches):
        def read(self, position: int) -> Batch:
            reads.append((position, threading.current_thread().name))
            return super().read(position)

    reader = batches(kind=Noting)
    reader.take(0)
    reader.take(8)
    reader.take(16)
    reader.close()
    assert [position for position, _ in reads][:3] == [0, 8, 16]
    assert reads[0][1] == threading.current_thread().name
    assert {name.split("_")[0] for _, name in reads[1:]} == {"batches"}


def test_an_error_while_reading_ahead_is_raised_where_the_batch_is_taken():
    class Failing(Batches):
        def read(self, position: int) -> Batch:
            if position == 8:
                raise OSError("the disk is gone")
            return super().read(position)

    reader = batches(kind=Failing)
    reader.take(0)
    with pytest.raises(OSError, match="the disk is gone"):
        reader.take(8)


def test_num_valid_counts_targets_that_are_not_ignored():
    batch = batches(kind=UnevenBatches).read(0)
    expected = [1 + int(index) * 7 % SEQ_LEN for index in batches().sample_indices(0)]
    assert (batch.targets_BT != IGNORED).sum(dim=1).tolist() == expected
    assert batch.num_valid == sum(expected)


def test_split_gives_every_sequence_once_in_order():
    batch = batches().read(0)
    parts = list(batch.split(3))
    assert [len(part.tokens_BT) for part in parts] == [3, 3, 2]
    assert torch.equal(torch.cat([part.targets_BT for part in parts]), batch.targets_BT)


@pytest.mark.parametrize(("tokens", "samples"), [(0, 0), (1, 0), (16, 0), (17, 1), (32, 1), (33, 2), (1000, 62)])
def test_number_of_samples_leaves_room_for_the_last_target(tokens, samples):
    assert num_samples(tokens, SEQ_LEN) == samples
