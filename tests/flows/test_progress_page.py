"""The progress artifact of a flow run, on a real Prefect server."""

import itertools
import time

import httpx
import pytest
from prefect import flow
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.runtime import flow_run

from tasks.progress_page import ProgressPage


def artifacts() -> list:
    with get_client(sync_client=True) as client:
        return [artifact for artifact in client.read_artifacts() if artifact.key == "training"]


@pytest.mark.usefixtures("prefect_server")
def test_one_artifact_is_written_again_and_again_and_says_the_last_word(monkeypatch):
    updates = []
    update = SyncPrefectClient.update_artifact
    monkeypatch.setattr(
        SyncPrefectClient, "update_artifact", lambda *a, **k: (updates.append(a[2].data), update(*a, **k))
    )

    @flow
    def watched():
        with ProgressPage(1_000_000, interval_seconds=0.02) as page:
            # Something new each time, until one was written over another: a slow server only delays that.
            for percent in itertools.count(1):
                page.show(percent, f"{percent} of 1,000,000")
                if updates:
                    break
                time.sleep(0.05)
            page.show(1_000_000, "all of it")
        return str(flow_run.get_id())

    run_id = watched()
    shown = max(artifacts(), key=lambda artifact: artifact.updated)
    assert updates == sorted(updates)
    assert (shown.type, float(shown.data), shown.description) == ("progress", 100.0, "all of it")
    assert str(shown.flow_run_id) == run_id


@pytest.mark.usefixtures("prefect_server")
def test_a_server_that_is_away_costs_only_the_picture(monkeypatch):
    def refuse(*_, **__):
        raise httpx.ConnectError("away")

    monkeypatch.setattr(SyncPrefectClient, "create_artifact", refuse)

    @flow
    def watched():
        with ProgressPage(8, interval_seconds=0.01) as page:
            page.show(8, "step 8 of 8")
        return "went on"

    before = len(artifacts())
    assert watched() == "went on"
    assert len(artifacts()) == before


def test_without_a_flow_run_nothing_is_asked():
    with ProgressPage(8, interval_seconds=0.01) as page:
        page.show(8, "step 8 of 8")
