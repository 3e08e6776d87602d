"""Early exit: the target's first layers draft, and what they computed is taken up by the verification."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from crossdraft_drafters.self_speculation.early_exit import EarlyExit
from crossdraft_layers import layer_fork
from draft_contexts import GivenContext
from tiny_models import generated, save_model

import crossdraft
from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft_kind import DETERMINISTIC
from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.errors import ContractError, ModelError
from crossdraft.framework.lm.transformers_lm import TransformersLM

PROMPTS = [[5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15]]
NEW = 14


@pytest.fixture(scope="module")
def deep(tiny_model: Callable) -> Any:
    """Five layers whose later ones contribute little, so that early exits are sometimes accepted."""
    model = tiny_model("llama", seed=4, copy="early-exit", num_hidden_layers=5)
    with torch.no_grad():
        for layer in model.model.layers[2:]:
            layer.self_attn.o_proj.weight *= 0.15
            layer.mlp.down_proj.weight *= 0.15
    return model


def decoder(model: Any, batch_size: int, temperature: float, *, drafter: Any = EarlyExit, rule: str = "", **loop: Any):
    lm, sampling = TransformersLM(model, batch_size, 96), Sampling(temperature=temperature)
    options = {"exit_layer": 2, "gamma": 4, **loop.pop("options", {})}
    context = GivenContext(lm, sampling, 96, target_model=model)
    verifier = plugins.get("verifiers", rule or ("greedy" if temperature == 0 else "block"))
    early_exit = drafter(drafter.Config(**options), context)
    loop = {"max_new_tokens": NEW, "rng": CounterRng(3), "validate": "always", **loop}
    return Decoder(lm, early_exit, verifier(), sampling=sampling, **loop)


def answers(loop: Decoder, prompts: Any = PROMPTS) -> list[list[int]]:
    return [r.tokens for r in sorted(loop.run(prompts), key=lambda response: response.index)]


def plain(model: Any) -> list[list[int]]:
    return generated(model, PROMPTS, NEW)


@pytest.mark.parametrize(
    "batch_size, policy",
    [
        (1, "static"),
        (8, "static"),
        (8, {"name": "confidence", "threshold": 0.2}),
        pytest.param(1, {"name": "confidence", "threshold": 0.2}, marks=pytest.mark.slow),
        pytest.param(8, "heuristic", marks=pytest.mark.slow),
    ],
)
def test_greedy_text_is_transformers_own(deep: Any, batch_size: int, policy: Any) -> None:
    reference = plain(deep)
    events: list[Any] = []
    loop = decoder(deep, batch_size, 0.0, options={"policy": policy}, on_step=events.append)
    assert answers(loop) == reference
    assert any(max(event.accepted) > 0 for event in events), "nothing was accepted, so nothing was tried"
    assert all(event.scores.resume_matches is not None for event in events if event.draft.width)


class Counted:
    """Tokens that every decoder layer is fed, whoever calls it; the target's own modules are shared by its forks."""

    def __init__(self, model: Any):
        self.tokens: Counter[int] = Counter()
        self.heads = 0
        self._hooks = [
            layer.register_forward_hook(
                lambda _, args, __, i=i: self.tokens.update({i: args[0].shape[0] * args[0].shape[1]})
            )
            for i, layer in enumerate(model.model.layers)
        ]
        self._hooks.append(model.lm_head.register_forward_hook(self._head))

    def _head(self, _: Any, args: Any, __: Any) -> None:
        self.heads += args[0].shape[0] * args[0].shape[1]

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


@pytest.mark.parametrize("batch_size, temperature", [(1, 0.0), (3, 1.0)])
def test_every_layer_is_run_once_for_every_token(deep: Any, batch_size: int, temperature: float) -> None:
    """Counted: of a step the first layers see root and draft once, in drafting or after it, and so do the others."""
    events: list[Any] = []
    # Prompts that share a pass are padded, and padding would be counted.
    loop = decoder(deep, batch_size, temperature, on_step=events.append, prefill_tokens=0)
    counted = Counted(deep)
    try:
        answers(loop, PROMPTS[:batch_size])
    finally:
        counted.close()
    prefill = sum(len(prompt) - 1 for prompt in PROMPTS[:batch_size])
    steps = sum(batch_size * (1 + event.draft.width) for event in events)
    assert any(event.draft.width == 4 for event in events)
    assert counted.tokens == Counter(dict.fromkeys(range(5), prefill + steps))
    # The head: a pass a drafted token, one over the whole draft, none for what the first layers were lacking. Prefill
    # keeps the logits of one token.
    drafting = sum(batch_size * event.draft.width for event in events)
    assert counted.heads == steps + drafting + sum(len(prompt) > 1 for prompt in PROMPTS[:batch_size])


def test_without_taking_up_first_layers_run_twice(deep: Any, monkeypatch: Any) -> None:
    """Control for the previous test: without sharing it fails."""
    monkeypatch.setattr(layer_fork, "_can_split", lambda model, shared: False)
    events: list[Any] = []
    loop = decoder(deep, 1, 0.0, on_step=events.append)
    counted = Counted(deep)
    try:
        responses = answers(loop, PROMPTS[:1])
    finally:
        counted.close()
    assert responses == plain(deep)[:1], "and the text is the same"
    assert counted.tokens[0] == counted.tokens[1] > counted.tokens[2] == counted.tokens[4]
    assert counted.tokens[0] - counted.tokens[4] == sum(event.draft.width for event in events)


def test_keys_and_values_are_those_of_pass_of_whole_model(deep: Any) -> None:
    """In every layer, for everything that was committed."""
    loop = decoder(deep, 2, 1.0, max_new_tokens=40)
    for row in range(2):
        loop.start(row, PROMPTS[row + 1], row, row)
    for _ in range(4):
        loop.step()
    for row, history in enumerate(loop.sequences.history):
        separate = TransformersLM(deep, 1, 96)
        separate.start(0, history)
        length = loop.target.lengths[row]
        assert length == len(history) - 1 > len(PROMPTS[row + 1]) + 3
        for ours, other in zip(loop.target.cache.layers, separate.cache.layers, strict=True):
            for name in ("keys", "values"):
                torch.testing.assert_close(
                    getattr(ours, name)[row, :, :length], getattr(other, name)[0, :, :length], atol=2e-4, rtol=2e-4
                )


class Liar(EarlyExit):
    """Feeds its fork other tokens than it drafts, from the third step on."""

    name = "liar"
    steps = 0

    def propose(self, sequences: Any, rng: Any) -> Any:
        draft = super().propose(sequences, rng)
        self.steps += 1
        if self.steps > 2 and draft.width:
            draft.tokens[:, 0] = (draft.tokens[:, 0] + 1) % self.context.vocab_size
        return draft


@pytest.mark.parametrize("validate", ["always", "never"])
def test_fork_that_was_fed_other_tokens_is_found(deep: Any, validate: str) -> None:
    """Checked in every step, validated or not: otherwise the target would score other tokens."""
    loop = decoder(deep, 2, 0.0, drafter=Liar, validate=validate)
    with pytest.raises(ContractError, match="drafter 'liar' drafted other tokens than it fed to a fork in slot 0"):
        answers(loop)


def test_resume_from_needs_chain(deep: Any) -> None:
    class Tree(EarlyExit):
        name = "begun-tree"

        def propose(self, sequences: Any, rng: Any) -> Any:
            draft = super().propose(sequences, rng)
            draft.kind = DETERMINISTIC
            return draft

    with pytest.raises(ContractError, match="has resume_from and a draft 'deterministic'"):
        answers(decoder(deep, 1, 0.0, drafter=Tree))


OTHERS = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "opt", "gpt-neox", "mistral-sliding")]


@pytest.mark.parametrize("family", ["gemma3", "gpt2", *OTHERS])
def test_other_architectures(tiny_model: Callable, family: str) -> None:
    model = tiny_model(family, copy="early-exit")
    reference = tiny_model(family, copy="reference")
    events: list[Any] = []
    loop = decoder(model, 3, 0.0, options={"exit_layer": 1, "gamma": 3}, on_step=events.append)
    assert answers(loop) == plain(reference)
    assert all(event.scores.resume_matches is not None for event in events if event.draft.width)


def test_model_that_hands_on_more_than_hidden_states_is_run_whole(deep: Any, tiny_model: Callable) -> None:
    """Tried once per model: its last layer adds the first layer's output, so it cannot resume after the second."""
    model = tiny_model("llama", seed=6, copy="residual", num_hidden_layers=3)
    first, last = model.model.layers[0], model.model.layers[2]
    kept: list[Any] = []
    first.register_forward_hook(lambda *call: kept.append(call[2]))
    last.register_forward_hook(lambda _, args, out: out + 0.5 * kept[-1] if kept[-1].shape == out.shape else out * 0)
    assert not layer_fork._can_split(model, 1) and layer_fork._can_split(deep, 2)


def test_exit_that_leaves_no_layer_is_refused(deep: Any) -> None:
    with pytest.raises(ModelError, match="exit_layer is 5, but '' has 5 layers"):
        decoder(deep, 1, 0.0, options={"exit_layer": 5})


def test_default_is_quarter(tiny_model: Callable) -> None:
    model = tiny_model("llama", seed=5, copy="eight", num_hidden_layers=8)
    assert decoder(model, 1, 0.0, options={"exit_layer": None}).drafter.model.lm.model.config.num_hidden_layers == 8
    fork = decoder(model, 1, 0.0, options={"exit_layer": None}).drafter.model.lm
    assert len(fork.model.model.layers) == 2


RULES = [pytest.param(name, marks=pytest.mark.slow) for name in ("token", "sample-match", "traversal", "specinfer")]


@pytest.mark.parametrize("verifier", ["block", "greedy-block", *RULES])
def test_with_every_kind_of_rule(tmp_path: Any, verifier: str) -> None:
    """Greedy block verification needs the distribution after a shortened draft, so the fork is fed its last token."""
    target = crossdraft.load_model(save_model(tmp_path / "target", layers=4), dtype="float32", device="cpu")
    arguments = {"max_new_tokens": 11, "temperature": 1.0, "seed": 5, "verifier": verifier}
    drafter = {"name": "early-exit", "exit_layer": 2, "gamma": 3}
    one, three = (
        crossdraft.generate(target, ["w5 w6 w7", "w9", "w20 w21 w20 w21"], drafter=drafter, batch_size=b, **arguments)
        for b in (1, 3)
    )
    assert [r.tokens for r in one] == [r.tokens for r in three]
    assert all(len(r.tokens) == 11 or r.finish_reason == "stop" for r in one)
