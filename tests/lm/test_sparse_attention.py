"""Sparse attention: exact while the indexer selects all keys, refused beyond."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from architecture_checks import disagreement, plain
from architecture_variants import OWN
from architecture_walk import SAME, TOLERANCE, RecordedLM, outcome
from oracle_trees import NEW, PROMPTS
from tiny_architectures import tiny
from tiny_models import generated

from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.architectures import RECENT
from crossdraft.framework.lm.attention import sparse
from crossdraft.framework.lm.attention.sparse import indexers, selected_keys
from crossdraft.framework.lm.transformers_lm import TransformersLM

FOUR = [*PROMPTS, [40, 41, 42, 43, 44]]
FEW = ["deepseek_v32", "minimax_m3_vl_text"]
pytestmark = pytest.mark.skipif(not RECENT, reason="needs transformers 5.23")
#: Model types, and the variant in which the indexers select all of 64 keys.
SPARSE = {name: next(label for label in OWN[name] if "all keys" in label) for name in OWN if "doge" not in name
          and any("all keys" in label for label in OWN[name])}  # fmt: skip


def make_model(model_type: str, **changes: Any) -> Any:
    model = tiny(transformers.CONFIG_MAPPING[model_type], **OWN[model_type][SPARSE[model_type]], **changes)
    assert indexers(model)
    return model


@pytest.mark.parametrize("prompts", [PROMPTS[2:], FOUR], ids=["one row", "four rows"])
@pytest.mark.parametrize(
    "model_type", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in SPARSE if name not in FEW)]
)
def test_logits_match_the_model(model_type: str, prompts: Sequence[list[int]]) -> None:
    """Six steps, of which the first three draft chains; every row keeps another number of nodes."""
    model = make_model(model_type)
    assert selected_keys(model) == 64
    assert disagreement(model, steps=6, chains=3, prompts=prompts) < TOLERANCE


@pytest.mark.parametrize("model_type", FEW)
def test_eager_attention_and_recorded_passes_are_exact(model_type: str) -> None:
    changes = OWN[model_type][SPARSE[model_type]]
    assert outcome(model_type, changes | {"attn_implementation": "eager"}) == SAME
    assert outcome(model_type, changes, RecordedLM) == SAME


@pytest.mark.parametrize("model_type", FEW)
def test_missing_key_is_detected(model_type: str, monkeypatch: Any) -> None:
    """Mistake: the last slots of a pass are not selected."""
    for name, (select, keys) in dict(sparse.INDEXERS).items():

        def fewer(module: Any, arguments: Any, kv_len: int, select: Any = select) -> torch.Tensor:
            return select(module, arguments, max(kv_len - 8, 1))

        monkeypatch.setitem(sparse.INDEXERS, name, (fewer, keys))  # type: ignore[arg-type]
    assert disagreement(make_model(model_type), prompts=FOUR) > 0.1


@pytest.mark.parametrize("model_type", FEW)
def test_longer_slots_are_refused(model_type: str) -> None:
    with pytest.raises(ModelError, match=r"attends to the 64 keys that its indexer ranks highest.* slots reach 65"):
        TransformersLM(make_model(model_type), 1, 65)


@pytest.mark.parametrize("model_type", FEW)
def test_model_outside_of_decoder_is_unchanged(model_type: str) -> None:
    """Its own cache and its own selection."""
    few = {"index_topk": 4} if model_type == "deepseek_v32" else {"index_topk_blocks": 1}
    changes = OWN[model_type][SPARSE[model_type]] | few
    model = tiny(transformers.CONFIG_MAPPING[model_type], **changes)
    text, before = generated(model, [PROMPTS[1]], NEW), plain(model, FOUR[2])
    TransformersLM(model, 1, 4)
    assert generated(model, [PROMPTS[1]], NEW) == text
    torch.testing.assert_close(plain(model, FOUR[2]), before)  # linear layers round otherwise


def test_unknown_indexers_are_refused() -> None:
    for model_type in ("deepseek_v4", "qwen4_exp_text"):
        with pytest.raises(ModelError, match="they select keys with a further cache"):
            TransformersLM(tiny(transformers.CONFIG_MAPPING[model_type]), 1, 16)


def test_fork_of_shared_selection_is_refused() -> None:
    model = make_model("hy_v4")
    assert "shared" in model.config.indexer_types
    with pytest.raises(ModelError, match="layers that reuse the keys which an earlier layer selected"):
        TransformersLM(model, 1, 16).fork([0])
