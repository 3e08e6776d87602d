"""Made-up finished cells with known results: two tokens a step, at whatever speed-up a test wants."""

from collections.abc import Mapping
from pathlib import Path

from crossdraft.framework.cost.summary import Summary
from crossdraft.framework.metrics.cell_metrics import Estimate, StepRecord, measure
from crossdraft.framework.metrics.pieces import Piece
from crossdraft.framework.recipe.recipe import CellConfig, Recipe
from crossdraft.framework.runs.records import CellResult

#: Drafters by the verifier that the cells below pair them with.
DRAFTERS = {"token": "draft-model", "block": "draft-model", "spectr": "draft-model-iid", "specinfer": "draft-model-iid"}
MODELS = {"models": {"toy": {"sha256": "abc"}, "d": {"sha256": "def"}}, "dtype": "float32", "device": "cuda (toy)"}


def cell(batch_size: int, verifier: str, speed_up: float, temperature: float = 1.0) -> CellResult:
    """Two tokens a step from two nodes, 10 B tokens/s times the speed-up; the verifier "" is plain decoding."""
    drafter = {"name": DRAFTERS[verifier], "model": "d", "gamma": 2} if verifier else "none"
    arguments = {"target": "toy", "drafter": drafter, "verifier": verifier or "token", "batch_size": batch_size}
    config = CellConfig.model_validate(arguments | {"sampling": {"temperature": temperature}})
    tau = 1 if verifier else 0
    records = [StepRecord(p, f"q{p}", "a", 0, i, tau, tau + 1, 2 * tau, 2 * tau, 9) for p in (0, 1) for i in range(3)]
    tokens = sum(r.emitted for r in records)
    seconds = {
        "target": tokens / (10 * batch_size * speed_up),
        "draft": 0.0,
        "verify": 0.0,
        "rest": 0.0,
        "prefill": 0.0,
    }
    result = CellResult(config, measure(records, [Piece(tokens, seconds)], 6 * tau), records=records)
    result.pieces = [Piece(tokens, seconds)]
    result.responses = [{"question_id": f"q{p}", "turn": 0, "prompt_tokens": 5} for p in (0, 1)]
    result.provenance = MODELS
    assert result.metrics is not None
    result.metrics.speed_up = Estimate(speed_up)
    return result


def outcome(directory: Path, speed_ups: Mapping[int, Mapping[str, float]], **sampling: float) -> Summary:
    """Cells by batch size and verifier, each beside a baseline; labelled by the name of what they use."""
    recipe = Recipe.model_validate({"target": "toy", "drafters": ["draft-model"], "verifiers": ["token"]})
    results = []
    for b, pairs in speed_ups.items():
        results += [cell(b, "", 1.0, **sampling), *(cell(b, name, value, **sampling) for name, value in pairs.items())]
    return Summary(recipe, directory, results)


#: Speed-ups by batch size and verifier.
SERIES = {
    1: {"token": 1.5, "block": 1.6, "spectr": 2.0, "specinfer": 0.9},
    4: {"token": 1.2, "block": 1.3, "spectr": 1.1, "specinfer": 0.8},
    16: {"token": 1.0, "block": 0.8, "spectr": 0.7, "specinfer": 0.7},
}


def withhold(finished: Summary, reason: str, verifier: str, batch_size: int = 0) -> None:
    """Withhold the speed-ups of a verifier, at all batch sizes or one."""
    for result in finished.results:
        metrics, config = result.metrics, result.config
        assert metrics is not None
        metrics.undisturbed = 0.1
        if metrics.speed_up is not None:
            metrics.speed_up_wall = metrics.speed_up.value
        drafts = config.verifier.name == verifier and not config.is_baseline
        if drafts and config.batch_size in (batch_size or config.batch_size,):
            metrics.speed_up, metrics.withheld = None, reason
