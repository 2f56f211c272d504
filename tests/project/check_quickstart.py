"""What must be true after the quickstart ran twice: `python check_quickstart.py RESULT.json STORE`.

RESULT.json is what the second `headrace run --json` printed, STORE the folder of the store. Run by `.ci/run`.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any


def main(result_file: str, store: str) -> None:
    result = json.loads(Path(result_file).read_text(encoding="utf-8"))
    require_all_reused(result)
    require_better_than_unigram(result)
    require_use_of_context(committed_evaluation(Path(store), result))


def require_all_reused(result: dict[str, Any]) -> None:
    outcomes = {stage["name"]: stage["outcome"] for stage in result["stages"]}
    print(f"second run: {outcomes}, {result['seconds']:.1f} s, new version: {result['new_version']}")
    if set(outcomes.values()) != {"reused"} or result["new_version"] or result["attempts"] != 1:
        sys.exit("the second run must reuse every stage, launch nothing and make no version")


def require_better_than_unigram(result: dict[str, Any]) -> None:
    score = result["bits_per_byte"]
    print(f"bits per byte: {score}")
    if not score["model"] <= 0.7 * score["unigram"]:
        sys.exit("the model must be at least 30 % below the unigram model")
    if not score["bigram"] < score["unigram"] < score["untrained"]:
        sys.exit("the order of what knows nothing must be bigram, unigram, untrained")


def require_use_of_context(evaluation: dict[str, Any]) -> None:
    """Tokens with much text before them must be easier than those with little, or attention does nothing."""
    early, late = mean_loss(evaluation, 1, 9), mean_loss(evaluation, 128, 256)
    print(f"loss at positions 1 to 8: {early:.3f} nats, at 128 to 255: {late:.3f}")
    if not late <= early - 0.1:
        sys.exit("the loss far into a window must be at least 0.1 nats below that at its start")


def mean_loss(evaluation: dict[str, Any], start: int, stop: int) -> float:
    nats = math.fsum(evaluation["nats_by_position"][start:stop])
    return nats / sum(evaluation["tokens_by_position"][start:stop])


def committed_evaluation(store: Path, result: dict[str, Any]) -> dict[str, Any]:
    (path,) = store.glob(f"runs/{result['run_id']}/artifacts/evaluations/*/result.json")
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


if __name__ == "__main__":
    main(*sys.argv[1:])
