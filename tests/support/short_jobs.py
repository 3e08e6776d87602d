"""Jobs of few tokens, whose slots are short."""

from pathlib import Path
from typing import Any

import crossdraft

#: Prompts of one token and of a few.
PROMPTS = [[5], [7, 8, 7, 8, 9]]


def check_short_jobs(root: Path, drafter: dict[str, Any]) -> None:
    """The greedy text is plain decoding's; the drafter's ``model`` is a directory in ``root``, as ``target`` is."""
    target = crossdraft.load_model(str(root / "target"), dtype="float32", device="cpu")
    if model := drafter.get("model"):
        drafter = {**drafter, "model": str(root / model)}
    for maximum in (1, 2, 3, 8, 16):
        options: dict[str, Any] = {"temperature": 0, "max_new_tokens": maximum, "batch_size": 2}
        drafted, plain = (crossdraft.generate(target, PROMPTS, drafter=d, **options) for d in (drafter, "none"))
        assert [r.tokens for r in drafted] == [r.tokens for r in plain]
