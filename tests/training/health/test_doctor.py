"""One verdict with its evidence for each thing that goes wrong."""

import pytest

from tests.training.health.test_goodput import record, step, told
from training.health.doctor import as_document, examine

ATTEMPT = record(1, 100.0)


def find(log, *, committed=None, worked_on=False, attempts=(ATTEMPT,)):
    events = log if isinstance(log, dict) else {1: log}
    return examine(attempts, events, committed=committed or {}, is_worked_on=worked_on)


def end(outcome, error_kind=None, message="Why."):
    return told(200.0, "attempt.ended", outcome=outcome, error_kind=error_kind, message=message, rank=1, step=3)


@pytest.mark.parametrize(
    ("error_kind", "verdict"),
    [
        ("SIGKILL", "rank died"),
        ("SIGSEGV", "rank died"),
        ("Hang", "hang"),
        ("OutOfMemory", "out of memory"),
        ("OutOfMemoryError", "out of memory"),
        ("MemoryError", "out of memory"),
        ("ValueError", "failed"),
        ("UnexplainedExit", "failed"),
    ],
)
def test_the_end_of_the_newest_attempt_is_the_verdict(error_kind, verdict):
    (finding,) = find([step(110.0, 3), end("failed", error_kind)])
    assert (finding.verdict, finding.evidence) == (verdict, ("attempt 1 reached step 3", "Why."))
    assert finding.advice


def test_a_run_that_is_well():
    assert find([end("finished")])[0].verdict == "finished"
    assert find([end("stopped")])[0].verdict == "stopped"
    assert find([step(110.0, 3)], worked_on=True)[0].verdict == "running"
    assert find([told(110.0, "finished")])[0].verdict == "finished"
    assert find([], attempts=())[0].verdict == "never started"


def test_a_run_on_which_nobody_works_any_more():
    (finding,) = find([step(110.0, 3)])
    assert finding.verdict == "interrupted"
    assert finding.evidence == ("attempt 1 reached step 3 and has no end",)


def test_three_attempts_without_a_commit_end_with_their_reasons_counted():
    attempts = [record(n, 100.0 * n) for n in (1, 2, 3, 4)]
    ends = {n: [end("failed", "ValueError", f"Bad.{f' Log: /{n}'}")] for n in (2, 3)}
    log = {1: [end("failed", "SIGKILL")], **ends, 4: [end("failed", "OSError", "Worse.")]}
    findings = find(log, attempts=attempts, committed={1: 10})
    assert [finding.verdict for finding in findings] == ["failed", "no progress"]
    assert findings[1].evidence == ("3 attempts in a row committed nothing", "2 x Bad.", "1 x Worse.")
    assert [f.verdict for f in find(log, attempts=attempts, committed={1: 10, 2: 20})] == ["failed"]


def test_bad_batches_are_listed_with_what_was_done():
    log = [
        told(110.0, "batch.skipped", step=4, position=8, reason="a loss of nan", seconds=1.0),
        told(111.0, "rewind.asked", step=5, reason="a loss of 9", start=0, stop=8),
        end("finished"),
    ]
    findings = find(log)
    assert [finding.verdict for finding in findings] == ["spike", "finished"]
    assert findings[0].evidence == (
        "attempt 1, step 4: a loss of nan (passed over)",
        "attempt 1, step 5: a loss of 9 (gone back for)",
    )


def test_a_damaged_checkpoint_is_told():
    log = [told(101.0, "checkpoint.damaged", step=20, from_attempt=1, reason="a bit"), end("finished")]
    assert find(log)[0].evidence == ("attempt 1 found the checkpoint of step 20 damaged: a bit",)


def steps(seconds, data):
    """Ten steps, of which the first five do not count."""
    return [step(100.0 + n, n + 1, seconds if n >= 5 else 50.0, data if n >= 5 else 49.0) for n in range(10)]


def test_slow_data():
    assert find([*steps(1.0, 0.2), end("finished")])[0].verdict == "finished"
    finding = find([*steps(1.0, 0.3), end("finished")])[0]
    assert finding.verdict == "slow data"
    assert finding.evidence == ("attempt 1 waited 1.5 of 5.0 s for data (30% of its steps)",)


def test_slow_saves():
    saves = [
        told(120.0 + n, "save.staged", step=n, blocking_seconds=seconds) for n, seconds in enumerate((9, 0.9, 0.9))
    ]
    assert find([*steps(1.0, 0.0), *saves, end("finished")])[0].verdict == "finished"
    slow = [event | {"blocking_seconds": 1.25} for event in saves]
    lost = [
        told(130.0, "save.failed", step=1),
        told(131.0, "save.skipped", step=2),
        told(132.0, "save.skipped", step=3),
    ]
    finding = find([*steps(1.0, 0.0), *slow, *lost, end("finished")])[0]
    assert finding.verdict == "slow save"
    assert finding.evidence == (
        "attempt 1: a save stops the training for 1.25 s, a step takes 1.00 s",
        "attempt 1: 1 saves failed",
        "attempt 1: 2 saves were left out, the one before still being written",
    )


def test_the_document_has_the_verdict_first():
    document = as_document(find([step(110.0, 3), end("failed", "Hang")]))
    assert document["verdict"] == "hang"
    assert document["findings"][0]["evidence"] == ["attempt 1 reached step 3", "Why."]
