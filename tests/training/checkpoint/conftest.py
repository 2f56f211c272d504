"""The S3 server of the storage tests, for checkpoints on it."""

from tests.headrace.conftest import s3_root, s3_server  # noqa: F401 - fixtures
