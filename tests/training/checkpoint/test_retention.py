"""What stays and what goes, decided on made-up histories."""

import pytest
from pydantic import ValidationError

from training.checkpoint.config import CheckpointConfig
from training.checkpoint.retention import History, Leftover, Reference, Saved, plan_retention
from training.run_spec import RestorePoint


def saved(step, attempt=1, **fields):
    return Saved(step=step, attempt=attempt, prefix=f"{attempt}/{step}", **{"on_chain": True, **fields})


def history(*found, newest_attempt=1, **fields):
    """The newest usable checkpoint was read back whole, as `read_history` does it."""
    usable = [s for s in found if s.on_chain and s.damage is None]
    newest = max(usable, key=lambda s: s.step, default=None)
    whole = [Saved(**{**vars(s), "whole": True}) if s is newest else s for s in found]
    return History(**{"newest_attempt": newest_attempt, "restore": None, "saved": tuple(whole), **fields})


def kept(plan):
    return {verdict.prefix: verdict.reason for verdict in plan.keep}


def deleted(plan):
    return [verdict.prefix for verdict in plan.delete]


def policy(**fields):
    return CheckpointConfig(**{"keep_last": 2, **fields})


STEPS = [saved(step) for step in range(10, 80, 10)]


def test_the_newest_are_kept_and_the_oldest_go_first():
    plan = plan_retention(history(*STEPS), policy())
    assert deleted(plan) == ["1/10", "1/20", "1/30", "1/40", "1/50"]
    assert kept(plan) == {"1/70": "one of the newest 2", "1/60": "one of the newest 2"}
    assert {verdict.reason for verdict in plan.delete} == {"2 newer ones are kept"}
    assert plan.newest_whole == 70


@pytest.mark.parametrize("keep_last", [0, 1])
def test_one_checkpoint_is_never_enough(keep_last):
    with pytest.raises(ValidationError, match="greater than or equal to 2"):
        CheckpointConfig(keep_last=keep_last)


def test_every_nth_step_is_kept_for_good():
    plan = plan_retention(history(*STEPS), policy(keep_every=20))
    assert deleted(plan) == ["1/10", "1/30", "1/50"]
    assert kept(plan)["1/20"] == "a multiple of 20"
    assert kept(plan)["1/60"] == "one of the newest 2; a multiple of 20"


def test_the_best_are_kept_and_of_equal_ones_the_newest():
    scores = {10: 3.0, 20: 2.0, 30: 2.5, 40: 2.0, 50: None, 60: 4.0, 70: 4.0}
    found = [saved(step, score=score) for step, score in scores.items()]
    plan = plan_retention(history(*found), policy(keep_best=1))
    assert kept(plan)["1/40"] == "one of the best 1: 2 bits per byte"
    assert deleted(plan) == ["1/10", "1/20", "1/30", "1/50"]
    assert deleted(plan_retention(history(*found), policy(keep_best=3))) == ["1/10", "1/50"]


def test_what_somebody_refers_to_is_kept():
    references = (Reference(20, 1, "exported as model m-1"), Reference(40, None, "run f starts from it"))
    plan = plan_retention(history(*STEPS, references=references), policy())
    assert kept(plan)["1/20"] == "exported as model m-1"
    assert kept(plan)["1/40"] == "run f starts from it"
    assert deleted(plan) == ["1/10", "1/30", "1/50"]


def test_a_fork_keeps_every_checkpoint_of_its_step_and_an_export_only_its_own():
    both = [saved(20, on_chain=False), saved(20, attempt=2), *(saved(step, attempt=3) for step in (30, 40, 50))]
    fork = plan_retention(history(*both, newest_attempt=3, references=(Reference(20, None, "fork"),)), policy())
    assert {"1/20", "2/20"} <= kept(fork).keys()
    export = plan_retention(history(*both, newest_attempt=3, references=(Reference(20, 1, "export"),)), policy())
    assert "1/20" in kept(export)
    assert deleted(export) == ["2/20", "3/30"]


def test_the_start_of_the_newest_attempt_is_kept_until_it_has_committed():
    start = RestorePoint(attempt=1, step=20)
    found = [saved(step) for step in (20, 30, 40)]
    before = plan_retention(history(*found, newest_attempt=2, restore=start), policy())
    assert kept(before)["1/20"] == "attempt 2 starts from it"
    after = plan_retention(history(*found, saved(50, attempt=2), newest_attempt=2, restore=start), policy())
    assert deleted(after) == ["1/20", "1/30"]


def test_before_a_rewind_the_newest_ones_are_those_it_may_start_from():
    found = [*STEPS[:4], saved(50, whole=True), *STEPS[5:]]
    plan = plan_retention(History(newest_attempt=1, restore=None, not_after=55, saved=tuple(found)), policy())
    assert deleted(plan) == ["1/10", "1/20", "1/30"]
    assert kept(plan)["1/60"] == "newer than the newest one that could be read back whole"


def test_one_that_a_later_rewind_can_go_back_to_is_kept():
    plan = plan_retention(history(*STEPS, rewind_batches=25), policy())
    assert kept(plan)["1/40"] == "a rewind of 25 batches may go back to it"
    assert deleted(plan) == ["1/10", "1/20", "1/30", "1/50"]
    assert deleted(plan_retention(history(*STEPS, rewind_batches=1000), policy())) == [
        f"1/{s}" for s in range(10, 60, 10)
    ]


def test_without_one_that_was_read_back_nothing_committed_goes():
    found = History(newest_attempt=1, restore=None, saved=tuple(STEPS))
    plan = plan_retention(found, policy())
    assert (plan.delete, plan.newest_whole) == ((), None)
    assert kept(plan)["1/10"] == "no checkpoint of the run could be read back whole"


def test_damaged_ones_count_for_nothing_and_go_when_there_are_newer_ones():
    found = [saved(10), saved(20), saved(30, damage="a byte"), saved(40), saved(50, damage="a byte")]
    plan = plan_retention(history(*found), policy())
    assert deleted(plan) == ["1/10", "1/30"]
    assert kept(plan) == {
        "1/50": "newer than the newest one that could be read back whole",
        "1/40": "one of the newest 2",
        "1/20": "one of the newest 2",
    }
    assert plan.delete[1].reason == "damaged, and there are newer ones: a byte"


def test_what_a_later_attempt_went_back_behind_goes_first():
    found = [saved(10), saved(20, on_chain=False), saved(15, attempt=2), saved(25, attempt=2)]
    plan = plan_retention(history(*found, newest_attempt=2), policy())
    assert deleted(plan) == ["1/20", "1/10"]
    assert plan.delete[0].reason == "a later attempt went back behind it"


def test_what_shows_that_later_attempts_made_progress_stays():
    """Attempt 2 committed and attempt 3 set that aside: the rule of attempts without progress has to see both."""
    found = [saved(10), saved(20, attempt=2, on_chain=False, set_aside_by=3), saved(5, damage="x", set_aside_by=3)]
    plan = plan_retention(history(*found, newest_attempt=3), policy())
    assert deleted(plan) == []
    assert kept(plan)["2/20"] == "shows what an attempt after attempt 1 did"
    later = plan_retention(history(*found, saved(30, attempt=4), newest_attempt=4), policy())
    assert deleted(later) == ["2/20", "1/5"]


def test_folders_without_a_commit_go_unless_somebody_may_write_there():
    left = [Leftover(step, attempt, f"{attempt}/{step}") for attempt, step in ((1, 50), (2, 25), (2, 40), (3, 60))]
    plan = plan_retention(history(saved(10), saved(30, attempt=2), newest_attempt=2, leftovers=tuple(left)), policy())
    assert [(verdict.prefix, verdict.reason) for verdict in plan.sweep] == [
        ("2/25", "without a commit, and its attempt has committed step 30 since"),
        ("1/50", "without a commit, and attempt 1 has ended"),
    ]
