"""Responses of an engine that end with the token of the prefill: no step, so no number, but none lost either."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from engine_server import Script, engine_server, steps
from tiny_models import save_model

from crossdraft.framework.cli import main as cli

END = 2
EMPTY, FULL = steps([END], finish_reason="stop"), steps([5], [6, 7], [8, 5], [6, 7], [9])
#: Responses by mode: every one, every second, one token by max_new_tokens.
MODES: dict[str, tuple[Sequence[Any], int]] = {
    "all": ([EMPTY], 8),
    "some": ([EMPTY, FULL], 8),
    "one": ([steps([5])], 1),
}
RECIPE = """
target: {target}
prompts: {prompts}
limit: 6
max_new_tokens: {tokens}
drafters: [{{name: prompt-lookup, gamma: 4}}]
verifiers: [token]
engine: {{name: openai, url: '{url}', model: m, token_ids: true}}
"""


@pytest.mark.parametrize("mode", MODES)
def test_cell_of_short_responses(mode: str, tmp_path: Path, write_prompts: Any, capsys: Any) -> None:
    answers, tokens = MODES[mode]
    script = Script(lambda number: answers[number % len(answers)])
    prompts = write_prompts(tmp_path / "prompts.jsonl", n=6)
    target, recipe, out = save_model(tmp_path / "target"), tmp_path / "recipe.yaml", tmp_path / "runs"
    with engine_server(script):
        recipe.write_text(RECIPE.format(target=target, prompts=prompts, tokens=tokens, url=script.url))
        code = cli.main(["run", str(recipe), "--out", str(out)])
    output = "".join(capsys.readouterr())
    (run,), (cell,) = out.iterdir(), out.glob("*/cells/prompt-lookup*")
    lengths = [len(json.loads(line)["tokens"]) for line in (cell / "responses.jsonl").read_text().splitlines()]
    assert "ZeroDivision" not in output and len(lengths) == 8  # two prompts have two turns
    if mode != "some":
        assert code == 1 and "no step was measured" in output
        assert "no step was measured" in json.loads((cell / "config.json").read_text())["error"]
    else:
        metrics = json.loads((cell / "metrics.json").read_text())["metrics"]
        full = lengths.count(8)
        assert code == 0 and set(lengths) == {1, 8} and metrics["sequences"] == 8
        assert (metrics["tokens"], metrics["steps"]) == (7 * full, 4 * full)
        assert metrics["block_efficiency_all_steps"] == 7 / 4
    for command in (["report"], ["compare"], ["advise"], ["verify-engine"], ["report", "--format", "html"]):
        name, *options = command
        cli.main([name, str(run), *[str(run)] * (name == "compare"), *options])
        output = "".join(capsys.readouterr())
        assert not any(word in output for word in ("report it", "Traceback", "steps or responses are missing")), output
