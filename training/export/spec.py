"""What an export gets, as one document. No torch here: tasks write it."""

from typing import Literal

from pydantic import Field

from headrace.config import Part
from training.run_spec import RestorePoint

COMMIT_KIND = "export"


class ExportSpec(Part):
    """`python -m training.export.main spec.json` reads this."""

    storage_root: str = Field(description="URL of the store")
    run_id: str = Field(description="the run whose weights are exported")
    checkpoint: RestorePoint = Field(description="the committed checkpoint that holds them")
    target: str = Field(description="storage key of the folder to write, empty or with this same export in it")
    target_root: str | None = Field(None, description="URL of the store that it is written to; none: the run's own")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="type of the exported weights")
    extra_files: dict[str, str] = Field({}, description="further text files of the folder, by name (MLmodel)")
