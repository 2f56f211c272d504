"""What a run is and how it is continued, in words, for the head of its page in MLflow."""

from headrace.storage import Storage
from training.run_spec import RunSpec

TEXT = """\
A decoder of {parameters:,.1f} million parameters, trained from {origin}: {steps:,} steps of {batch} x {seq_len} \
tokens ({tokens:,.1f} million) of the dataset `{dataset}`.

- **Config** `{run_key}`: the digest of all that decides what is learned. The whole config is `run.json` among the \
artifacts.
- **Continue it**: give the same config again, with `headrace run CONFIG` or `headrace trigger --config CONFIG`. \
Layout, intervals and addresses may differ; with any other change it is another run.
- **Start another one from it**: `--set name=NEW --set training.init_from=run:{run_id}@STEP`.
- **Attempts** are the runs nested below this one. A value shown here is one that a committed checkpoint covers.
- **Checkpoints, scores and samples** are among the artifacts, and lie at `{place}`.
"""


def describe(spec: RunSpec, storage: Storage) -> str:
    """The description of a run, in markdown."""
    training = spec.training
    return TEXT.format(
        parameters=spec.model.num_parameters / 1e6,
        origin=f"the weights of `{training.init_from}`" if training.init_from else "initial weights",
        steps=training.steps,
        batch=training.global_batch_size,
        seq_len=training.seq_len,
        tokens=training.steps * training.global_batch_size * training.seq_len / 1e6,
        dataset=spec.dataset_key,
        run_key=spec.run_key,
        run_id=spec.run_id,
        place=storage.url(spec.run_prefix),
    )
