"""What a failed S3 request means, in one sentence. Knows the codes of servers, not the client library."""

import os
import re

from headrace.errors import ConfigError, HeadraceError, NotFound, StorageFull, StorageUnavailable

_EXISTS = {"PreconditionFailed", "412"}
_BEYOND_END = {"InvalidRange", "416"}
_CONFLICT = {"ConditionalRequestConflict", "OperationAborted", "409"}
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "RequestTimeTooSkewed"}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "ProfileNotFound"}
_NO_ROOM = {"QuotaExceeded", "InsufficientCapacity", "EntityTooLarge", "XMinioStorageFull"}
_WRONG_SETTINGS = {
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "InvalidBucketName",
    "InvalidEndpoint",
    "InvalidToken",
    "NotImplemented",
    "ParamValidationError",
    "PermanentRedirect",
    "301",
    "501",
}


class RequestFailed(Exception):
    """Carries the error of the client library to where the request is known."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class RangeBeyondEnd(HeadraceError):
    """The object ends before the first byte that was asked for; handled where it is raised."""


class ObjectExists(HeadraceError):
    """A create-only write found an object; handled where it is raised."""


class WriteConflict(StorageUnavailable):
    """A write met another one of the same key that has not ended."""


def code(error: BaseException | None) -> str | None:
    """Return the S3 error code in the chain of causes: the client turns many codes into one kind of OSError."""
    while error is not None:
        response = getattr(error, "response", None)
        if isinstance(response, dict):
            found = response.get("Error", {}).get("Code")
            return None if found is None else str(found)
        error = error.__cause__
    return None


def custom_endpoint() -> str | None:
    """Return the endpoint that the environment names instead of AWS."""
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")


def check_endpoint() -> None:
    """Raise ConfigError when the endpoint in the environment is no URL: the client's own message names no variable."""
    endpoint = custom_endpoint()
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(
            f"The S3 endpoint {server_name()!r} (AWS_ENDPOINT_URL) must begin with http:// or https://. Correct it, or "
            "unset it to use AWS."
        )


def is_expired(error: BaseException) -> bool:
    """Whether the server says that the credentials were good once."""
    return code(error) in _EXPIRED


def server_name() -> str:
    """Return the server as messages name it: without the credentials that an endpoint may carry."""
    return re.sub(r"(?<=://)[^/@]*@", "", custom_endpoint() or "the S3 service")


def explain(error: Exception, doing: str, url: str, size: int = 0) -> HeadraceError:
    """Return the error to raise for a failed request on `url`; `doing` completes "Cannot ...", `size` is in bytes."""
    reason = code(error) or type(error).__name__
    what = f"Cannot {doing} {url}"
    server = server_name()
    if reason in _EXISTS or isinstance(error, FileExistsError):
        return ObjectExists(f"{what}: it exists.")
    if reason in _BEYOND_END:
        return RangeBeyondEnd(f"{what}: it is shorter.")
    if reason in _CONFLICT:
        return WriteConflict(f"{what}: another writer is busy with the same key. Try again.")
    if reason == "NoSuchBucket":
        return ConfigError(f"{what}: there is no such bucket at {server}. Create it or correct the URL.")
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{url} does not exist.")
    if reason in _EXPIRED:
        return StorageUnavailable(f"{what}: {server} says {reason}. Renew the credentials, or correct the clock here.")
    if isinstance(error, PermissionError) or reason in _NO_CREDENTIALS:
        return ConfigError(
            f"{what}: {server} did not accept the credentials ({reason}). Set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY (or AWS_PROFILE) of a user who may read and write there."
        )
    if reason in _WRONG_SETTINGS:
        return ConfigError(
            f"{what}: {server} does not accept the request ({reason}). Check the bucket's region (AWS_REGION) and the "
            "endpoint (AWS_ENDPOINT_URL)."
        )
    if reason in _NO_ROOM:
        return StorageFull(f"{what} ({size:,} bytes): {server} has no room ({reason}). Free space or raise the quota.")
    return StorageUnavailable(f"{what}: {server} did not answer as it should ({reason}). Check that it is reachable.")
