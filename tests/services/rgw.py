"""A Ceph RGW server of the tests' own, whose parts can be killed and started again."""

import contextlib
import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from tests.headrace.s3_proxy import free_port
from tests.project.documented_commands import ROOT

SCRIPT = ROOT / "deployments/rgw/rgw.sh"
PROGRAMS = ("radosgw", "radosgw-admin", "ceph-mon", "ceph-osd", "ceph")
START_SECONDS = 300
Part = Literal["mon", "osd", "radosgw"]


@dataclass(frozen=True)
class Rgw:
    """One running server with one bucket."""

    folder: Path
    endpoint: str
    access_key: str
    secret_key: str = field(repr=False)
    bucket: str
    pids: Mapping[str, int]

    @property
    def port(self) -> int:
        return int(self.endpoint.rsplit(":", 1)[1])

    def environment(self, endpoint: str | None = None) -> dict[str, str]:
        """What a process needs in its environment, and all that it needs."""
        return {
            "AWS_ENDPOINT_URL": endpoint or self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": "us-east-1",
            # Nothing else on this machine may help or disturb.
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def kill(self, part: Part) -> None:
        """SIGKILL; returns when the process is gone."""
        run_script("kill", str(self.folder), part)

    def restart(self, part: Part) -> None:
        """Start a killed part; returns when it serves."""
        run_script("restart", str(self.folder), part)

    @contextlib.contextmanager
    def without(self, part: Part) -> Iterator[None]:
        """The server without one of its parts during the block."""
        self.kill(part)
        try:
            yield
        finally:
            self.restart(part)

    def client(self) -> Any:
        """A plain S3 client, to look at the server with other eyes than ours."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name="us-east-1",
        )


def missing_programs() -> list[str]:
    """Programs of Ceph that are not on this machine."""
    return [name for name in PROGRAMS if shutil.which(name) is None]


@contextlib.contextmanager
def run_rgw(folder: Path) -> Iterator[Rgw]:
    """Run a server with its state in `folder`; nothing of it is left afterwards, also when this process is killed."""
    try:
        described = run_script("start", str(folder), str(free_port()), str(os.getpid()))
        yield Rgw(folder=folder, **json.loads(described))
    finally:
        run_script("stop", str(folder))
        shutil.rmtree(folder, ignore_errors=True)


def run_script(*arguments: str) -> str:
    done = subprocess.run(
        [str(SCRIPT), *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=START_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"rgw.sh {' '.join(arguments)} failed:\n{done.stderr[-4000:]}"
    return done.stdout
