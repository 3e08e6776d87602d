"""``benchmarks/gpu.py`` runs as far as a CPU can take it: every part, on tiny models."""

import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"


@pytest.fixture(scope="module")
def script() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)  # where a script finds the module beside it
        yield runpy.run_path(str(SCRIPT))


@pytest.mark.slow
def test_every_part_runs_on_tiny_models(script: dict[str, Any], capsys: Any) -> None:
    options = {"--device": "cpu", "--limit": 1, "--max-new-tokens": 5, "--gamma": 2, "--batch": 2}
    script["main"](["--tiny", *(str(word) for option in options.items() for word in option)])
    printed = capsys.readouterr().out
    table = printed[printed.rindex("number") :]
    for what in script["WANTED"]:
        if not what.startswith("waits"):  # counted on CUDA alone
            assert f"{what}  " in table
    assert table.count("reached") + table.count("MISSED") == len(script["WANTED"]) - 1
    assert "batch 2, draft-model, tok/s" in table and "peak memory" in table


@pytest.mark.parametrize("tied", [True, False])
def test_untied_embedding_is_not_counted(script: dict[str, Any], tied: bool) -> None:
    """A pass looks up one row of it; as an output head it is read whole."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=100,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        tie_word_embeddings=tied,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    attention, feed_forward, norms, head = 4 * 8 * 8, 3 * 8 * 16, 3 * 8, 100 * 8
    assert script["weights_read"](model) == 4 * (attention + feed_forward + norms + head)
