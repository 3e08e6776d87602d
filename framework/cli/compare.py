"""``crossdraft compare A B``: compare two runs pair by pair."""

from __future__ import annotations

import json
from typing import Annotated, ClassVar

from pydantic import Field

from .. import plugins
from ..contracts.command import Argument, Command
from ..errors import UsageError, quoted
from ..report.comparison import compare_runs, comparison_text
from .options.run import JsonOptions, one_run


class Compare(JsonOptions, Command):
    """Comparison of two runs on the same prompts."""

    name: ClassVar[str] = "compare"

    a: Annotated[str, Argument("A", positional=True)] = Field(description="directory of a finished run, runs/NAME-HASH")
    b: Annotated[str | None, Argument("B", positional=True)] = Field(None, description="the other run")
    fail_under: Annotated[float | None, Argument("X")] = Field(
        None, gt=0, lt=1, description="the same as crossdraft gate A B --fail-under X"
    )
    markdown: Annotated[bool, Argument(exclusive="format")] = Field(False, description="print Markdown")

    def run(self) -> int:
        """Raises UsageError (exit status 2) for runs that cannot be read or compared."""
        if self.fail_under is not None:
            gate, form = plugins.get("commands", "gate"), {"json_": self.json_, "markdown": self.markdown}
            return gate(baseline=self.a, current=self.b, fail_under=self.fail_under, **form).run()
        if self.b is None:
            raise UsageError(f"compare requires two runs, got only {quoted(self.a)}; add one")
        comparison = compare_runs(one_run(self.a), one_run(self.b))
        if self.json_:
            print(json.dumps(comparison.to_json(), indent=2, ensure_ascii=False))
        else:
            print(comparison_text(comparison, "markdown" if self.markdown else "text"), end="")
        return 0
