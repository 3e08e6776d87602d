"""Look-ahead embeddings: distributions of a draft, no residue in the cache, and unchanged output."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_drafters.self_speculation.pass_ import Pass
from crossdraft_drafters.self_speculation.pass_weights import save_embeddings
from draft_contexts import GivenContext
from medusa_heads import propose
from safetensors.torch import save_file
from tiny_models import generated, save_model
from torch import Tensor

import crossdraft
from crossdraft.framework import plugins
from crossdraft.framework.certificate.certify import TOLERANCE, certify
from crossdraft.framework.certificate.drafts import named_drafter
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.certificate.toys import built_in_toys
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.verifier import incompatible
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.errors import CrossdraftError, ModelError
from crossdraft.framework.lm.transformers_lm import TransformersLM

#: Of different lengths; the first has no committed token before its root.
PROMPTS = [[5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15]]
NEW, L, H = 14, 3, 32


def random(count: int = L, size: int = H, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, size, generator=torch.Generator().manual_seed(2), dtype=dtype)


def loader(embeddings: Tensor, **config: Any) -> Callable[[str], Checkpoint]:
    return lambda name: Checkpoint(name, Path("here"), config, {"embeddings": embeddings}, "here", "")


def decoder(model: Any, batch_size: int, sampling: Sampling, **loop: Any) -> Decoder:
    lm = TransformersLM(model, batch_size, 96)
    context = GivenContext(lm, sampling, 96, target_model=model, load_heads=loader(random()))
    rule = plugins.get("verifiers", "greedy" if sampling.temperature == 0 else "block")
    drafter = Pass(Pass.Config(model="x", **loop.pop("options", {})), context)
    loop = {"max_new_tokens": NEW, "rng": CounterRng(3), "validate": "always", **loop}
    return Decoder(lm, drafter, rule(), sampling=sampling, **loop)


def answers(loop: Decoder) -> list[list[int]]:
    return [r.tokens for r in sorted(loop.run(PROMPTS), key=lambda response: response.index)]


GREEDY = Sampling(temperature=0)
OTHERS = [pytest.param(name, 3, marks=pytest.mark.slow) for name in ("opt", "gpt-neox", "mistral-sliding")]


@pytest.mark.parametrize("family, batch_size", [("llama", 1), ("llama", 3), ("gemma3", 3), ("gpt2", 3), *OTHERS])
def test_greedy_text_is_transformers_own(tiny_model: Callable, family: str, batch_size: int) -> None:
    """And the first token of every draft is the target's own, in rows of any length: it is always accepted."""
    model, events = tiny_model(family, copy="pass"), []
    loop = decoder(model, batch_size, GREEDY, on_step=events.append)
    assert answers(loop) == generated(tiny_model(family), PROMPTS, NEW)
    outcomes = [(tau, n) for event in events for tau, n in zip(event.accepted, event.draft.count.tolist(), strict=True)]
    assert max(n for _, n in outcomes) == L + 1
    assert all(tau >= 1 for tau, n in outcomes if n)


@torch.inference_mode()
def by_hand(model: Any, text: list[int]) -> Tensor:
    """``[L + 1, V]``, the model's logits after a text and L embeddings, without a cache."""
    own = model.get_input_embeddings()(torch.tensor([text]))
    return model(inputs_embeds=torch.cat([own, random()[None]], 1), use_cache=False).logits[0, len(text) - 1 :]


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_q_is_distribution_of_each_embedding(tiny_model: Callable, family: str) -> None:
    """In ragged rows, after some steps, with the run's sampling; and after a draft that was cut short."""
    model, sampling = tiny_model(family, copy="pass"), Sampling(temperature=0.7, top_k=20)
    loop = decoder(model, 3, sampling, max_new_tokens=60)
    for row, prompt in enumerate(PROMPTS):
        loop.start(row, prompt, row, row)
    for steps in range(4):
        draft = propose(loop)
        assert draft.q is not None and draft.width == L + 1
        for row, history in enumerate(loop.sequences.history):
            expected = sampling.probs(by_hand(model, history))
            torch.testing.assert_close(draft.q[row], expected, atol=2e-4, rtol=2e-3)
            assert bool((draft.q[row].gather(1, draft.tokens[row][:, None]) > 0).all())
        loop.sequences.limit[0] = steps % 3
        loop.step()


def test_embeddings_do_not_enter_cache(tiny_model: Callable) -> None:
    """Keys and values of what was committed are those of a pass of the target alone."""
    model = tiny_model("llama", copy="pass")
    loop = decoder(model, 2, Sampling(), max_new_tokens=60)
    for row in range(2):
        loop.start(row, PROMPTS[row + 1], row, row)
    for _ in range(5):
        loop.step()
    for row, history in enumerate(loop.sequences.history):
        separate, length = TransformersLM(model, 1, 96), loop.target.lengths[row]
        separate.start(0, history)
        assert length == len(history) - 1 > len(PROMPTS[row + 1]) + 5
        for ours, other in zip(loop.target.cache.layers, separate.cache.layers, strict=True):
            for name in ("keys", "values"):
                expected_own, theirs = getattr(ours, name)[row, :, :length], getattr(other, name)[0, :, :length]
                torch.testing.assert_close(expected_own, theirs, atol=2e-4, rtol=2e-4)


# -- the certificate ------------------------------------------------------------------------------------


def chain_rules(temperature: float) -> list[str]:
    """Every registered lossless rule that supports its drafts."""
    sampling, rules = Sampling(temperature=temperature), []
    traits = Pass.traits(Pass.Config(model="toy", gamma=2), sampling)
    for name in plugins.entries("verifiers"):
        rule = plugins.get("verifiers", name)
        own = rule.traits(rule.Config())
        if own.lossless and incompatible("pass", traits, name, own, sampling) is None:
            rules.append(name)
    return rules


def toy(name: str) -> Toy:
    return next(toy for toy in built_in_toys() if toy.name == name)


def tv(name: str, verifier: str, temperature: float = 1.0) -> float:
    drafter, rule = named_drafter("{name: pass, gamma: 2}"), plugins.get("verifiers", verifier)
    return certify(toy(name), drafter.build, rule, steps=2, gamma=[2, 2], temperature=temperature).tv


@pytest.mark.parametrize("verifier", chain_rules(1.0))
def test_every_chain_verifier_preserves_distribution(verifier: str) -> None:
    assert tv("T0", verifier) <= TOLERANCE


def test_rules_for_temperature_0_keep_argmax() -> None:
    rules = chain_rules(0.0)
    assert "greedy" in rules and len(chain_rules(1.0)) >= 4
    assert all(tv("G2", rule, 0.0) <= TOLERANCE for rule in rules)


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_distribution_of_real_model(enumerate_model: Callable, exact_model: Any, verifier: str) -> None:
    """Two steps on a transformers model in float64, cache and all; the first token is accepted always."""
    certificate = enumerate_model(
        exact_model,
        "pass",
        {"model": "x", "gamma": 2},
        verifier,
        prompt=[1, 3, 0],
        depth=2,
        load_heads=loader(random(1, 8, torch.float64)),
    )
    assert certificate.tv <= 1e-9
    assert all(1 < tau < 1.9 for tau in certificate.expected_tau)


def test_unsampled_distribution_fails_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Pass.propose

    def swapped(self: Pass, sequences: Any, rng: Any) -> Draft:
        draft = honest(self, sequences, rng)
        draft.q = None if draft.q is None else draft.q.flip(1)
        return draft

    monkeypatch.setattr(Pass, "propose", swapped)
    assert tv("T0", "token") > 0.01


# -- files, and what is refused -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> Any:
    return crossdraft.load_model(save_model(tmp_path_factory.mktemp("target")), dtype="float32", device="cpu")


def test_batched_rows_match_single_rows(target: Any, tmp_path: Path) -> None:
    """From files, sampled, with the digest of the target in the config."""
    save_embeddings(tmp_path, random(2, 16), target="t", sha256=target.sha256)
    arguments = {
        "drafter": {"name": "pass", "model": str(tmp_path)},
        "max_new_tokens": 11,
        "temperature": 1.0,
        "seed": 5,
    }
    one, three = (
        crossdraft.generate(target, ["w5 w6 w7", "w9", "w20 w21 w20 w21"], verifier="block", batch_size=b, **arguments)
        for b in (1, 3)
    )
    assert [r.tokens for r in one] == [r.tokens for r in three]
    assert max(r.tau for response in three for r in response.steps) >= 1


@pytest.mark.parametrize(
    "tensors, config, options, sentence",
    [
        ({"embeddings": random(2, 24)}, {}, {}, "vectors of 24, but the target's embeddings are vectors of 16"),
        (
            {"embeddings": random(2, 16)},
            {"target_sha256": "0123456789abcdef" * 4},
            {},
            "trained for weights '0123456789ab', but the target's are '",
        ),
        (
            {"embeddings": random(2, 16)},
            {},
            {"gamma": 4},
            "gamma is 4, but '.*' has 2 look-ahead embeddings, for 3 tokens; write at most 3",
        ),
        ({"embeddings": random(2, 16) / 0}, {}, {}, "embeddings holds numbers that are not finite"),
        ({"embeddings": random(1, 16)[0]}, {}, {}, r"are one tensor, embeddings \[L, H\]"),
        ({"embeddings": random(2, 16)[:0]}, {}, {}, "they are empty"),
        ({"embeddings": random(1025, 16)}, {}, {}, "they are 1025, and the maximum is 1024"),
        (
            {"0.0.linear.weight": random(16, 16)},
            {},
            {},
            r"they are Medusa heads .* use drafter 'medusa'",
        ),
    ],
)
def test_mismatched_heads_raise(
    target: Any, tmp_path: Path, tensors: Any, config: Any, options: Any, sentence: str
) -> None:
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    drafter = {"name": "pass", "model": str(tmp_path), **options}
    with pytest.raises(CrossdraftError, match=sentence):
        crossdraft.generate(target, ["w5"], drafter=drafter, max_new_tokens=4)


def test_fork_takes_embeddings_of_models_own_size(tiny_model: Callable) -> None:
    lm = TransformersLM(tiny_model("llama"), 1, 32)
    with pytest.raises(
        ModelError, match=r"embeddings have shape \[2, 8\], but those of LlamaForCausalLM are vectors of 32"
    ):
        lm.fork(range(2), embeddings=torch.zeros(2, 8))


def test_model_that_takes_only_tokens_is_refused(tiny_model: Callable, monkeypatch: Any) -> None:
    model = tiny_model("llama", copy="tokens alone")
    forward = type(model).forward

    def tokens_alone(self: Any, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None,
                     past_key_values: Any = None, use_cache: Any = None) -> Any:  # fmt: skip
        return forward(self, input_ids, attention_mask, position_ids, past_key_values, use_cache=use_cache)

    monkeypatch.setattr(model, "forward", tokens_alone.__get__(model))
    with pytest.raises(ModelError, match="takes no inputs_embeds"):
        TransformersLM(model, 1, 32).fork(range(2), embeddings=torch.zeros(2, H))
