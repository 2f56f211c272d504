"""What every kind of storage promises, on a real server: the tests of tests/headrace, with this folder's `storage`."""

from tests.headrace.test_storage_contract import *  # noqa: F403 - the tests themselves
