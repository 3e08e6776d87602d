"""``crossdraft train export KIND MODEL``: write a trained drafter as a checkpoint that serving engines load."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from crossdraft import Argument, Command, UsageError
from crossdraft.commands import output_folder
from crossdraft.framework import plugins


class Export(Command):
    """The command."""

    name = "export"

    kind: Annotated[str, Argument("KIND", positional=True)] = Field(description="kind of drafter, as it was trained")
    model: Annotated[str, Argument("MODEL", positional=True)] = Field(
        description="registered name, directory or Hub id of the trained drafter"
    )
    target: str = Field(description="name, directory or Hub id of its target")
    out: Path = Field(description="new or empty directory for the checkpoint")
    dtype: Literal["bfloat16", "float16", "float32"] = Field("bfloat16", description="dtype of the written weights")
    force: bool = Field(False, description="replace files of a directory that is not empty")

    def run(self) -> int:
        """Return 0. Raises UsageError for a kind without such a checkpoint or a directory that is not empty."""
        config, out = plugins.get("trainers", self.kind), self.out
        if out.is_dir() and any(out.iterdir()) and not self.force:
            raise UsageError(f"--out {out}: is not empty; use a new directory, or add --force to replace its files")

        from crossdraft import load_model
        from crossdraft.models import resolve

        from .files import staged

        heads = resolve(self.model, heads=True).path
        for name, path in ((self.model, heads), (self.target, resolve(self.target).path)):
            if path.resolve() == out.resolve():
                raise UsageError(f"--out {out}: is the directory of {name}; use another one")
        target = load_model(self.target, dtype=self.dtype, device="cpu")
        with staged(output_folder(out)) as directory:
            note = config.export_servable(self.model, target, directory)
        print(f"{self.kind} written to {out}; {note}")
        return 0
