"""Teacher forcing: the same numbers as the loop's own drafts, as a fresh drafter's, and as one pass."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import strategies
import torch
from crossdraft_advisor.replay.acceptance_formulas import survival
from crossdraft_advisor.replay.step_chain import StepAcceptance
from crossdraft_advisor.replay.step_chain import expected_steps as steps_of
from crossdraft_advisor.replay.teacher_forcing.scoring import ScoringRequest, TeacherForcingStepRng, score_drafters
from crossdraft_drafters.self_speculation.pass_weights import save_embeddings
from feature_heads import LAYERS, make_head
from medusa_heads import MEDUSA, Weights
from replay_fixtures import RecordedResponse, Run, configured, fresh, making, run, score_drafter
from safetensors.torch import save_file

from crossdraft import Drafter
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.lm.transformers_lm import TransformersLM

#: Few tokens, so that drafts of random heads are right now and then.
V = 11
WARM = Sampling(temperature=1.0)
PROMPTS = [[5, 6, 7, 5, 6], [9, 8], [3], [1, 2, 1, 2, 1, 2, 3], [4, 0, 10]]
ENDS = [5, 1, 8, 0, 3]


@pytest.fixture(scope="module")
def target(tiny_model: Callable) -> Any:
    return tiny_model("llama", num_hidden_layers=4, vocab_size=V, copy="replay")


@pytest.fixture(scope="module")
def small(tiny_model: Callable) -> Any:
    return tiny_model("llama", num_hidden_layers=4, vocab_size=V, noise=0.4, copy="replay")


@pytest.fixture(scope="module")
def outputs(target: Any) -> list[RecordedResponse]:
    """Responses of several lengths, one of them empty, in no order."""
    plain = run(making(target, WARM), configured("none"), "token", PROMPTS, new=8)
    return [RecordedResponse(r.prompt, r.tokens[:end]) for r, end in zip(plain.responses, ENDS, strict=True)]


@pytest.fixture(scope="module")
def heads(target: Any, tmp_path_factory: Any) -> Callable[[str], tuple[Any, Any]]:
    """``heads(name)``: a drafter with random heads, which is right now and then, and its options."""

    def measured(name: str, **options: Any) -> tuple[Any, Any]:
        path: Path = tmp_path_factory.mktemp(name)
        torch.manual_seed(5)
        if name == "medusa":
            save_file(Weights(rows=V, seed=3).v01(), path / "medusa_lm_head.safetensors")
            (path / "config.json").write_text(json.dumps(MEDUSA), encoding="utf-8")
        elif name == "pass":
            save_embeddings(path, torch.randn(2, target.config.hidden_size), target="tiny", sha256="")
        else:
            make_head(name, target).save(path)
        return configured(name, model=str(path), **({"layers": LAYERS} if name == "eagle3" else {}), **options)

    return measured


def same(one: Any, other: Any, tolerance: float = 2e-4) -> None:
    assert np.array_equal(np.isneginf(one.log_q), np.isneginf(other.log_q))
    assert np.allclose(np.exp(one.log_q), np.exp(other.log_q), atol=tolerance)
    left = len(one.log_p) - np.arange(len(one.log_p))  # drafts past the end of the text are unknown
    assert np.array_equal(np.minimum(one.lengths, left), np.minimum(other.lengths, left))
    assert np.allclose(one.log_p, other.log_p, atol=tolerance)


# -- one pass over the text, and drafting from each of its tokens -----------------------------------------------


@pytest.mark.parametrize(
    "sampling, options",
    [
        (WARM, {}),
        (Sampling(temperature=0), {}),
        pytest.param(Sampling(temperature=0.7, top_p=0.8), {}, marks=pytest.mark.slow),
        pytest.param(Sampling(temperature=0), {"temperature": 1.0}, marks=pytest.mark.slow),
        (WARM, {"policy": {"name": "confidence", "threshold": 0.5}}),
        pytest.param(
            WARM, {"policy": {"name": "confidence", "stop": "before", "threshold": 0.7}}, marks=pytest.mark.slow
        ),
        pytest.param(
            Sampling(temperature=0), {"policy": {"name": "confidence", "threshold": 0.6}}, marks=pytest.mark.slow
        ),
    ],
)
def test_draft_model_from_text_is_one_that_drafts(
    target: Any,
    small: Any,
    outputs: list[RecordedResponse],
    sampling: Sampling,
    options: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drafter, make = configured("draft-model", model="small", **options), making(target, sampling, small)
    quick = list(score_drafter(drafter, outputs, make, depth=6, rows=3))
    monkeypatch.setattr(drafter[0], "text_distribution", Drafter.text_distribution)
    slow = list(score_drafter(drafter, outputs, make, depth=6, rows=3))
    assert [len(item.log_p) for item in quick] == ENDS
    for item, other in zip(quick, slow, strict=True):
        if "policy" in options and sampling.temperature == 0:
            # Behind a token that it would not draft, one looks at the text and the other at its own tokens.
            alive = ~np.isneginf(item.log_q)
            ends = alive.sum(1) < np.minimum(item.lengths, other.lengths)
            assert np.array_equal(alive, ~np.isneginf(other.log_q))
            assert np.array_equal(item.lengths[~ends], other.lengths[~ends])
        else:
            same(item, other)


def test_numbers_are_those_of_plain_models(target: Any, small: Any, outputs: list[RecordedResponse]) -> None:
    sampling = Sampling(temperature=0.8)
    result = list(
        score_drafter(
            configured("draft-model", model="small", gamma=2), outputs, making(target, sampling, small), depth=5
        )
    )
    for text, item in zip(outputs, result, strict=True):
        n = len(text.tokens)
        if not n:
            continue
        ids = torch.tensor([[*text.prompt, *text.tokens]])
        at = torch.arange(n)
        for model, check in ((small, item.log_q[:, 0]), (target, item.log_p)):
            with torch.no_grad():
                probs = (model(ids).logits[0, len(text.prompt) - 1 : -1] / 0.8).log_softmax(-1)
            assert np.allclose(probs[at, torch.tensor(text.tokens)].numpy(), check, atol=1e-3)
        assert (item.lengths == 5).all()
        assert np.allclose(item.log_q[0, : min(5, n)], item.log_q[range(min(5, n)), 0])


def test_recorded_log_p_is_used_instead_of_target(target: Any, small: Any, outputs: list[RecordedResponse]) -> None:
    class Silent(TransformersLM):
        def forward(self, *args: Any, **inputs: Any) -> Any:
            raise AssertionError("the target was asked")

    texts = [RecordedResponse(text.prompt, text.tokens, [-0.5] * len(text.tokens)) for text in outputs]
    make, drafter = making(target, WARM, small, lm=Silent), configured("draft-model", model="small")
    assert all((item.log_p == -0.5).all() for item in score_drafter(drafter, texts, make, depth=3))
    with pytest.raises(AssertionError, match="was asked"):
        list(score_drafter(drafter, outputs, make, depth=3))
    cold = making(target, Sampling(temperature=0), small)
    assert all((item.log_p == 0).all() for item in score_drafter(drafter, texts, cold, depth=3))


# -- what a run drew ---------------------------------------------------------------------------------------------


def agree(measured: Run, scores: list[Any], tolerance: float = 2e-4) -> int:
    """Number of drafted prefix tokens equal to the response's; asserts that their q equals that of replay."""
    checked = 0
    for index, start, tokens, q in measured.steps:
        log_q, x = scores[index].log_q, measured.responses[index].tokens
        for j, (token, probs) in enumerate(zip(tokens, q, strict=True)):
            if start + j >= len(x):
                break
            if token != x[start + j]:
                assert np.exp(log_q[start, j]) < 1 - 1e-6
                break
            assert abs(np.exp(log_q[start, j]) - probs) < tolerance
            checked += 1
    return checked


QUICK = [("draft-model", 0.0), ("eagle3", 1.0), ("medusa", 1.0), ("early-exit", 1.0), ("pass", 1.0)]
SLOW = [
    *((name, 0.0) for name in ("eagle", "eagle3", "mtp", "medusa", "early-exit", "pass")),
    *((name, 0.0) for name in ("linear-head", "prompt-lookup")),
    *((name, 1.0) for name in ("draft-model", "eagle", "mtp", "linear-head", "prompt-lookup")),
]


def case(name: str, heads: Callable, small: Any, target: Any, sampling: Sampling, **more: Any) -> tuple[Any, Any]:
    """A drafter of three tokens, and what makes its context."""
    if name == "linear-head":
        drafter = strategies.LinearHead, strategies.LinearHead.Config(gamma=3)
    elif name == "early-exit":
        drafter = configured(name, gamma=3, exit_layer=1)
    elif name in ("draft-model", "prompt-lookup"):
        drafter = configured(name, gamma=3, **({"model": "small"} if name == "draft-model" else {}))
    else:
        drafter = heads(name, **({} if name == "medusa" else {"gamma": 3}))
    return drafter, making(target, sampling, small, **more)


@pytest.mark.parametrize("name, temperature", [*QUICK, *(pytest.param(*one, marks=pytest.mark.slow) for one in SLOW)])
def test_scores_equal_q_of_run(heads: Callable, target: Any, small: Any, name: str, temperature: float) -> None:
    drafter, make = case(name, heads, small, target, Sampling(temperature=temperature))
    measured = run(make, drafter, "token", PROMPTS, new=16, rows=5)
    result = list(score_drafter(drafter, measured.responses, make, depth=3, rows=3))
    assert agree(measured, result) >= 2


@pytest.mark.parametrize(
    "name",
    [*("eagle3", "medusa"), *(pytest.param(n, marks=pytest.mark.slow) for n in ("eagle", "mtp", "early-exit", "pass"))],
)
def test_scores_equal_new_drafter(
    heads: Callable, target: Any, small: Any, outputs: list[RecordedResponse], name: str
) -> None:
    drafter, make = case(name, heads, small, target, WARM)
    result = list(score_drafter(drafter, outputs, make, depth=3, rows=3))
    for text, item in zip(outputs, result, strict=True):
        for t in range(0, len(text.tokens), 2):
            n = min(3, len(text.tokens) - t)
            draft = fresh(make, drafter, text, t, n, lambda rest: TeacherForcingStepRng(torch.tensor([rest]), name))
            count = int(draft.count[0])
            assert min(item.lengths[t], n) == count
            q = draft.q[0, range(count), list(text.tokens[t : t + count])] if count else torch.zeros(0)
            assert np.allclose(np.exp(item.log_q[t, :count]), q.numpy(), atol=2e-4)


class Shifted(TransformersLM):
    """A target whose hidden states are those of the token after."""

    def forward(self, *args: Any, **inputs: Any) -> Any:
        logits, hidden = super().forward(*args, **inputs)
        return logits, hidden if hidden is None else hidden.roll(1, -1)

    def start(self, row: int, prompt: Any, **inputs: Any) -> Any:
        hidden = super().start(row, prompt, **inputs)
        return hidden if hidden is None else hidden.roll(1, 0)


@pytest.mark.parametrize(
    "name", ["eagle3", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eagle", "mtp", "medusa"))]
)
def test_wrong_place_of_hidden_states_is_seen(
    heads: Callable, target: Any, small: Any, outputs: list[RecordedResponse], name: str
) -> None:
    drafter, make = case(name, heads, small, target, WARM)
    _, wrong = case(name, heads, small, target, WARM, lm=Shifted)
    pairs = zip(
        score_drafter(drafter, outputs, make, depth=3), score_drafter(drafter, outputs, wrong, depth=3), strict=True
    )
    assert max(np.abs(np.exp(a.log_q) - np.exp(b.log_q)).max(initial=0) for a, b in pairs) > 0.05


# -- against runs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, rule, sequences",
    [
        ("draft-model", "block", 1),
        pytest.param("draft-model", "token", 1, marks=pytest.mark.slow),
        pytest.param("eagle3", "block", 1, marks=pytest.mark.slow),
        pytest.param("draft-model-iid", "specinfer", 3, marks=pytest.mark.slow),
        pytest.param("draft-model-iid", "spectr", 3, marks=pytest.mark.slow),
    ],
)
def test_replay_of_runs_own_responses_agrees_with_run(
    heads: Callable, target: Any, small: Any, name: str, rule: str, sequences: int
) -> None:
    """Rounds of each response, counted and expected given it: the differences have mean 0."""
    more = {"model": "small"} if name.startswith("small") else {}
    kind = {"K": sequences} if sequences > 1 else {}
    drafter = configured(name, gamma=3, **more, **kind) if more else heads(name, gamma=3)
    make = making(target, Sampling(temperature=1.3), small)
    measured = run(make, drafter, rule, PROMPTS * 12, new=8, rows=60, validate="never")
    many = 0 if sequences == 1 else sequences
    result = list(score_drafter(drafter, measured.responses, make, depth=3, sequences=many))
    accepted = [StepAcceptance(survival(rule, item, [sequences])[sequences], item.lengths, 8) for item in result]
    expected = steps_of(accepted, [3]).steps[:, 0]
    off = measured.counts() - expected
    z = off.mean() / (off.std(ddof=1) / len(off) ** 0.5)
    assert abs(z) < 3.5 and off.std() > 0.1
    # Another rule's acceptance, or steps that start one token later, would be seen.
    wrong = [StepAcceptance(item.survival**2, item.lengths, 8) for item in accepted]
    off = measured.counts() - steps_of(wrong, [3]).steps[:, 0]
    assert abs(off.mean() / (off.std(ddof=1) / len(off) ** 0.5)) > 4


def test_heads_share_passes_of_target(
    heads: Callable, target: Any, small: Any, outputs: list[RecordedResponse]
) -> None:
    """Heads that read other layers, and a draft model, whose log P comes from the same passes."""
    passes = 0

    class Counted(TransformersLM):
        def forward(self, *args: Any, **inputs: Any) -> Any:
            nonlocal passes
            passes += 1
            return super().forward(*args, **inputs)

    drafters = [case(name, heads, small, target, WARM)[0] for name in ("eagle3", "medusa", "draft-model")]
    separate = [
        list(score_drafter(drafter, outputs, making(target, WARM, small), depth=3, rows=5)) for drafter in drafters
    ]
    make = making(target, WARM, small, lm=Counted)
    side_by_side = list(score_drafters([ScoringRequest(drafter, 3) for drafter in drafters], outputs, make, rows=5))
    assert passes == max(ENDS)  # a token at a time, once for everyone
    for i, own in enumerate(separate):
        for item, other in zip(own, side_by_side, strict=True):
            same(item, other[i])
