"""What people read: few lines in a log, bars on a terminal, one document on standard output, and no secrets."""

import io
import json
import logging
import threading

import pytest

from headrace.errors import Cancelled, ConfigError
from headrace.terminal import Terminal, emit_json, redact


class Screen(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Clock:
    """Seconds that pass when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stream() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def terminal(stream: io.StringIO, clock: Clock) -> Terminal:
    return Terminal(plain=True, stream=stream, clock=clock)


def lines(stream: io.StringIO) -> list[str]:
    return stream.getvalue().splitlines()


def test_a_stage_in_lines(terminal: Terminal, stream: io.StringIO, clock: Clock):
    with terminal.stage("train", total=256, unit="step") as stage:
        for step in range(257):
            stage.update(step, loss=2.3149, tokens_per_second=12345.6)
            clock.now += 0.5
    assert lines(stream)[:3] == [
        "train: started",
        "train: step 10/256  3%  loss=2.31  tok/s=12,346  ETA 2:03",
        "train: step 20/256  7%  loss=2.31  tok/s=12,346  ETA 1:58",
    ]
    assert lines(stream)[-1] == "train: done in 2:08  step 256/256  100%  loss=2.31  tok/s=12,346"
    assert len(lines(stream)) == 1 + 25 + 1  # at most one line in five seconds


def test_each_stage_has_its_own_lines(terminal: Terminal, stream: io.StringIO, clock: Clock):
    with terminal.stage("prepare", unit="documents") as first, terminal.stage("upload") as second:
        clock.now += 5
        first.update(1234)
        second.update(files=3)
        first.update(1235)
        clock.now += 4.9
        first.update(1236)
        second.update(files=4)
    assert lines(stream) == [
        "prepare: started",
        "upload: started",
        "prepare: documents 1,234",
        "upload: files=3",
        "upload: done in 9.9 s  files=4",
        "prepare: done in 9.9 s  documents 1,236",
    ]


def test_how_a_stage_ends(terminal: Terminal, stream: io.StringIO, clock: Clock):
    with terminal.stage("prepare") as stage:
        clock.now += 0.25
        stage.update(7)
        stage.note("2 files are not UTF-8 and were skipped")
        stage.conclude("reused books-0123")
    for error, expected in [
        (ConfigError("x"), "failed after"),
        (ValueError(), "failed after"),
        (Cancelled("x"), "stopped after"),
        (KeyboardInterrupt(), "stopped after"),
    ]:
        with pytest.raises(type(error)), terminal.stage("train"):
            raise error
        assert lines(stream)[-1] == f"train: {expected} 0.0 s"
    assert lines(stream)[:3] == [
        "prepare: started",
        "prepare: 2 files are not UTF-8 and were skipped",
        "prepare: done in 0.2 s  reused books-0123",
    ]


def test_the_time_left(terminal: Terminal, clock: Clock):
    with terminal.stage("train", unit="step") as stage:
        assert stage.describe_with_eta() == ""
        for step in (100, 101, 102, 103):
            clock.now += 1
            stage.update(step)
        assert stage.describe_with_eta() == "step 103"  # without a total nobody knows
        stage.update(total=120)
        assert stage.describe_with_eta() == "step 103/120  85%  ETA 17 s"
        stage.update(120)
        assert stage.describe_with_eta() == "step 120/120  100%"


def test_the_time_left_does_not_count_the_way_to_the_first_step(terminal: Terminal, clock: Clock):
    """Processes start, and a checkpoint is read, before an attempt counts a step."""
    with terminal.stage("train", total=120, unit="step") as stage:
        # The second attempt begins at its restore point.
        for restored, seconds, left in ((100, 1, "17 s"), (50, 4, "4:28")):
            stage.update(restored)
            clock.now += 600
            for step in (1, 2):
                stage.update(restored + step)
                stage.update(loss=2.0)
                stage.update(restored + step)  # counted once
                assert "ETA" not in stage.describe_with_eta()
                clock.now += seconds
            stage.update(restored + 3)
            assert stage.describe_with_eta().endswith(f"  ETA {left}")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (12345, "12,345"),
        (True, "True"),
        ("text", "text"),
        (2.3149, "2.31"),
        (0.00012345, "0.000123"),
        (999.6, "1,000"),
        (1234.5, "1,234"),
        (-98765.4, "-98,765"),
        (1e20, "1e+20"),
        (float("nan"), "nan"),
        (float("inf"), "inf"),
        (0.0, "0"),
    ],
)
def test_numbers(terminal: Terminal, value: object, expected: str):
    with terminal.stage("s") as stage:
        stage.update(x=value)
        assert stage.describe() == f"x={expected}"


def test_durations(terminal: Terminal, stream: io.StringIO, clock: Clock):
    for seconds, expected in [
        (0.04, "0.0 s"),
        (9.9, "9.9 s"),
        (12.4, "12 s"),
        (59.7, "1:00"),
        (62, "1:02"),
        (3723, "1:02:03"),
    ]:
        with terminal.stage("s"):
            clock.now += seconds
        assert lines(stream)[-1] == f"s: done in {expected}"


def test_summary(terminal: Terminal, stream: io.StringIO):
    terminal.summary(
        "Run quickstart-1 finished.",
        [
            ("stage", "result", "count"),
            ("prepare", "reused", 12),
            ("train", "2 attempts", 123456),
            ("模型", "registered", 1.5),
            ("next", "headrace ui"),
        ],
    )
    assert stream.getvalue() == (
        "\n"
        "Run quickstart-1 finished.\n"
        "  stage    result       count\n"
        "  prepare  reused            12\n"
        "  train    2 attempts   123,456\n"
        "  模型     registered       1.5\n"
        "  next     headrace ui\n"
    )


def test_an_empty_summary(terminal: Terminal, stream: io.StringIO):
    terminal.summary("Nothing to do.", [])
    assert lines(stream) == ["", "Nothing to do."]


def test_json_leaves_the_summary_to_the_document(capsys: pytest.CaptureFixture[str]):
    terminal = Terminal(json=True)
    with terminal.stage("prepare"):
        terminal.note("a note")
    terminal.summary("Done", [("a", "b")])
    terminal.emit_json({"run": "1", "loss": 2.5, "name": "ä"})
    out, err = capsys.readouterr()
    assert json.loads(out) == {"run": "1", "loss": 2.5, "name": "ä"}
    assert err.splitlines()[:2] == ["prepare: started", "a note"]
    assert len(err.splitlines()) == 3
    with pytest.raises(ValueError):
        emit_json({"loss": float("nan")})


def test_markup_and_long_lines_are_written_as_they_are(terminal: Terminal, stream: io.StringIO):
    text = "[bold]not markup[/bold] :smile: " + "x" * 500
    terminal.note(text)
    terminal.error("It failed.")
    assert lines(stream) == [text, "Error: It failed."]


def test_on_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")  # where the tests run it may be "dumb", which is a terminal for lines
    screen = Screen()
    terminal = Terminal(stream=screen)
    assert not terminal.plain
    with terminal.stage("prepare", total=10, unit="documents") as first, terminal.stage("train", unit="step") as second:
        first.update(5)
        second.update(7, loss=2.31)
        terminal.note("[a note] " + "x" * 200)
        terminal._progress.refresh()  # type: ignore[union-attr]
    terminal.summary("Done", [("a", 1)])
    shown = screen.getvalue()
    assert "documents 5/10  50%" in shown
    assert "step 7  loss=2.31" in shown
    assert "[a note] " + "x" * 200 in shown
    assert "train: done in" in shown
    assert shown.index("train: done in") < shown.index("prepare: done in") < shown.index("Done")
    assert terminal._progress is None


def test_bars_are_for_terminals_only(monkeypatch: pytest.MonkeyPatch):
    assert Terminal(stream=io.StringIO()).plain
    assert not Terminal(plain=False, stream=io.StringIO()).plain
    monkeypatch.setenv("TERM", "dumb")
    assert Terminal(stream=Screen()).plain


def test_what_is_waited_for_is_said_on_a_terminal_only(terminal: Terminal, stream: io.StringIO, monkeypatch):
    with terminal.waiting("Asking ..."):
        pass
    assert stream.getvalue() == ""
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen()
    with Terminal(stream=screen).waiting("Asking http://me:secret@host ..."):
        pass
    assert "Asking http://***@host ..." in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K"), "the line is erased"


def test_a_reader_that_went_away():
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    with Terminal(plain=True, stream=Closed()).stage("train") as stage:
        stage.note("nobody reads this")


def test_threads(stream: io.StringIO):
    terminal = Terminal(plain=True, stream=stream)

    def work(number: int) -> None:
        with terminal.stage(f"stage-{number}", total=100) as stage:
            for done in range(100):
                stage.update(done, x=done)
            stage.note("note")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(lines(stream)) == 12
    assert sum(line.endswith(": note") for line in lines(stream)) == 4


SECRETS = [
    ("postgresql://user:hunter22@db/mlflow", "hunter22", "postgresql://***@db/mlflow"),
    ("https://ghp_0123456789@host/x", "ghp_0123456789", "https://***@host/x"),
    ("aws_secret_access_key=abcDEF123/+", "abcDEF123", "aws_secret_access_key=***"),
    ('{"password": "hunter22", "user": "me"}', "hunter22", '{"password": "***", "user": "me"}'),
    ("api_key: hunter22, next", "hunter22", "api_key: ***, next"),
]


@pytest.mark.parametrize(("text", "secret", "expected"), SECRETS)
def test_secrets_are_masked(
    terminal: Terminal, stream: io.StringIO, capsys: pytest.CaptureFixture[str], text: str, secret: str, expected: str
):
    assert redact(text) == expected
    logger = logging.getLogger("test-terminal")
    handler = terminal.log_handler()
    logger.addHandler(handler)
    try:
        with terminal.stage("stage") as stage:
            stage.update(text=text)
            stage.note(text)
            stage.conclude(text)
        terminal.note(text)
        terminal.error(text)
        terminal.summary(text, [(text, text)])
        logger.warning("about %s", text)
        emit_json({"a": [text], "b": (text,)})
    finally:
        logger.removeHandler(handler)
    out, err = capsys.readouterr()
    assert secret not in stream.getvalue() + out + err
    assert json.loads(out) == {"a": [expected], "b": [expected]}
    assert f"about {expected}" in stream.getvalue()


def test_the_values_of_secret_variables_are_masked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for name in ("AWS_SECRET_ACCESS_KEY", "HF_TOKEN", "PREFECT_API_AUTH_STRING", "MLFLOW_TRACKING_PASSWORD"):
        monkeypatch.setenv(name, f"canary-{name.lower()}")
    monkeypatch.setenv("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/identity")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "certainly")
    monkeypatch.setenv("SHORT_TOKEN", "short")
    assert redact("x canary-hf_token y canary-aws_secret_access_key") == "x *** y ***"
    assert redact("canary-prefect_api_auth_string canary-mlflow_tracking_password") == "*** ***"
    for harmless in (
        "/var/run/identity",
        "certainly",
        "short",
        "models:/name@champion",
        "tokens=12",
        "eos_token: <eos>",
    ):
        assert redact(harmless) == harmless
    emit_json({"HF_TOKEN": "whatever", "password": "x", "eos_token": "<eos>", "n": {"api_key": "y", "token": 1}})
    assert json.loads(capsys.readouterr().out) == {
        "HF_TOKEN": "***",
        "password": "***",
        "eos_token": "<eos>",
        "n": {"api_key": "***", "token": 1},
    }


def test_a_record_that_cannot_be_formatted(terminal: Terminal, stream: io.StringIO, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(logging, "raiseExceptions", False)
    handler = terminal.log_handler()
    handler.emit(logging.LogRecord("x", logging.INFO, "f", 1, "%d", ("text",), None))
    assert stream.getvalue() == ""
