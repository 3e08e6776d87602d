"""Checkpoints of `dflash`, `dspark` and `p-eagle`: layouts that load, and files that are refused by a sentence."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_heads import (
    BLOCK,
    DFLASH,
    DFLASH2,
    DSPARK,
    FILES,
    LAYERS,
    OUTPUTS,
    P_EAGLE,
    Plain,
    V,
    dflash,
    dflash2,
    dspark,
    kept,
    p_eagle,
    random,
)
from draft_contexts import GivenContext
from torch import Tensor

from crossdraft.framework import plugins
from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError, UsageError
from crossdraft.framework.lm.transformers_lm import TransformersLM


@pytest.fixture(scope="module")
def target(tiny_model: Callable) -> Any:
    return tiny_model("llama", seed=2, num_hidden_layers=4)


def load(target: Any, name: str, tensors: dict[str, Tensor], config: dict[str, Any], **options: Any) -> Any:
    def heads(model: str) -> Checkpoint:
        return Checkpoint(model, Path("somewhere"), config, dict(tensors), "somewhere", "")

    drafter, slots = plugins.get("drafters", name), TransformersLM(target, 1, 64)
    context = GivenContext(slots, Sampling(), 64, target_model=target, load_heads=heads)
    return drafter(drafter.Config(**{"model": "heads", "layers": LAYERS, **options}), context)


def speculators(algorithm: str, **more: Any) -> dict[str, Any]:
    """A config as vllm-project/speculators writes it."""
    return {
        "speculators_model_type": algorithm,
        "architectures": [f"{algorithm}Speculator"],
        "transformer_layer_config": {k: v for k, v in DFLASH.items() if k not in ("block_size", "dflash_config")},
        "block_size": BLOCK,
        "mask_token_id": 96,
        "aux_hidden_state_layer_ids": list(LAYERS),
        "speculators_config": {"algorithm": algorithm},
        **more,
    }


IDS = torch.tensor([5, 0, 90, 41, 42, 43, 7])
REDUCED = {"d2t": IDS - torch.arange(7), "t2d": torch.zeros(V, dtype=torch.bool).index_fill_(0, IDS, True)}
SPECFORGE = {
    **DFLASH,
    "architectures": ["DSparkDraftModel"],
    "dflash_config": {**DFLASH["dflash_config"], "markov_rank": 5},
}


@pytest.mark.parametrize(
    "name, config, tensors, drafts",
    [
        ("dflash", DFLASH, dflash, BLOCK - 1),
        (
            "dflash",
            {**DFLASH, "block_size": None, "dflash_config": {**DFLASH["dflash_config"], "block_size": 4}},
            dflash,
            3,
        ),
        ("dflash", speculators("dflash"), dflash, BLOCK - 1),
        ("dflash", speculators("dflash", sample_from_anchor=True), dflash, BLOCK),
        ("dflash", {**DSPARK, "markov_rank": 0, "enable_confidence_head": False}, dflash, BLOCK),  # DeepSpec's
        ("dflash", DFLASH2, dflash2, BLOCK - 1),
        ("dspark", DSPARK, dspark, BLOCK),
        ("dspark", SPECFORGE, dspark, BLOCK),
        ("dspark", speculators("dspark", sample_from_anchor=False), dspark, BLOCK - 1),
        ("dspark", {**DSPARK, "markov_head_type": "rnn"}, lambda: dspark("rnn"), BLOCK),
        ("p-eagle", {**P_EAGLE, "mask_token_id": None, "ptd_token_id": 96}, p_eagle, None),
    ],
)
def test_published_layout_loads_whole(target: Any, name: str, config: Any, tensors: Any, drafts: int | None) -> None:
    """Every tensor of the file is in the head, and every weight of the head that is not the target's is the file's."""
    inputs = tensors()
    drafter = load(target, name, inputs, config)
    assert drafter.block() == drafts
    length = kept(drafter.head)
    assert length.keys() == inputs.keys()
    assert all(torch.equal(length[key], tensor.view_as(length[key])) for key, tensor in inputs.items())
    assert drafter.head.embed_tokens.weight.data_ptr() == target.get_input_embeddings().weight.data_ptr()
    assert drafter.head.lm_head.weight.data_ptr() == target.get_output_embeddings().weight.data_ptr()


@torch.inference_mode()
def test_reduced_vocabulary_and_tables_of_their_own(target: Any) -> None:
    own = {"embed_tokens.weight": random(V, 32), "lm_head.weight": random(7, 32)}
    drafter = load(target, "dflash", {**dflash(), **own, **REDUCED}, speculators("dflash", draft_vocab_size=7))
    drafter.start(0, [3, 1, 4, 1], torch.randn(3, 3, 32))
    from crossdraft.framework.contracts.draft import Sequences
    from crossdraft.framework.contracts.rng import CounterRng

    sequences = Sequences([[3, 1, 4, 1]], torch.tensor([[3, 1, 4, 1]]), [5], [0])
    draft = drafter.propose(sequences, CounterRng(0).for_step([0], [4], torch.device("cpu")))
    assert (draft.q > 0).any(1)[0].nonzero().flatten().tolist() == sorted(IDS.tolist())
    assert set(draft.tokens[0].tolist()) <= set(IDS.tolist())


def test_scaled_embedding_is_read_scaled(target: Any, tiny_model: Callable) -> None:
    gemma = tiny_model("gemma3")
    head = load(gemma, "dflash", dflash(), DFLASH, layers=(0, 1, 2)).head
    ids = torch.tensor([3, 5])
    torch.testing.assert_close(head.embed_tokens(ids) * head.scale, gemma.get_input_embeddings()(ids))
    assert head.scale != 1 and load(target, "dflash", dflash(), DFLASH).head.scale == 1


def test_reference_of_published_widths() -> None:
    """58 tensors for five layers: eleven a layer, and three."""
    assert len(dflash()) == 2 * 11 + 3 and Plain(dflash(), _Tables()).layers == 2


class _Tables:
    def get_input_embeddings(self) -> Any:
        return torch.nn.Embedding(V, 32)

    get_output_embeddings = get_input_embeddings


# -- refused ----------------------------------------------------------------------------------------------


def without(tensors: dict[str, Tensor], key: str) -> dict[str, Tensor]:
    return {k: t for k, t in tensors.items() if k != key}


def nested(**more: Any) -> dict[str, Any]:
    return {**DFLASH, "dflash_config": {**DFLASH["dflash_config"], **more}}


def second(**more: Any) -> dict[str, Any]:
    return {**DFLASH2, "dflash_config": {**DFLASH2["dflash_config"], **more}}


REFUSED: dict[str, tuple[str, Any, Any, dict[str, Any], str]] = {
    "a missing tensor": ("dflash", without(dflash(), "hidden_norm.weight"), DFLASH, {}, r"missing hidden_norm.weight \[32\]"),  # noqa: E501
    "an unknown one": ("dflash", {**dflash(), "aux_hidden_norms.0.weight": random(32)}, DFLASH, {}, "unexpected aux_hidden_norms.0.weight"),  # noqa: E501
    "fused projections": ("dflash", {**dflash(), "layers.0.self_attn.qkv_proj.weight": random(64, 32)}, DFLASH, {}, "unexpected layers.0.self_attn.qkv_proj"),  # noqa: E501
    "another shape": ("dflash", {**dflash(), "fc.weight": random(32, 64)}, DFLASH, {}, r"fc.weight is \[32, 64\], not \[32, 96\]"),  # noqa: E501
    "no layers said": ("dflash", dflash(), DFLASH, {"layers": None}, r"the option layers is missing, .* write layers: \[1, 2, 3\]"),  # noqa: E501
    "the authors' rule": ("dflash", dflash(), nested(target_layer_ids=None), {"layers": None}, r"lacks target_layer_ids.* trainers have different defaults.* \[2, 2\]"),  # noqa: E501
    "speculators' ids": ("dflash", dflash(), speculators("dflash"), {"layers": None}, r"write layers: \[1, 2, 3\]"),
    "the embedding": ("dflash", dflash(), nested(target_layer_ids=[-1, 3]), {"layers": None}, r"write layers: \[0, 4\]"),  # noqa: E501
    "layers of another target": ("dflash", dflash(), nested(target_layer_ids=[1, 33]), {"layers": None}, r"\[1, 33\] for target_layer_ids, which are not layers"),  # noqa: E501
    "layers beyond": ("dflash", dflash(), DFLASH, {"layers": (1, 9)}, r"layers has \[9\], but .* 0 to 4"),
    "no mask": ("dflash", dflash(), nested(mask_token_id=None), {}, "config.json lacks mask_token_id"),
    "a mask beyond": ("dflash", dflash(), nested(mask_token_id=97), {}, "has 97 for mask_token_id, a whole number from 0 to 96"),  # noqa: E501
    "no block": ("dflash", dflash(), {**DFLASH, "block_size": None}, {}, "config.json lacks block_size"),
    "a block that is a text": ("dflash", dflash(), {**DFLASH, "block_size": "4"}, {}, "has '4' for block_size"),
    "a block of 10^9": ("dflash", dflash(), {**DFLASH, "block_size": 10**9}, {}, "from 2 to 1024"),
    "a config that is a list": ("dflash", dflash(), {**DFLASH, "dflash_config": [1]}, {}, r"dflash_config is \[1\]"),
    "no taps": ("dflash", dflash2(), second(conv_kernel_size=None), {}, "config.json lacks conv_kernel_size"),
    "taps beyond the block": ("dflash", dflash2(), second(conv_kernel_size=5), {}, "has 5 for conv_kernel_size, a whole number from 1 to 4"),  # noqa: E501
    "groups of unequal size": ("dflash", dflash2(), second(conv_group_size=5), {}, "conv_group_size is 5, which does not divide the hidden size, 32"),  # noqa: E501
    "a multiplier": ("dflash", dflash2(), second(output_multiplier=0.5), {}, "has 0.5 for dflash_config.output_multiplier: it changes the logits"),  # noqa: E501
    "a selector of a reduced vocabulary": ("dflash", {**dflash2(), "lm_head.weight": random(7, 32), **REDUCED}, {**DFLASH2, "draft_vocab_size": 7}, {}, "candidate_selector is not supported"),  # noqa: E501
    "half a convolution": ("dflash", without(dflash2(), "layers.1.mlp_conv.base_kernel"), DFLASH2, {}, "missing layers.1.mlp_conv.base_kernel"),  # noqa: E501
    "DSpark's": ("dflash", dspark(), DSPARK, {}, "use drafter 'dspark'"),
    "no DSpark's": ("dspark", dflash(), DFLASH, {}, "use drafter 'dflash'"),
    "another kind": ("dspark", dspark(), {**DSPARK, "markov_head_type": "rnn"}, {}, "markov_head_type is 'rnn' .* tensors are those of vanilla"),  # noqa: E501
    "half a Markov head": ("dspark", without(dspark(), "markov_head.markov_w2.weight"), DSPARK, {}, "missing markov_head.markov_w2.weight"),  # noqa: E501
    "no confidence": ("dspark", without(without(dspark(), "confidence_head.proj.weight"), "confidence_head.proj.bias"), DSPARK, {"confidence": 0.5}, "they lack a confidence_head"),  # noqa: E501
    "a confidence of another width": ("dspark", {**dspark(), "confidence_head.proj.weight": random(1, 9)}, DSPARK, {}, "has input width 9"),  # noqa: E501
    "EAGLE-3's": ("p-eagle", without(p_eagle(), "mask_hidden"), P_EAGLE, {}, "they lack mask_hidden"),
    "P-EAGLE's": ("eagle3", p_eagle(), P_EAGLE, {}, "use drafter 'p-eagle'"),
    "no mask token": ("p-eagle", p_eagle(), {**P_EAGLE, "mask_token_id": None}, {}, "config.json lacks mask_token_id"),
    "a mask of half the width": ("p-eagle", {**p_eagle(), "mask_hidden": random(1, 48)}, P_EAGLE, {}, r"mask_hidden is \[48\], not \[96\]"),  # noqa: E501
}  # fmt: skip


@pytest.mark.parametrize("subject", REFUSED)
def test_mismatched_tensors_raise(target: Any, subject: str) -> None:
    name, tensors, config, options, sentence = REFUSED[subject]
    with pytest.raises(ModelError, match=sentence):
        load(target, name, tensors, config, **options)


def test_options_that_do_not_fit(target: Any) -> None:
    with pytest.raises(UsageError, match="gamma is 4, but the blocks of 'heads' draft 3 tokens; write at most 3"):
        load(target, "dflash", dflash(), DFLASH, gamma=4)
    with pytest.raises(UsageError, match=r"start_length .8. is more than gamma .3."):
        load(target, "dflash", dflash(), DFLASH, policy={"name": "heuristic", "start_length": 8})
    with pytest.raises(ValueError, match="policy and confidence both end a draft"):
        load(target, "dspark", dspark(), DSPARK, policy="heuristic", confidence=0.5)
    assert [i - 1 for i in LAYERS] == OUTPUTS and set(FILES) == {"dflash", "dspark", "p-eagle"}
