"""The root cause among everything that was seen."""

import signal
import time
from pathlib import Path

import pytest

from headrace.errors import AttemptFailed, DamagedData, InputError, StorageFull, Terminal
from tests.training.checkpoint.saved import attempt_spec
from tests.training.toy import run_spec
from training.health.rewind import Rewind
from training.launch.diagnosis import AttemptOutcome, RankExit, diagnose, memory_kills, read_exits, read_results
from training.launch.hang import Beat
from training.run_spec import RankResult


def result(rank, outcome="failed", when=100.0, **fields):
    whole = {"rank": rank, "outcome": outcome, "step": 7, "exit_code": 1, "time": when}
    return RankResult.model_validate({**whole, **fields})


def error(rank, when=100.0, kind="ValueError", **fields):
    return result(rank, when=when, error_kind=kind, message=f"message of rank {rank}", **fields)


@pytest.fixture
def judge(tmp_path):
    spec = attempt_spec(tmp_path, run_spec(launch={"ranks_per_node": 3}))

    def judged(*results, exits=(), torchrun_exit=1, stop=False, memory_kills=0):
        return diagnose(
            spec,
            exits=exits,
            results=results,
            beats={1: Beat(1, 5, 7, "optimizer")},
            torchrun_exit=torchrun_exit,
            stop_requested=stop,
            logs=tmp_path,
            memory_kills=memory_kills,
        )

    return judged


def test_the_earliest_real_exception_is_the_cause(judge):
    outcome = judge(error(0, 102.0), error(1, 101.0), error(2, 100.0, secondary=True))
    assert (outcome.rank, outcome.step, outcome.error_kind) == (1, 7, "ValueError")
    assert outcome.message == "Rank 1 failed after step 7: ValueError: message of rank 1"


def test_a_rewind_is_told_as_what_it_is(judge):
    sentence = "Step 8 gave a loss that is not finite: the run goes back to step 4 or before."
    outcome = judge(*(result(rank, error_kind="Rewind", message=sentence, retryable=True) for rank in range(3)))
    assert (outcome.kind, outcome.message) == ("failed", sentence)
    raised = outcome.error()
    assert isinstance(raised, Rewind)
    assert (str(raised), raised.retryable) == (sentence, True)


def test_a_signal_comes_before_exceptions(judge):
    exits = [RankExit(0, 1, 99.0), RankExit(1, -signal.SIGABRT, 100.0)]
    outcome = judge(error(0, 99.0), error(2, 98.0), exits=exits)
    assert (outcome.rank, outcome.error_kind) == (1, "SIGABRT")
    assert outcome.message == "Rank 1 was killed by SIGABRT after step 7, in phase 'optimizer'."


def test_of_two_that_left_no_word_the_one_with_a_signal_is_the_cause(judge):
    outcome = judge(exits=[RankExit(0, 1, 99.0), RankExit(2, -9, 100.0)])
    assert (outcome.rank, outcome.error_kind) == (2, "SIGKILL")
    assert "before its first sign" in outcome.message


def test_the_log_and_its_last_line_are_shown(judge, tmp_path):
    log = tmp_path / "id_x" / "attempt_0" / "1" / "stderr.log"
    log.parent.mkdir(parents=True)
    log.write_text("Traceback\nImportError: no such thing\n\n")
    outcome = judge(exits=[RankExit(1, 1, 99.0)])
    assert "without saying why. Its last line: ImportError: no such thing" in outcome.message
    assert outcome.message.endswith(f"Log: {log}")
    assert outcome.log == str(log)


def test_torchrun_itself_may_be_the_cause(judge, tmp_path):
    assert judge(torchrun_exit=-9).message == "torchrun was killed by SIGKILL."
    (tmp_path / "torchrun.log").write_text("ValueError: bad port\n")
    assert judge().message == "torchrun ended with exit code 1 and no rank said why: ValueError: bad port."


def test_all_ranks_must_have_finished(judge):
    whole = [result(rank, "finished", exit_code=0, step=9) for rank in range(3)]
    assert judge(*whole).message == "Finished at step 9."
    assert judge(*whole[:2], exits=[RankExit(2, -11, 100.0)]).error_kind == "SIGSEGV"


def test_a_stop_is_a_stop_although_ranks_were_ended_roughly(judge):
    saved = result(0, "stopped", exit_code=3)
    assert judge(saved, exits=[RankExit(1, -9, 100.0)], stop=True).message == "Stopped and saved at step 7."
    nothing = judge(exits=[RankExit(1, -15, 100.0)], stop=True)
    assert (nothing.kind, nothing.message) == ("stopped", "Stopped before the state could be saved again.")
    assert judge(error(0), stop=True).kind == "failed"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"kind": "DamagedCheckpoint", "retryable": True}, AttemptFailed),
        ({"kind": "OSError", "retryable": None}, AttemptFailed),
        ({"kind": "StorageFull", "retryable": False}, StorageFull),
        ({"kind": "InputError", "retryable": False}, InputError),
        ({"kind": "DamagedData", "retryable": False}, DamagedData),
        ({"kind": "Superseded", "retryable": False}, Terminal),
        ({"kind": "ClassVar", "retryable": False}, Terminal),
    ],
)
def test_the_error_to_raise_keeps_its_meaning(judge, fields, expected):
    raised = judge(error(0, **fields)).error()
    assert type(raised) is expected
    assert "message of rank 0" in str(raised)


def test_a_success_is_no_error():
    assert AttemptOutcome(kind="stopped", message="").error() is None


def test_files_that_are_missing_or_torn_are_no_reports(tmp_path):
    spec = attempt_spec(tmp_path, run_spec(launch={"ranks_per_node": 3}))
    spec.work_path.mkdir(parents=True)
    assert read_results(spec) == []
    assert read_exits(spec.work_path / "failures.json") == []
    good = result(1, when=time.time())
    spec.result_path(1).write_text(good.model_dump_json())
    spec.result_path(2).write_text("{")
    assert read_results(spec) == [good]


def test_a_killed_rank_is_out_of_memory_when_the_kernel_says_so(judge):
    outcomes = [judge(exits=[RankExit(1, -signal.SIGKILL, 5.0)], memory_kills=kills) for kills in (0, 2)]
    assert [outcome.error_kind for outcome in outcomes] == ["SIGKILL", "OutOfMemory"]
    assert outcomes[0].message == (
        "Rank 1 was killed by SIGKILL after step 7, in phase 'optimizer'. The kernel counted no kill for lack of "
        "memory, so somebody or something else did that."
    )
    assert outcomes[1].message == (
        "Rank 1 was killed after step 7, in phase 'optimizer', when the kernel killed 2 processes of this machine for "
        "lack of memory: lower layout.micro_batch_size, or use more ranks."
    )


def test_the_kernel_counts_its_kills():
    counted = [line for line in Path("/proc/vmstat").read_text().splitlines() if line.startswith("oom_kill ")]
    assert memory_kills() == int(counted[0].split()[1] if counted else 0)
