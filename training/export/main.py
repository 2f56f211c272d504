"""A committed checkpoint becomes a Hugging Face folder.

    python -m training.export.main spec.json

The last line on standard output is one JSON object: the export, or `error` and `retryable`. Running it again for the
same checkpoint and target finds the export done, and changes nothing.
"""

import logging
import tempfile
from pathlib import Path
from typing import Any

import tokenizers
import torch
from safetensors.torch import save_file

from data_prep.dataset import Dataset, open_dataset
from headrace.commit import Commit, FileEntry, check_files, read_commit, write_commit
from headrace.errors import CommitConflict, ConfigError, DamagedData
from headrace.faults import fault_point
from headrace.storage import Storage, json_document
from training.checkpoint.catalog import Checkpoint, open_checkpoint, require_same_run
from training.checkpoint.reader import read_tensors
from training.export.folder import (
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    SPECIAL_TOKENS_NAME,
    TOKENIZER_CONFIG_NAME,
    TOKENIZER_NAME,
    WEIGHTS_NAME,
    to_hf_config,
)
from training.export.hf import parameter_shapes, to_hf_name
from training.export.spec import COMMIT_KIND, ExportSpec
from training.program import run_program
from training.run_spec import RunSpec

logger = logging.getLogger(__name__)

_PREFIX = "model."


def export(spec: ExportSpec) -> Commit:
    """Write the folder and commit it; returns the commit, also when it was there before.

    Raises InputError when the checkpoint is not on the chain or of another model, DamagedData when it does not verify,
    CommitConflict when the target holds another export.
    """
    storage = Storage.open(spec.storage_root)
    run = RunSpec.model_validate(storage.read_json(f"runs/{spec.run_id}/artifacts/run.json"))
    checkpoint = open_checkpoint(storage, run.run_prefix, spec.checkpoint)
    require_same_run(run, checkpoint)
    body = _body(spec, run, checkpoint)
    out = Storage.open(spec.target_root) if spec.target_root else storage
    existing = read_commit(out, spec.target, kind=COMMIT_KIND)
    if existing is not None:
        return _repaired(storage, out, spec, run, checkpoint, _same(out, spec, existing, body))

    fault_point("export.begun", step=checkpoint.step)
    files = _write_files(storage, out, spec, run, checkpoint)
    fault_point("export.files_written", step=checkpoint.step)
    return write_commit(out, spec.target, kind=COMMIT_KIND, body=body, files=files)


def _body(spec: ExportSpec, run: RunSpec, checkpoint: Checkpoint) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "run_key": run.run_key,
        "step": checkpoint.step,
        "attempt": checkpoint.attempt,
        "checkpoint_digest": checkpoint.commit.digest,
        "model": run.model.model_dump(mode="json"),
        "num_parameters": run.model.num_parameters,
        "dtype": spec.dtype,
        "dataset_digest": run.dataset_digest,
        "tokenizer_digest": run.tokenizer_digest,
    }


def _same(storage: Storage, spec: ExportSpec, existing: Commit, body: dict[str, Any]) -> Commit:
    if existing.body != body:
        raise CommitConflict(
            f"{storage.url(spec.target)} already holds the export of step {existing.body.get('step')} of run "
            f"{existing.body.get('run_id')}; choose an empty folder."
        )
    return existing


def _repaired(
    storage: Storage, out: Storage, spec: ExportSpec, run: RunSpec, checkpoint: Checkpoint, commit: Commit
) -> Commit:
    """The export that is there; files that are not as they were committed are written again, to the same bytes."""
    try:
        check_files(out, spec.target, commit, content=True)
    except DamagedData as error:
        logger.warning("%s It is written again.", error)
        files = _write_files(storage, out, spec, run, checkpoint)
        if files != commit.files:
            raise DamagedData(
                f"{error} Written again, its files came out otherwise than they were committed: move "
                f"{out.url(spec.target)} away and give the run's command again."
            ) from error
    return commit


def _write_files(
    storage: Storage, out: Storage, spec: ExportSpec, run: RunSpec, checkpoint: Checkpoint
) -> dict[str, FileEntry]:
    """Store every file of the folder; nothing refers to them before the commit."""
    dataset = open_dataset(storage, run.dataset_key)
    files = {}
    for name, data in {**_documents(spec, run, dataset), **_extra(spec)}.items():
        out.write_bytes(f"{spec.target}/{name}", data)
        files[name] = FileEntry.of_bytes(data)
    with tempfile.TemporaryDirectory(prefix="headrace-export-") as folder:
        path = Path(folder) / WEIGHTS_NAME
        save_file(_weights(storage, spec, run, checkpoint), path, metadata={"format": "pt"})
        files[WEIGHTS_NAME] = FileEntry.of_file(path)
        out.put_file(path, f"{spec.target}/{WEIGHTS_NAME}")
    return files


def _weights(storage: Storage, spec: ExportSpec, run: RunSpec, checkpoint: Checkpoint) -> dict[str, torch.Tensor]:
    """The parameters by their Hugging Face names, in the export's type; each stored byte was verified."""
    stored = read_tensors(storage, checkpoint.prefix, checkpoint.commit, wanted=lambda name: name.startswith(_PREFIX))
    parameters = {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}
    shapes = parameter_shapes(run.model)
    if {name: tuple(tensor.shape) for name, tensor in parameters.items()} != shapes:
        differing = sorted(set(parameters) ^ set(shapes)) or ["their shapes differ"]
        raise DamagedData(f"{checkpoint.prefix} does not hold the parameters of its model: {', '.join(differing)}.")
    dtype = getattr(torch, spec.dtype)
    return {to_hf_name(name): tensor.to(dtype).contiguous() for name, tensor in parameters.items()}


def _documents(spec: ExportSpec, run: RunSpec, dataset: Dataset) -> dict[str, bytes]:
    """Everything but the weights, by file name."""
    tokenizer_json = dataset.tokenizer_json()
    tokenizer = tokenizers.Tokenizer.from_buffer(tokenizer_json)
    eos_id, bos_id = dataset.eos_id, dataset.bos_id
    special = {"eos_token": tokenizer.id_to_token(eos_id)}
    if bos_id is not None:
        special["bos_token"] = tokenizer.id_to_token(bos_id)
    tokenizer_config = {
        **special,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": run.model.max_seq_len,
        "clean_up_tokenization_spaces": False,
    }
    generation = {"eos_token_id": eos_id, "pad_token_id": eos_id, "do_sample": False}
    if bos_id is not None:
        generation["bos_token_id"] = bos_id
    return {
        TOKENIZER_NAME: tokenizer_json,
        TOKENIZER_CONFIG_NAME: json_document(tokenizer_config),
        SPECIAL_TOKENS_NAME: json_document(special),
        GENERATION_CONFIG_NAME: json_document(generation),
        CONFIG_NAME: json_document(to_hf_config(run.model, dtype=spec.dtype, eos_id=eos_id, bos_id=bos_id)),
    }


def _extra(spec: ExportSpec) -> dict[str, bytes]:
    own = {
        CONFIG_NAME,
        GENERATION_CONFIG_NAME,
        SPECIAL_TOKENS_NAME,
        TOKENIZER_CONFIG_NAME,
        TOKENIZER_NAME,
        WEIGHTS_NAME,
    }
    taken = own & set(spec.extra_files)
    if taken:
        raise ConfigError(f"extra_files may not replace {', '.join(sorted(taken))}.")
    return {name: text.encode("utf-8") for name, text in spec.extra_files.items()}


def describe(spec: ExportSpec) -> dict[str, Any]:
    """Make the export and say what was written."""
    commit = export(spec)
    return {
        "target": spec.target,
        "digest": commit.digest,
        "step": commit.body["step"],
        "files": sorted(commit.files),
        "bytes": sum(entry.size for entry in commit.files.values()),
    }


def main() -> None:
    """Entry point."""
    run_program(ExportSpec, "an export", describe)


if __name__ == "__main__":
    main()
