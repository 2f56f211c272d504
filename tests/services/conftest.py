"""Real services for tests: once for all of them, and ways to disturb them."""

import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from headrace.storage import Storage
from tests.chaos.conftest import corpus, make_lab, tokenizer_file  # noqa: F401 - fixtures
from tests.chaos.harness import Lab
from tests.headrace.s3_proxy import Proxy, run_proxy
from tests.services.rgw import Rgw, missing_programs, run_rgw

if TYPE_CHECKING:
    from tests.services.prefect_stack import Stack


@pytest.fixture(scope="session")
def rgw(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rgw]:
    """One server for the whole session."""
    if missing := missing_programs():
        message = f"not run without {', '.join(missing)}: as root, deployments/rgw/rgw.sh install"
        assert not os.environ.get("CI"), message
        pytest.skip(message)
    with run_rgw(tmp_path_factory.mktemp("rgw")) as running:
        yield running


@pytest.fixture
def s3_root(rgw: Rgw, monkeypatch: pytest.MonkeyPatch) -> str:
    """An empty prefix in the bucket, with the environment that leads there."""
    use(monkeypatch, rgw.environment())
    return f"s3://{rgw.bucket}/{secrets.token_hex(8)}"


@pytest.fixture
def storage(s3_root: str) -> Storage:
    """An empty storage on the server."""
    return Storage.open(s3_root)


@pytest.fixture
def proxy(rgw: Rgw, monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """A failing way to the server, and the environment that leads there."""
    with run_proxy(rgw.endpoint.removeprefix("http://")) as running:
        use(monkeypatch, rgw.environment(running.endpoint))
        yield running


@pytest.fixture
def proxied(rgw: Rgw, proxy: Proxy) -> Storage:
    """An empty storage behind the proxy."""
    return Storage.open(f"s3://{rgw.bucket}/{secrets.token_hex(8)}")


@pytest.fixture
def new_lab(s3_root: str, tmp_path: Path, corpus: Path, tokenizer_file: Path) -> Callable[[str], Lab]:  # noqa: F811
    """Makes state folders whose store lies on the server."""

    def make(name: str) -> Lab:
        folder = tmp_path / name
        folder.mkdir()
        lab = make_lab(folder, corpus, tokenizer_file)
        lab.config["storage"] = {"root": f"{s3_root}/{name}"}
        return lab

    return make


@pytest.fixture
def lab(new_lab: Callable[[str], Lab]) -> Lab:
    return new_lab("lab")


def use(monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> None:
    """Have this environment, and no other variable of AWS."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)


# --------------------------------------------------------------------------------- a Prefect server with a worker


@pytest.fixture(scope="session")
def _prefect_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator["Stack"]:
    from tests.services.prefect_stack import running_stack

    with running_stack(tmp_path_factory.mktemp("prefect")) as stack:
        yield stack


@pytest.fixture
def stack(_prefect_stack: "Stack") -> Iterator["Stack"]:
    """A Prefect server and a worker; what a test killed is there again for the next one."""
    yield _prefect_stack
    _prefect_stack.restore()


@pytest.fixture
def local_lab(tmp_path: Path, corpus: Path, tokenizer_file: Path) -> Lab:  # noqa: F811
    """A state folder with a store of its own, for the flow runs of one deployment."""
    return make_lab(tmp_path, corpus, tokenizer_file)
