"""Every failure that a user can meet, and what it means for the run.

    HeadraceError            1  something went wrong; trying again changes nothing
    ├── ConfigError          2  the configuration, the usage or the rights of this user are wrong
    ├── InputError           2  input data was refused
    ├── Terminal             1  a policy is exhausted, or a person has to act first
    │   └── StorageFull      1  the disk, the quota or the bucket has no room
    ├── Retryable            1  another attempt may succeed
    │   ├── StorageUnavailable  the store did not answer, or answered that it is busy
    │   ├── AttemptFailed       the process group of one attempt ended without finishing
    │   └── TrackingUnavailable the tracking server did not answer
    ├── DamagedData          1  a size or a digest does not match, or a document cannot be read
    │   └── CommitConflict   1  another, different commit lies where this one should go
    ├── NotFound             1  an object that should exist does not
    ├── Preempted            3  asked to make room; the same command continues
    └── Cancelled            3  stopped by the user; the same command continues

The number is the exit code of a command that ends with the error. Every message is complete English: what happened,
where, what was found, and what to do about it. Messages never contain credentials.
"""

from typing import ClassVar


class HeadraceError(Exception):
    """Base of all errors that are shown to the user as one sentence, without a traceback."""

    exit_code: ClassVar[int] = 1
    """Exit code of a command that ends with this error."""

    retryable: ClassVar[bool] = False
    """Whether another attempt with nothing changed may succeed."""


class ConfigError(HeadraceError):
    """The configuration, the command line, or the rights of this user do not allow what was asked."""

    exit_code = 2


class InputError(HeadraceError):
    """Input data was refused: it is missing, unreadable, empty, or breaks a rule."""

    exit_code = 2


class Terminal(HeadraceError):
    """The end of the run: the retry policy is exhausted, or a person has to act before it can go on."""


class StorageFull(Terminal):
    """The disk, the quota or the bucket has no room for what was written; nothing half-written stays visible."""


class Retryable(HeadraceError):
    """Another attempt may succeed without any change."""

    retryable = True


class StorageUnavailable(Retryable):
    """The store did not answer within its bounds, or answered that it cannot serve now."""


class AttemptFailed(Retryable):
    """The process group of one attempt ended without finishing its work."""


class TrackingUnavailable(Retryable):
    """The tracking server did not answer."""


class DamagedData(HeadraceError):
    """Stored data is not what its commit says; the message names the file."""


class CommitConflict(DamagedData):
    """A different commit object lies where an identical one, or none, was expected."""


class NotFound(HeadraceError):
    """An object that was asked for does not exist on the store."""


class Preempted(HeadraceError):
    """The run was asked to make room; the same command continues it."""

    exit_code = 3


class Cancelled(HeadraceError):
    """The user stopped the run; the same command continues it."""

    exit_code = 3
