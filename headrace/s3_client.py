"""The S3 client library, within bounds of time: s3fs on its event loop, and botocore on the calling thread.

The one module that loads fsspec and s3fs; `headrace.storage` is the way to it. Both are imported when they are first
needed: they take half a second.
"""

import os
from typing import Any

from headrace import s3_errors

CONNECT_SECONDS = 5
READ_SECONDS = 30
TOTAL_ATTEMPTS = 3
"""Tries of one request inside the S3 client, with its back-off."""

CLIENT_ROUNDS = 2
"""How often s3fs asks the client again after a lost connection or "slow down"; its default, 5, adds up to minutes."""

DEADLINE_SECONDS = 120.0
SLOWEST_BYTES_PER_SECOND = 1 << 20
"""One operation ends after DEADLINE_SECONDS plus its size at this speed: a server that trickles must not hold us."""


class S3Client:
    """The S3 client library: one filesystem per process, every call within a deadline."""

    def __init__(self) -> None:
        self._filesystems: dict[int, Any] = {}
        self._direct: dict[int, Any] = {}

    def run(self, method: str, *arguments: Any, size: int, **options: Any) -> Any:
        """Run a coroutine of the filesystem on its own thread; `size` in bytes extends the deadline.

        Raises s3_errors.RequestFailed for every failure of the library, the connection or the server.
        """
        import aiohttp
        from botocore.exceptions import BotoCoreError  # type: ignore[import-untyped] # ships no types
        from fsspec.asyn import sync

        filesystem = self._filesystem()
        deadline = DEADLINE_SECONDS + size / SLOWEST_BYTES_PER_SECOND
        try:
            return sync(filesystem.loop, getattr(filesystem, method), *arguments, timeout=deadline, **options)
        except (OSError, EOFError, BotoCoreError, aiohttp.ClientError) as error:
            self._look_for_new_credentials(error)
            raise s3_errors.RequestFailed(error) from error

    def run_here(self, operation: str, **arguments: Any) -> Any:
        """Run an S3 operation on the calling thread; each of its tries has its time, but there is no deadline over all.

        For large bodies: the one event loop of `run` signs and copies them one after the other, threads do not.
        """
        from botocore.exceptions import BotoCoreError, ClientError
        from s3fs.errors import translate_boto_error

        try:
            return getattr(self._direct_client(), operation)(**arguments)
        except ClientError as error:
            translated = translate_boto_error(error)
            self._look_for_new_credentials(translated)
            raise s3_errors.RequestFailed(translated) from error
        except (BotoCoreError, OSError) as error:
            raise s3_errors.RequestFailed(error) from error

    def _look_for_new_credentials(self, error: BaseException) -> None:
        """After an answer that they have expired: whoever renews them (a file, a process), the next try finds them.

        A client keeps those that it was made with, unless their source says when they expire.
        """
        if s3_errors.is_expired(error):
            self._direct.pop(os.getpid(), None)
            self._filesystems.pop(os.getpid(), None)

    def _direct_client(self) -> Any:
        pid = os.getpid()
        client = self._direct.get(pid)
        if client is None:
            import botocore.session  # type: ignore[import-untyped] # ships no types
            from botocore.config import Config  # type: ignore[import-untyped] # ships no types

            options = _client_options()
            options["retries"]["total_max_attempts"] *= CLIENT_ROUNDS
            client = botocore.session.get_session().create_client("s3", config=Config(**options))
            self._direct[pid] = client
        return client

    def _filesystem(self) -> Any:
        """Return this process's filesystem: one that was inherited over a fork must not be used."""
        pid = os.getpid()
        filesystem = self._filesystems.get(pid)
        if filesystem is None:
            import s3fs  # takes half a second, and a warm parent of forked ranks must not hold it

            filesystem = s3fs.S3FileSystem(
                use_listings_cache=False, skip_instance_cache=True, config_kwargs=_client_options()
            )
            filesystem.retries = CLIENT_ROUNDS
            filesystem = self._filesystems.setdefault(pid, filesystem)
        return filesystem


def _client_options() -> dict[str, Any]:
    s3_errors.check_endpoint()
    options: dict[str, Any] = {
        "connect_timeout": CONNECT_SECONDS,
        "read_timeout": READ_SECONDS,
        "retries": {"total_max_attempts": TOTAL_ATTEMPTS, "mode": "standard"},
    }
    if s3_errors.custom_endpoint():
        # Most servers other than AWS neither store nor check the newer checksums, and some fail on them.
        if "AWS_REQUEST_CHECKSUM_CALCULATION" not in os.environ:
            options["request_checksum_calculation"] = "when_required"
        if "AWS_RESPONSE_CHECKSUM_VALIDATION" not in os.environ:
            options["response_checksum_validation"] = "when_required"
    return options
