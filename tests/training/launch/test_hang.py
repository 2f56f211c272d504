"""Verdicts on silence, with a clock that the test turns."""

import json

import pytest

from training.launch.hang import EXEMPT_STEPS, Beat, HangDetector

HANG, SAVE = 10.0, 100.0


class Ranks:
    """Heartbeats of two ranks, and a detector that looks at them."""

    def __init__(self, folder, start_step=0):
        self.paths = {rank: folder / f"rank-{rank}.json" for rank in range(2)}
        self.now = 1000.0
        self.detector = HangDetector(
            self.paths,
            start_step=start_step,
            hang_timeout_seconds=HANG,
            save_timeout_seconds=SAVE,
            now=self.now,
        )

    def beat(self, rank, step, phase):
        beat = {"rank": rank, "pid": 100 + rank, "step": step, "phase": phase, "time": 0.0}
        self.paths[rank].write_text(json.dumps(beat))

    def after(self, seconds):
        self.now += seconds
        return self.detector.look(self.now)

    def train(self, steps, seconds=1.0, start=0):
        for step in range(start, start + steps):
            for rank in self.paths:
                self.beat(rank, step, "forward_backward")
            assert self.after(seconds) is None


@pytest.fixture
def ranks(tmp_path):
    return Ranks(tmp_path)


def test_ranks_that_go_on_are_no_hang(ranks):
    ranks.train(50, seconds=HANG * 0.9)
    assert ranks.detector.beats()[1] == Beat(1, 101, 49, "forward_backward")


def test_the_rank_that_went_silent_first_is_named(ranks):
    ranks.train(EXEMPT_STEPS + 3)
    ranks.beat(0, 8, "optimizer")
    assert ranks.after(1.0) is None
    hang = ranks.after(HANG)
    assert (hang.rank, hang.beat.step, hang.beat.phase) == (1, 7, "forward_backward")
    assert hang.describe() == (
        "Rank 1 hangs in phase 'forward_backward' after step 7: silent for 11 s, where 10 s are allowed "
        "(launch.hang_timeout_seconds)."
    )


def test_slow_steps_are_learned(ranks):
    ranks.train(20, seconds=8.0)
    assert ranks.after(4 * 8.0 - 8.0) is None
    assert ranks.after(2 * 8.0 + 0.1).allowed_seconds == pytest.approx(5 * 8.0)


def test_one_slow_step_does_not_lengthen_the_patience(ranks):
    ranks.train(10)
    ranks.train(1, seconds=HANG * 0.95, start=10)
    ranks.train(5, start=11)
    assert ranks.after(HANG + 0.1) is not None


@pytest.mark.parametrize("start_step", [0, 700])
def test_the_first_steps_have_more_time(tmp_path, start_step):
    ranks = Ranks(tmp_path, start_step)
    assert ranks.after(4 * HANG) is None
    assert ranks.after(2 * HANG).beat is None
    ranks.train(EXEMPT_STEPS, start=start_step, seconds=4 * HANG)
    ranks.beat(0, start_step + EXEMPT_STEPS, "data")
    ranks.beat(1, start_step + EXEMPT_STEPS, "data")
    assert ranks.after(0.0) is None


@pytest.mark.parametrize(
    ("phase", "allowed"),
    [("evaluate", 5 * HANG), ("start", 5 * HANG), ("save", HANG + SAVE), ("commit", HANG + SAVE), ("data", HANG)],
)
def test_phases_that_take_long_have_more_time(ranks, phase, allowed):
    ranks.train(EXEMPT_STEPS + 2)
    for rank in range(2):
        ranks.beat(rank, 7, phase)
    assert ranks.after(0.0) is None
    assert ranks.after(allowed - 0.1) is None
    assert ranks.after(0.2).allowed_seconds == pytest.approx(allowed)


def test_the_clock_of_a_rank_does_not_matter(ranks):
    ranks.train(EXEMPT_STEPS + 2)
    document = json.loads(ranks.paths[0].read_text())
    for rank in range(2):
        ranks.paths[rank].write_text(json.dumps({**document, "rank": rank, "time": 1e12}))
    assert ranks.after(HANG - 1.0) is None
    assert ranks.after(HANG + 0.1) is not None


def test_a_rank_that_never_came_is_named(tmp_path):
    ranks = Ranks(tmp_path)
    ranks.beat(0, 0, "start")
    assert ranks.after(1.0) is None
    hang = ranks.after(5 * HANG)
    assert hang.describe().startswith("Rank 1 hangs before its first sign: silent for 51 s")
