import platform
from pathlib import Path

import pytest

from headrace import environment
from headrace.errors import ConfigError


def test_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for unset in (None, ""):
        if unset is None:
            monkeypatch.delenv("HEADRACE_HOME", raising=False)
        else:
            monkeypatch.setenv("HEADRACE_HOME", unset)
        assert environment.home() == tmp_path / ".headrace"
    monkeypatch.setenv("HEADRACE_HOME", "state")
    assert environment.home() == tmp_path / "state"
    monkeypatch.setenv("HEADRACE_HOME", "~/state")
    assert environment.home() == Path.home() / "state"
    assert not (tmp_path / "state").exists()
    monkeypatch.setenv("HEADRACE_HOME", "s3://bucket/state")
    with pytest.raises(ConfigError, match=r"HEADRACE_HOME is 's3://bucket/state'.*storage\.root"):
        environment.home()


def test_paths(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HEADRACE_HOME", "/state")
    assert environment.store_path() == Path("/state/store")
    assert environment.mlflow_database() == Path("/state/mlflow.db")
    assert environment.prefect_home() == Path("/state/prefect")
    assert environment.work_path() == Path("/state/work")


def test_the_code_digest_sees_every_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "package"
    (package / "inner").mkdir(parents=True)
    (package / "inner" / "module.py").write_text("x = 1\n")
    monkeypatch.setattr(environment, "_package_folders", lambda name: [package] if name == "training" else [])
    digests = []
    for path, text in [
        ("inner/module.py", "x = 1\n"),
        ("inner/module.py", "x = 2\n"),
        ("module.py", ""),
        ("note.txt", "x"),
    ]:
        (package / path).write_text(text)
        environment.code_digest.cache_clear()
        digests.append(environment.code_digest())
    assert digests[2] == digests[3]  # other files are no code
    assert len(set(digests)) == 3
    environment.code_digest.cache_clear()


def test_the_code_digest_of_this_installation():
    environment.code_digest.cache_clear()
    digest = environment.code_digest()
    assert len(digest) == 64
    assert digest == environment.code_digest()
    folders = [folder for package in environment.PACKAGES for folder in environment._package_folders(package)]
    assert any((folder / "storage.py").exists() for folder in folders)


def test_versions():
    found = environment.versions()
    assert found["python"] == platform.python_version()
    assert {"torch", "mlflow", "prefect", "numpy"} <= set(found)
    assert all(value[0].isdigit() for value in found.values())


def test_a_missing_distribution_is_left_out(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(environment, "_REPORTED_DISTRIBUTIONS", ("numpy", "no-such-distribution"))
    assert set(environment.versions()) == {"python", "numpy"}
