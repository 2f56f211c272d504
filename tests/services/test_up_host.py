"""`headrace up` on an address that other machines reach: nobody without the login, and all that it does with it."""

import ipaddress
import json
import socket
import subprocess
import urllib.error
import urllib.request

import psutil
import pytest

from tests.chaos.harness import Lab
from tests.mlflow_database import NOLOAD
from tests.services.stack import started_up

pytestmark = pytest.mark.filterwarnings(NOLOAD)

LOGIN = "ada:canary-in-a-cage"


def own_address() -> str:
    """An IPv4 address of this machine that is not loopback."""
    found = [a.address for each in psutil.net_if_addrs().values() for a in each if a.family == socket.AF_INET]
    others = [address for address in found if not ipaddress.ip_address(address).is_loopback]
    if not others:
        pytest.skip("not run on a machine without a network")
    return others[0]


def status_of(url: str) -> int:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("login", [None, "admin:password1234"])
def test_without_a_real_login_nothing_is_started(local_lab: Lab, login: str | None) -> None:
    if login:
        local_lab.environment["PREFECT_SERVER_API_AUTH_STRING"] = login
    refused = local_lab.command("up", "--host", own_address(), "--port", "0", "--mlflow-port", "0")
    assert refused.returncode == 2
    assert "PREFECT_SERVER_API_AUTH_STRING" in refused.stderr
    assert local_lab.processes() == []


@pytest.mark.slow
def test_with_a_login_everything_works_and_nobody_else_gets_in(local_lab: Lab) -> None:
    host = own_address()
    local_lab.environment["PREFECT_SERVER_API_AUTH_STRING"] = LOGIN
    with started_up(local_lab, "--host", host) as up:
        assert up.prefect_api.startswith(f"http://{host}:")
        assert status_of(f"{up.prefect_api}/admin/version") == 401
        assert up.status()["live"]

        asked = ["trigger", "--config", str(local_lab.write_config()), "--wait", "--json"]
        del local_lab.environment["PREFECT_SERVER_API_AUTH_STRING"]
        refused = local_lab.command(*asked)
        assert refused.returncode == 2
        assert "PREFECT_API_AUTH_STRING" in json.loads(refused.stdout)["error"]["message"]
        local_lab.environment["PREFECT_API_AUTH_STRING"] = LOGIN
        done = local_lab.command(*asked)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["state"] == "Completed"
        del local_lab.environment["PREFECT_API_AUTH_STRING"]
        local_lab.environment["PREFECT_SERVER_API_AUTH_STRING"] = LOGIN

        with pytest.raises(OSError, match="refused"):
            socket.create_connection((host, int(up.mlflow.rsplit(":", 1)[1])), timeout=5)
    said = subprocess.run(
        ["grep", "-rl", LOGIN.split(":")[1], str(local_lab.home), str(local_lab.folder)], capture_output=True, text=True
    )
    assert said.stdout == "", "the password is in no log and in no database"
