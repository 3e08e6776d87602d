"""The joint distribution of two steps with a drafter of blocks is the target's, enumerated exactly."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from block_heads import DFLASH, DFLASH2, DSPARK, P_EAGLE, dflash2, layer, random, written
from torch import Tensor

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft

V, LAYERS = 3, (1, 2)
SIZES: dict[str, Any] = dict(vocab_size=V, num_hidden_layers=1, layer_types=["full_attention"], mask_token_id=1)


def tensors(name: str) -> dict[str, Tensor]:
    torch.manual_seed(6)
    wide = layer(0, 64, False) if name == "p-eagle" else layer(0)
    out = {**wide, "fc.weight": random(32, 64), "norm.weight": 1 + random(32)}
    if name == "p-eagle":
        return {**out, "mask_hidden": random(1, 1, 64), "layers.0.hidden_norm.weight": 1 + random(32)}
    out["hidden_norm.weight"] = 1 + random(32)
    if name == "dflash-2":
        out |= {key: tensor for key, tensor in dflash2().items() if "layers.0." in key and "conv" in key}
        out |= {f"candidate_selector.{name}_codebook": 3 * random(V, 4) for name in ("predecessor", "successor")}
        out["candidate_selector.hidden_projection.weight"] = random(4, 32)
    if name == "dspark":
        out |= {"markov_head.markov_w1.weight": random(V, 4), "markov_head.markov_w2.weight": 3 * random(V, 4)}
        out |= {"markov_head.joint_proj.weight": random(12, 40), "markov_head.joint_proj.bias": random(12)}
        out |= {"confidence_head.proj.weight": random(1, 36), "confidence_head.proj.bias": random(1)}
    return out


@pytest.fixture(scope="module")
def exact(tiny_model: Callable, tmp_path_factory: Any) -> Callable[[str], tuple[Any, dict[str, Any]]]:
    """``exact(name)``: a float64 target of three tokens, and the options of random heads for it."""
    target = tiny_model("llama", seed=3, vocab_size=V, num_hidden_layers=2, copy="blocks").double()

    def instance(name: str) -> tuple[Any, dict[str, Any]]:
        config = {
            "dflash": {**DFLASH, **SIZES, "block_size": 3, "dflash_config": {"mask_token_id": 1}},
            "dflash-2": {
                **DFLASH2,
                **SIZES,
                "dflash_config": {
                    **DFLASH2["dflash_config"],
                    "block_size": 3,
                    "mask_token_id": 1,
                    "selector_rank": 4,
                    "selector_top_k": 2,
                },
            },
            "dspark": {**DSPARK, **SIZES, "block_size": 2, "target_layer_ids": [0, 1], "markov_head_type": "rnn"},
            "p-eagle": {
                **P_EAGLE,
                "mask_token_id": 1,
                "eagle_aux_hidden_state_layer_ids": [1, 2],
                "transformer_layer_config": {**P_EAGLE["transformer_layer_config"], **SIZES},
            },
        }[name]
        path = written(tmp_path_factory.mktemp(f"exact-{name}"), config, tensors(name))
        return target, {"model": path, "layers": LAYERS}

    return instance


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "name, gamma, more, verifier",
    [
        ("dflash", 1, {}, "token"),
        ("dflash-2", 1, {}, "block"),
        ("dspark", 1, {}, "block"),
        ("p-eagle", 1, {}, "token"),
        pytest.param("dflash", 2, {}, "token", marks=SLOW),
        pytest.param("dflash", 2, {}, "block", marks=SLOW),
        pytest.param("dflash-2", 2, {}, "block", marks=SLOW),
        pytest.param("p-eagle", 2, {}, "token", marks=SLOW),
        pytest.param("p-eagle", 2, {}, "block", marks=SLOW),
        pytest.param("dspark", 2, {}, "block", marks=SLOW),
        pytest.param("dspark", 2, {"confidence": 0.5}, "token", marks=SLOW),
        pytest.param("dspark", 2, {"temperature": 0}, "token", marks=SLOW),
        pytest.param("dflash", 2, {"policy": {"name": "confidence", "threshold": 0.4}}, "token", marks=SLOW),
    ],
)
def test_joint_distribution_of_two_steps_is_targets(
    enumerate_model: Callable, exact: Callable, name: str, gamma: int, more: dict[str, Any], verifier: str
) -> None:
    target, options = exact(name)
    own = {**options, "gamma": gamma, **more}
    drafter = name.removesuffix("-2")
    certificate = enumerate_model(target, drafter, own, verifier, prompt=[2, 0, 1], depth=gamma)
    assert certificate.tv < 1e-6  # transformers norms in float32
    assert all(0.02 < tau < gamma for tau in certificate.expected_tau)


def test_uncorrected_distribution_is_not_sampled_one(enumerate_model: Callable, exact: Callable) -> None:
    """The test above can fail: q of the block's own logits, where the tokens were drawn from the corrected ones."""
    target, options = exact("dspark")
    drafter = plugins.get("drafters", "dspark")
    propose, next_logits = drafter.propose, drafter.next_logits

    def propose_with_uncorrected_q(self: Any, sequences: Any, rng: Any) -> Draft:
        length: list[Tensor] = []
        self.next_logits = lambda logits, states: length.append(logits) or next_logits(self, logits, states)
        draft = propose(self, sequences, rng)
        if draft.q is not None:
            draft.q = self.sampling.probs(length[-1])[:, : draft.q.shape[1]].contiguous()
        return draft

    drafter.propose = propose_with_uncorrected_q
    try:
        own = {**options, "gamma": 1}
        certificate = enumerate_model(target, "dspark", own, "token", prompt=[2, 0], depth=1)
    finally:
        drafter.propose = propose
    assert certificate.tv > 1e-3
