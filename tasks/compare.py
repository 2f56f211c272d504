"""This run's model against the champion, on the same validation text.

    scored on this evaluation          the score that its version carries
    scored on another one              scored on this one now
    reads another tokenizer's tokens   the same text is tokenised for it; documents that both scored whole are summed

Bits per byte compare across tokenizers as long as the bytes are the same, and that is checked document by document.
"""

import json
import math
from dataclasses import dataclass
from typing import Any

from data_prep.config import DataConfig, TokenizerConfig
from data_prep.dataset import prepare as prepare_dataset
from headrace.commit import read_commit
from headrace.errors import DamagedData, InputError, NotFound
from headrace.registry import Registry, VersionRecord
from headrace.terminal import StageProgress
from tasks.evaluate import MODEL_TAG, SPEC_TAG, EvaluateResult, Scored, score
from tasks.exports import key_below
from tasks.runs import SCORE_TAG, DatasetRef, Run, Workspace
from training.evaluation.spec import EvalSpec
from training.export.spec import COMMIT_KIND

TOKENIZER = "tokenizer.json"
TOKENIZER_CONFIG = "tokenizer_config.json"

Pair = tuple[dict[str, Any], dict[str, Any]]
"""The records of one document: from this run's model, and from the champion."""


@dataclass(frozen=True)
class Comparison:
    """Bits per byte of this run's model and of the champion, over the same bytes."""

    mine: float
    theirs: float
    how: str
    """How the champion's number came about, in parentheses; empty when it carried it."""

    @property
    def better(self) -> bool:
        """Whether this run's model needs fewer bits."""
        return self.mine < self.theirs


def compare(
    space: Workspace,
    run: Run,
    data: DataConfig,
    evaluated: EvaluateResult,
    holder: VersionRecord,
    stage: StageProgress | None = None,
) -> Comparison:
    """Compare with the champion `holder`. Raises NotFound, InputError or DamagedData when it cannot be scored."""
    mine = evaluated.bits_per_byte
    if holder.tags.get(SPEC_TAG) == evaluated.digest and SCORE_TAG in holder.tags:
        return Comparison(mine, float(holder.tags[SCORE_TAG]), "")
    model = _folder_of(space, holder)
    export = read_commit(space.storage, model, kind=COMMIT_KIND)
    if export is None:
        raise NotFound(f"there is no exported model at {space.storage.url(model)}")
    dataset = DatasetRef(run.spec.dataset_key, run.spec.dataset_digest, run.spec.tokenizer_digest)
    if export.body["tokenizer_digest"] == dataset.tokenizer_digest:
        theirs = score(space, run, evaluated.spec, dataset, model, owner=holder.run_id, stage=stage)
        return Comparison(mine, theirs.bits_per_byte, " (scored again on this evaluation)")
    other = _tokenised_for(space, data, model)
    changed = {"dataset_digest": other.digest, "tokenizer_digest": other.tokenizer_digest}

    def theirs_by(spec: EvalSpec) -> Scored:
        return score(space, run, spec.model_copy(update=changed), other, model, owner=holder.run_id, stage=stage)

    pairs = _common_documents(space, evaluated.scored, theirs_by(evaluated.spec))
    if not pairs and evaluated.spec.max_tokens is not None:
        # The part that the evaluation takes holds no whole document: both score the whole split instead.
        whole = evaluated.spec.model_copy(update={"max_tokens": None})
        mine_whole = score(space, run, whole, dataset, evaluated.model, owner=run.run_id, stage=stage)
        pairs = _common_documents(space, mine_whole, theirs_by(whole))
    if not pairs:
        raise InputError("it has another tokenizer, and too few documents are scored by both")
    return _over(pairs)


def _folder_of(space: Workspace, version: VersionRecord) -> str:
    model_id = version.tags.get(MODEL_TAG)
    if model_id is None:
        raise NotFound("it was not registered by headrace")
    return key_below(space.storage, Registry(space.tracker).get_model(model_id).location)


def _tokenised_for(space: Workspace, data: DataConfig, model: str) -> DatasetRef:
    """The same text, split alike, as tokens of the model's own tokenizer; units that exist are reused."""
    settings = space.storage.read_json(f"{model}/{TOKENIZER_CONFIG}")
    folder = space.work_dir / "tokenizers" / model.replace("/", "_")
    folder.mkdir(parents=True, exist_ok=True)
    space.storage.get_file(f"{model}/{TOKENIZER}", folder / TOKENIZER)
    tokenizer = TokenizerConfig(
        path=str(folder / TOKENIZER), eos_token=settings["eos_token"], add_bos="bos_token" in settings
    )
    made = prepare_dataset(space.storage, data, tokenizer, work_dir=space.work_dir / "prepare")
    return DatasetRef(made.dataset_key, made.digest, made.tokenizer_digest)


def _common_documents(space: Workspace, mine: Scored, theirs: Scored) -> list[Pair]:
    """The documents that both scored whole: not the first, whose first token is no target, and not the last, where the
    evaluation may have stopped in the middle. Raises InputError when their bytes differ.
    """
    pairs = list(zip(_documents(space, mine)[1:-1], _documents(space, theirs)[1:-1], strict=False))
    for ours, other in pairs:
        if ours["bytes"] != other["bytes"]:
            raise InputError(
                f"its tokenizer changes the text: document {ours['document']} has {other['bytes']} bytes instead of "
                f"{ours['bytes']}"
            )
    return pairs


def _over(pairs: list[Pair]) -> Comparison:
    size = sum(ours["bytes"] for ours, _ in pairs)
    if size == 0:
        raise InputError("the documents that both scored hold no text")
    bits = [sum(pair[side]["nats"] for pair in pairs) / math.log(2) / size for side in (0, 1)]
    return Comparison(bits[0], bits[1], f" (scored again with its own tokenizer, over {len(pairs)} documents)")


def _documents(space: Workspace, scored: Scored) -> list[dict[str, Any]]:
    lines = space.storage.read_bytes(f"{scored.prefix}/documents.jsonl").splitlines()
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise DamagedData(f"{space.storage.url(scored.prefix)}/documents.jsonl cannot be read: {error}") from error
