"""Claims of attempts on a real S3 server: the test of tests/training, with this folder's bucket."""

from tests.training.launch.test_claims import (
    test_of_eight_processes_one_claims_each_number_on_s3,  # noqa: F401 - the test itself
)
