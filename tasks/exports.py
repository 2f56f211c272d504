"""Where exports lie: names on the store, read without prefect."""

from headrace.commit import Commit, read_commit
from headrace.digest import digest_json
from headrace.errors import DamagedData
from headrace.storage import Storage
from training.export.spec import COMMIT_KIND


def export_key(checkpoint_digest: str, dtype: str) -> str:
    """Digest of what is exported and how."""
    return digest_json({"checkpoint": checkpoint_digest, "dtype": dtype, "layout": "hugging-face"})


def pointer_key(run_prefix: str, key: str) -> str:
    """Storage key of the document that says which logged model an export is."""
    return f"{run_prefix}/exports/{key}.json"


def exports_of(storage: Storage, run_prefix: str) -> list[tuple[str, Commit]]:
    """Folder and commit of the committed exports of a run, newest step last."""
    found = []
    for name in storage.children(f"{run_prefix}/exports"):
        prefix = str(storage.read_json(f"{run_prefix}/exports/{name}")["prefix"])
        commit = read_commit(storage, prefix, kind=COMMIT_KIND)
        if commit is not None:
            found.append((prefix, commit))
    return sorted(found, key=lambda entry: (int(entry[1].body["step"]), entry[0]))


def key_below(storage: Storage, location: str) -> str:
    """The storage key of a place that MLflow names; raises DamagedData when it lies outside the store."""
    local = storage.local_path()
    root = str(local) if local else storage.root_url
    place = location.removeprefix("file://") if local else location
    if not place.startswith(f"{root}/"):
        raise DamagedData(
            f"MLflow put the logged model at {location}, which is not below the store {root}. Was the experiment made "
            "for another store?"
        )
    return place.removeprefix(f"{root}/").strip("/")
