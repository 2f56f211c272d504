"""A pytest plugin for CI: a skipped or expected-to-fail test counts as a failure, so nothing is left out silently.

Loaded with `-p tests.ci_plugin` by the Makefile when CI is set; see `.ci/run`.
"""

from collections.abc import Generator
from typing import TypeVar

import pytest

ReportT = TypeVar("ReportT", pytest.TestReport, pytest.CollectReport)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    return _as_failure(report)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    return _as_failure(report)


def _as_failure(report: ReportT) -> ReportT:
    if report.outcome == "skipped":
        report.outcome = "failed"
        report.longrepr = f"skipped, and a skip is a failure in CI: {_reason(report)}"
        vars(report).pop("wasxfail", None)  # pytest does not count a failure that was expected
    return report


def _reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    if hasattr(report, "wasxfail"):
        return str(report.wasxfail).removeprefix("reason: ")
    found = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return found.removeprefix("Skipped: ")
