"""The `MLmodel` file: what makes an exported folder one that MLflow can open."""

from datetime import UTC, datetime

from headrace.tracking import quiet_import


def mlmodel_document(*, model_id: str, run_id: str, loader_module: str, created_ms: int) -> bytes:
    """The `MLmodel` file that lets `mlflow.pyfunc.load_model` open the folder it lies in.

    Made again with the same arguments it has the same bytes.
    """
    with quiet_import():
        import mlflow.pyfunc as pyfunc  # `from mlflow import pyfunc` would load it later, with its warnings
        from mlflow.models import Model
        from mlflow.models.signature import ModelSignature
        from mlflow.types.schema import ColSpec, ParamSchema, ParamSpec, Schema

    text = Schema([ColSpec("string")])  # without a name: a list of prompts is taken, and a table of one column
    params = ParamSchema(
        [
            ParamSpec("max_new_tokens", "long", 64),
            ParamSpec("temperature", "double", 0.0),
            ParamSpec("seed", "long", 0),
        ]
    )
    model = Model(
        model_id=model_id,
        model_uuid=model_id.removeprefix("m-"),
        run_id=run_id,
        signature=ModelSignature(text, text, params),
        utc_time_created=datetime.fromtimestamp(created_ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S.%f"),
    )
    pyfunc.add_to_model(model, loader_module=loader_module)  # type: ignore[no-untyped-call] # has no annotations
    return str(model.to_yaml()).encode("utf-8")
