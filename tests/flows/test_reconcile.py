"""What becomes of a flow run, case by case."""

import pytest

from flows.reconcile import (
    CANCELLING_SECONDS,
    LATE_SECONDS,
    PENDING_SECONDS,
    START_SECONDS,
    Seen,
    counts_of,
    decide,
    successor_key,
    successor_name,
    successor_tags,
)

LONG = 10_000.0


def seen(state, presence, seconds=LONG, **more):
    return Seen(state=state, presence=presence, seconds_in_state=seconds, **more)


@pytest.mark.parametrize(
    ("record", "action", "mark_crashed"),
    [
        # whoever lives is left alone, whatever Prefect believes
        *((seen(state, "alive"), "leave", False) for state in ("CRASHED", "RUNNING", "PENDING", "CANCELLING")),
        # crashed: continued once
        (seen("CRASHED", "gone", 0.0), "resubmit", False),
        (seen("CRASHED", "silent", 0.0), "resubmit", False),
        (seen("CRASHED", "absent", 0.0), "resubmit", False),
        (seen("CRASHED", "gone", continued=True), "leave", False),
        # crashed after somebody wanted it cancelled: the wish counts
        (seen("CRASHED", "gone", 0.0, cancel_asked=True), "cancel", False),
        (seen("CRASHED", "absent", 0.0, cancel_asked=True), "cancel", False),
        # Prefect believes that it runs
        (seen("RUNNING", "gone", 0.0), "resubmit", True),
        (seen("RUNNING", "silent", 0.0), "resubmit", True),
        (seen("RUNNING", "absent", START_SECONDS - 1), "leave", False),
        (seen("RUNNING", "absent", START_SECONDS + 1), "resubmit", True),
        (seen("RUNNING", "gone", continued=True), "resubmit", True),
        # a worker took it and never started it
        (seen("PENDING", "absent", PENDING_SECONDS - 1), "leave", False),
        (seen("PENDING", "absent", PENDING_SECONDS + 1), "resubmit", True),
        (seen("PENDING", "gone", 0.0), "resubmit", True),
        # a retry that nobody starts
        (seen("SCHEDULED", "absent", awaits_retry=True, seconds_late=LATE_SECONDS - 1), "leave", False),
        (seen("SCHEDULED", "absent", awaits_retry=True, seconds_late=LATE_SECONDS + 1), "resubmit", True),
        (seen("SCHEDULED", "absent", seconds_late=LONG), "leave", False),
        # cancelling: final, and never started again
        (seen("CANCELLING", "gone", 0.0), "cancel", False),
        (seen("CANCELLING", "silent", 0.0), "cancel", False),
        (seen("CANCELLING", "absent", CANCELLING_SECONDS - 1), "leave", False),
        (seen("CANCELLING", "absent", CANCELLING_SECONDS + 1), "cancel", False),
        # what has ended by itself
        *((seen(state, "gone"), "leave", False) for state in ("COMPLETED", "FAILED", "CANCELLED", "PAUSED", "NONE")),
    ],
    ids=lambda value: f"{value.state}-{value.presence}" if isinstance(value, Seen) else str(value),
)
def test_what_becomes_of_it(record, action, mark_crashed):
    decision = decide(record)
    assert (decision.action, decision.mark_crashed) == (action, mark_crashed)
    assert decision.why


@pytest.mark.parametrize("state", ["CANCELLED", "CANCELLING"])
@pytest.mark.parametrize("presence", ["alive", "gone", "silent", "absent"])
@pytest.mark.parametrize("seconds", [0.0, LONG])
@pytest.mark.parametrize("continued", [False, True])
def test_what_was_cancelled_is_never_resubmitted(state, presence, seconds, continued):
    assert decide(seen(state, presence, seconds, continued=continued)).action in ("leave", "cancel")


def test_resubmissions_without_a_new_step_are_counted_and_end():
    tags, said = ["team-a"], []
    while True:
        fruitless, before = counts_of(tags)
        decision = decide(seen("CRASHED", "gone", step=40, step_before=before, fruitless=fruitless, message="exit 1"))
        said.append(decision.action)
        if decision.action != "resubmit":
            break
        tags = successor_tags(tags, decision, step=40)
    # the first one brought the run from 0 to 40, then ten brought nothing
    assert said == ["resubmit"] * 11 + ["fail"]
    assert "10 resubmissions in a row brought the run no further than step 40" in decision.why
    assert "exit 1" in decision.why
    assert tags == ["team-a", "headrace.fruitless:10", "headrace.step:40"]


def test_a_new_step_starts_the_count_again():
    decision = decide(seen("CRASHED", "gone", step=41, step_before=40, fruitless=10))
    assert (decision.action, decision.fruitless) == ("resubmit", 0)


def test_with_no_budget_nothing_is_resubmitted():
    assert decide(seen("CRASHED", "gone"), budget=0).action == "fail"


def test_one_that_is_continued_is_not_failed_for_its_budget():
    """It was decided before, perhaps by another one of us; only Prefect's belief is left to correct."""
    decision = decide(seen("RUNNING", "gone", continued=True, fruitless=99))
    assert (decision.action, decision.mark_crashed) == ("resubmit", True)


def test_names_and_keys_follow_from_the_one_that_is_continued():
    assert successor_name("brave-fox") == "brave-fox.2"
    assert successor_name("brave-fox.2") == "brave-fox.3"
    assert successor_name("v1.9") == "v1.10"
    assert successor_key("a") != successor_key("b")
    assert counts_of(["headrace.fruitless:x", "headrace.step:7"]) == (0, 7)
