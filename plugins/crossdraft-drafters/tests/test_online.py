"""Online distillation: what is rejected is learnt, and no step's q is another step's."""

from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_drafters.online import Online
from tiny_models import save_model
from torch.nn import functional

from crossdraft import Sampling, load_model
from crossdraft.framework import plugins
from crossdraft.framework.api.build import TargetContext, build_decoder, configured, make_slots
from crossdraft.framework.certificate.certify import Certificate, certify
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.table_lm import Toy, ToyContext
from crossdraft.framework.certificate.toys import built_in_toys
from crossdraft.framework.cli.main import main
from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.errors import CrossdraftError

TOYS = {toy.name: toy for toy in built_in_toys()}


def certificate_of(toy: Toy, rule: str, drafter: type[Online] = Online, **options: Any) -> Certificate:
    """Two steps; a first draft of two tokens, because the row that follows the prompt never comes again."""
    config = drafter.Config(**{"model": "toy", "gamma": 2, "every": 1, "learning_rate": 0.5} | options)
    build = lambda context, gamma: drafter(config, context)  # noqa: E731
    return certify(toy, build, plugins.get("verifiers", rule), steps=2, gamma=[config.gamma, 1])


# -- lossless --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "toy"), [("token", "T0"), ("block", "G3")])
def test_running_drafter_is_lossless(rule: str, toy: str) -> None:
    learning, frozen = certificate_of(TOYS[toy], rule), certificate_of(TOYS[toy], rule, every=9)
    assert learning.lossless and frozen.lossless and learning.coverage.drafted
    assert learning.expected_tau[0] == pytest.approx(frozen.expected_tau[0], abs=1e-12)
    assert abs(learning.expected_tau[1] - frozen.expected_tau[1]) > 1e-3, "the second step draws from other weights"


def test_trained_snapshot_is_lossless_and_accepts_more() -> None:
    toy = TOYS["G2"]
    drafter, _ = run_toy(toy, every=4, learning_rate=0.05, tokens=400)
    (table,) = drafter.learner.weights
    snapshot = Toy("snapshot", toy.gamma, toy.target, table.detach().softmax(-1))
    rule, chain = plugins.get("verifiers", "token"), DRAFTS["chain"].build
    before, after = (certify(item, chain, rule, steps=2, markov=True) for item in (toy, snapshot))
    assert after.lossless and after.expected_tau[1] > before.expected_tau[1] + 0.02


class TellsOldLaws(Online):
    """Draws with the new weights but reports q of the initial ones."""

    name = "tells-old-laws"

    def propose(self, sequences: Any, rng: Any) -> Any:
        draft = super().propose(sequences, rng)
        (first,) = self._initial_weights
        if draft.q is not None:
            draft.q = first.softmax(-1)[self._rows(sequences, draft)]
        return draft

    def _rows(self, sequences: Any, draft: Any) -> torch.Tensor:
        root = [[h[-1] if len(h) > 5 else first_row] for h, first_row in zip(sequences.history, [2] * 99, strict=False)]
        return torch.cat([torch.tensor(root), draft.tokens[:, :-1]], 1)


def test_distribution_of_other_weights_is_detected() -> None:
    assert certificate_of(TOYS["T0"], "token", TellsOldLaws, every=9).lossless, "as long as there are no others"
    assert certificate_of(TOYS["T0"], "token", TellsOldLaws).tv > 1e-3


@pytest.mark.slow
def test_command_certifies_it(capsys: Any, tmp_path: Path) -> None:
    drafter = "{name: online, every: 1, gamma: 1, learning_rate: 0.5}"
    assert main(["certify", "--drafter", drafter, "--verifier", "token", "--gamma", "1"]) == 0
    assert " NO" not in capsys.readouterr().out


# -- what is learnt --------------------------------------------------------------------------------------------


def run_toy(toy: Toy, tokens: int = 60, batch_size: int = 1, **options: Any) -> tuple[Online, list[Any]]:
    context = ToyContext(toy.target, toy.drafter, Sampling(), batch_size, 1024, start=len(toy.prompt) - 1)
    config = Online.Config(**{"model": "toy", "gamma": 2} | options)
    rule = plugins.get("verifiers", "token")
    decoder = build_decoder(context, (Online, config), (rule, rule.Config()), max_new_tokens=tokens)
    drafter: Any = decoder.drafter
    return drafter, list(decoder.run([toy.prompt] * batch_size))


def test_update_is_step_of_adam_on_mean_divergence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against autograd on the plain formula, over every update of a run."""
    toy, updates = TOYS["G2"], []
    learn = Online._learn

    def listening(self: Online) -> None:
        places = list(self.rejected)
        learn(self)
        updates.append((places, self.learner.weights[0].detach().clone()))

    monkeypatch.setattr(Online, "_learn", listening)
    run_toy(toy, every=3, learning_rate=0.02, buffer=2)
    assert len(updates) > 4 and {len(places) for places, _ in updates} == {1, 2}
    plain = toy.drafter.log().clone().requires_grad_()
    optimizer = torch.optim.AdamW([plain], lr=0.02, betas=(0.9, 0.95), weight_decay=0.0)
    for places, table in updates:
        rows = [toy.vocab_size if len(item.tokens) == len(toy.prompt) else item.tokens[-1] for item in places]
        p = torch.stack([item.logits for item in places]).clone().softmax(-1)
        assert torch.allclose(p, toy.target[rows])
        optimizer.zero_grad()
        functional.kl_div(plain[rows].log_softmax(-1), p, reduction="batchmean").backward()
        torch.nn.utils.clip_grad_norm_([plain], 1.0)
        optimizer.step()
        torch.testing.assert_close(table, plain.detach(), atol=1e-9, rtol=0)


def test_only_rejections_are_learnt_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contents of the buffer: an output text, and a position with a different draft."""
    toy = TOYS["G2"]
    drafter, (response,) = run_toy(toy, every=10_000, buffer=4096, tokens=40)
    steps, output = response.steps, [*toy.prompt, *response.tokens]
    ends, expected = len(toy.prompt), []
    for item in steps:
        if item.tau < min(2, item.limit):
            expected.append(output[: ends + item.tau])
        ends += item.emitted
    assert [item.tokens for item in drafter.rejected] == expected and len(expected) > 5
    same = ToyContext(toy.target, toy.target, Sampling(), 1, 1024, start=len(toy.prompt) - 1)
    rule = plugins.get("verifiers", "token")
    perfect: Any = build_decoder(
        same, (Online, Online.Config(model="toy", every=1)), (rule, rule.Config()), max_new_tokens=30
    )
    list(perfect.run([toy.prompt]))
    assert not perfect.drafter.rejected and torch.equal(perfect.drafter.learner.weights[0], toy.target.log())


def test_runs_repeat_and_reset_forgets() -> None:
    toy, options = TOYS["G2"], {"every": 2, "learning_rate": 0.05, "batch_size": 3}
    (one, first), (two, second) = (run_toy(toy, **options) for _ in range(2))
    assert [r.steps for r in first] == [r.steps for r in second]
    assert torch.equal(one.learner.weights[0], two.learner.weights[0])
    assert not torch.equal(one.learner.weights[0], toy.drafter.log())
    one.reset()
    assert torch.equal(one.learner.weights[0], toy.drafter.log()) and not one.rejected


def test_reported_metadata() -> None:
    config = Online.Config(model="toy")
    traits = Online.traits(config, Sampling())
    assert traits.adapts and not traits.replayable and Online.remembers(config)


# -- models of transformers ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: Any) -> tuple[LoadedModel, LoadedModel]:
    root = tmp_path_factory.mktemp("pair")
    names = [save_model(root / "target"), save_model(root / "small", seed=1)]
    target, small = (load_model(name, dtype="float32", device="cpu") for name in names)
    return target, small


def decoder_of(pair: tuple[LoadedModel, LoadedModel], temperature: float, **options: Any) -> Decoder:
    target, small = pair
    lm, sampling = make_slots(target, 2, 96), Sampling(temperature=temperature)
    context = TargetContext.of(target, lm, sampling, slot=96, sequence=80, load=lambda name, _: small)
    drafter = configured("drafters", {"name": "online", "model": "small", "gamma": 3, **options})
    return build_decoder(context, drafter, configured("verifiers", "token"), max_new_tokens=24)


def test_learning_does_not_change_loaded_model(pair: tuple[LoadedModel, LoadedModel]) -> None:
    before = {name: weight.clone() for name, weight in pair[1].model.named_parameters()}
    prompts = [[5, 6, 7, 8], [9, 10, 11], [5, 9, 5, 9, 5]]
    runs = []
    for all_items in (10_000, 2):
        decoder = decoder_of(pair, 1, every=all_items, learning_rate=1e-2)
        responses = list(decoder.run(prompts))
        rejected = decoder.drafter.rejected  # type: ignore[attr-defined]
        runs.append((decoder, responses, list(rejected)))
    (frozen, _, places), (learning, _, _) = runs
    assert all(torch.equal(before[name], weight) for name, weight in pair[1].model.named_parameters())
    assert all(weight.grad is None for weight in pair[1].model.parameters())

    def divergence(decoder: Any) -> float:
        total = 0.0
        for item in places:
            p = item.logits.clone().softmax(-1)
            with torch.no_grad():
                q = decoder.drafter.learner.logits(item.tokens, [len(item.tokens) - 1])[0].log_softmax(-1)
            total += float(functional.kl_div(q, p, reduction="sum"))
        return total / len(places)

    assert len(places) > 10 and divergence(learning) < 0.9 * divergence(frozen)


def test_slots_match_learner(pair: tuple[LoadedModel, LoadedModel]) -> None:
    """After updates the slots use the changed weights."""
    decoder: Any = decoder_of(pair, 1, every=1, learning_rate=1e-2)
    list(decoder.run([[5, 6, 7, 8]]))
    learner, tokens = decoder.drafter.learner, [5, 9, 6, 7]
    learner.lm.start(0, tokens)
    fed = torch.tensor([[tokens[-1]], [0]])
    with torch.no_grad():
        own = learner.logits(tokens, [3])[0]
    torch.testing.assert_close(learner.lm.forward(fed)[0][0, 0], own, atol=1e-4, rtol=1e-4)


def test_greedy_text_is_targets(pair: tuple[LoadedModel, LoadedModel]) -> None:
    output = {r.index: r.tokens for r in decoder_of(pair, 0, every=1, learning_rate=1e-2).run([[5, 6, 7], [9, 8]])}
    ids = torch.tensor([[5, 6, 7]])
    plain = pair[0].model.generate(ids, max_new_tokens=24, do_sample=False, eos_token_id=None)[0, 3:].tolist()
    assert output[0] == plain


def test_other_backends_cannot_learn(pair: tuple[LoadedModel, LoadedModel]) -> None:
    from dataclasses import replace

    with pytest.raises(CrossdraftError, match="computes no gradients"):
        decoder_of((pair[0], replace(pair[1], backend="llamacpp")), 1)
