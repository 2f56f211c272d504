"""Uploads as a save makes them, through the niced upload process, against plain boto3 on the same files.

    python benchmarks/bench_storage.py [--megabytes 256] [--files 2] [--rounds 3]

Needs the packages that `deployments/rgw/rgw.sh install` installs: the S3 server is a Ceph RGW of this run, on this
machine. Both ways use parts of 32 MiB, four at a time, and take turns on the same connection-warm server; the ratio is
the median over the rounds. boto3 with eight parts at a time is shown as well.
"""

import argparse
import contextlib
import json
import os
import secrets
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
from boto3.s3.transfer import TransferConfig

from headrace.digest import sha256_file
from headrace.s3_parts import PART_BYTES, PART_CONCURRENCY
from headrace.s3_uploader import Uploader
from headrace.storage import Storage

SCRIPT = Path(__file__).resolve().parents[1] / "deployments/rgw/rgw.sh"


@contextlib.contextmanager
def server(folder: Path) -> Iterator[dict[str, Any]]:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    started = subprocess.run(
        [str(SCRIPT), "start", str(folder), str(port), str(os.getpid())], check=True, stdout=subprocess.PIPE, text=True
    )
    try:
        yield json.loads(started.stdout)
    finally:
        subprocess.run([str(SCRIPT), "stop", str(folder)], check=True)


def use(described: dict[str, Any]) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        del os.environ[name]
    os.environ |= {
        "AWS_ENDPOINT_URL": described["endpoint"],
        "AWS_ACCESS_KEY_ID": described["access_key"],
        "AWS_SECRET_ACCESS_KEY": described["secret_key"],
        "AWS_REGION": "us-east-1",
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def make_files(folder: Path, number: int, size: int) -> list[Path]:
    paths = [folder / f"rank-{index:04d}.bin" for index in range(number)]
    for path in paths:
        with path.open("wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
    return paths


def plain(client: Any, bucket: str, at_once: int) -> Callable[[Path, str], None]:
    config = TransferConfig(multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, max_concurrency=at_once)
    return lambda path, key: client.upload_file(str(path), bucket, key, Config=config)


def seconds_of(upload: Callable[[Path, str], None], paths: list[Path], prefix: str) -> float:
    started = time.perf_counter()
    for path in paths:
        upload(path, f"{prefix}{secrets.token_hex(4)}/{path.name}")
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=256, help="size of one file")
    parser.add_argument("--files", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    if shutil.which("radosgw") is None:
        print(f"Not run without Ceph RGW: as root, {SCRIPT} install", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory(prefix="headrace-bench-") as name, server(Path(name) / "rgw") as described:
        use(described)
        measure(Path(name), described["bucket"], arguments)


def measure(folder: Path, bucket: str, arguments: argparse.Namespace) -> None:
    paths = make_files(folder, arguments.files, arguments.megabytes << 20)
    total = sum(path.stat().st_size for path in paths)
    storage = Storage.open(f"s3://{bucket}/ours")
    uploader = Uploader(storage.root_url)
    uploader.start()
    client = boto3.client("s3")
    ways: dict[str, Callable[[Path, str], None]] = {
        "ours": lambda path, key: uploader.upload(path, key, until=time.monotonic() + 600),
        f"boto3, {PART_CONCURRENCY} at once": plain(client, bucket, PART_CONCURRENCY),
        "boto3, 8 at once": plain(client, bucket, 8),
    }
    for way, upload in ways.items():
        seconds_of(upload, paths[:1], f"warm-{way[:5]}/")
    rates: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(arguments.rounds):
        for way in list(ways)[number % len(ways) :] + list(ways)[: number % len(ways)]:
            rates[way].append(total / seconds_of(ways[way], paths, f"{number}/") / 1e6)
        storage.delete_prefix(str(number))
    check(storage, paths[0], uploader)
    uploader.close()
    print(f"{arguments.files} files of {arguments.megabytes} MiB, {arguments.rounds} rounds, {os.cpu_count()} cores")
    print(f"{'way':20} {'MB/s':>7}  ours / it")
    for way, found in rates.items():
        ratio = statistics.median(ours / theirs for ours, theirs in zip(rates["ours"], found, strict=True))
        print(f"{way:20} {statistics.median(found):7.0f}  {ratio:.2f}")


def check(storage: Storage, path: Path, uploader: Uploader) -> None:
    uploader.upload(path, "check", until=time.monotonic() + 600)
    assert storage.sha256("check") == sha256_file(path)


if __name__ == "__main__":
    main()
