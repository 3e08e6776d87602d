"""`dflash`, `dspark` and `p-eagle`: distributions of a block, and their consistency across steps.

Most heads here are random; some are trained, in a second each, on one text of a tiny target.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from block_heads import BLOCK, DFLASH2, FILES, LAYERS, Plain, dflash2, dspark, kept, overfit, written
from draft_contexts import GivenContext
from feature_heads import PROMPTS, START, taus_of
from tiny_models import argmax_text

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.lm.transformers_lm import TransformersLM

NAMES = tuple(FILES)
#: Drafted tokens of a whole block.
DRAFTS = {"dflash": BLOCK - 1, "dspark": BLOCK, "p-eagle": 4}


def drafter_of(name: str) -> str:
    """The drafter of ``dflash-2`` and of DSpark's other kinds, ``dspark-gated`` and ``dspark-rnn``."""
    return name if name in FILES else name.partition("-")[0]


def options(name: str, directory: str, **more: Any) -> dict[str, Any]:
    return {"model": directory, "layers": LAYERS, **({"gamma": 4} if name == "p-eagle" else {}), **more}


@pytest.fixture(scope="module")
def target(tiny_model: Callable) -> Any:
    return tiny_model("llama", seed=2, num_hidden_layers=4)


@pytest.fixture(scope="module")
def text(target: Any) -> list[int]:
    return argmax_text(target, START, 25)


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> Callable[[str], str]:
    """``files(name)``: a directory with random heads of a drafter, or of a variant (see `drafter_of`)."""

    @cache
    def directory(name: str) -> str:
        config, tensors = FILES[drafter_of(name)]
        kind = name.removeprefix(drafter_of(name))[1:]
        if name == "dflash-2":
            config, tensors = DFLASH2, dflash2
        elif kind:
            config, tensors = {**config, "markov_head_type": kind}, lambda: dspark(kind)
        return written(tmp_path_factory.mktemp(name), config, tensors())

    return directory


@pytest.fixture(scope="module")
def trained(target: Any, text: list[int], files: Callable, tmp_path_factory: Any) -> Callable[[str], str]:
    """``trained(name)``: a directory with heads that know `text`."""

    @cache
    def directory(name: str) -> str:
        slots, drafter = TransformersLM(target, 1, 64), plugins.get("drafters", name)
        context = GivenContext(slots, Sampling(), 64, target_model=target)
        head = drafter(drafter.Config(**options(name, files(name))), context).head
        with torch.no_grad():
            states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
        overfit(name, head, torch.stack([states[i][0] for i in LAYERS], 1), text[:19], steps=45)
        return written(tmp_path_factory.mktemp(f"{name}-trained"), FILES[name][0], kept(head))

    return directory


@pytest.fixture(scope="module")
def make(heads_decoder: Callable, target: Any, files: Callable) -> Callable[..., Any]:
    def build(name: str, verifier: str, batch_size: int, temperature: float = 0, model: str = "", **more: Any) -> Any:
        drafter = drafter_of(name)
        own = options(drafter, model or files(name)) | more.pop("options", {})
        more = {"max_new_tokens": 12, **more}
        sampling = Sampling(temperature=temperature)
        return heads_decoder(target, drafter, own, verifier, batch_size=batch_size, sampling=sampling, **more)

    return build


# -- distributions -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "dflash",
        "dflash-2",
        "p-eagle",
        "dspark-rnn",
        *[pytest.param(n, marks=pytest.mark.slow) for n in ("dspark", "dspark-gated")],
    ],
)
def test_draft_probs_match_plain_computation(make: Callable, target: Any, name: str) -> None:
    """Over steps with partial acceptance, in rows of different length, computed only from the text.

    At a high temperature all distributions are close, so steps end at any position. The test detects features that are
    missing, stale or of another token, keys in the wrong slot, and blocks that attend to the wrong positions.
    """
    temperature, drafter = 8.0, drafter_of(name)
    loop = make(name, "token", 3, temperature, max_new_tokens=40)
    plain = Plain({key: tensor.clone() for key, tensor in kept(loop.drafter.head).items()}, target)
    propose, checked = loop.drafter.propose, 0

    def watched(sequences: Any, rng: Any) -> Draft:
        nonlocal checked
        draft = propose(sequences, rng)
        for row, history in enumerate(sequences.history):
            n = int(draft.valid[row].sum())
            if len(history) == 1 and name == "p-eagle":
                assert n == 0
                continue
            assert n == DRAFTS[drafter] and loop.drafter.lm.lengths[row] == len(history) - 1
            states = target(torch.tensor([history]), output_hidden_states=True).hidden_states
            hidden = torch.stack([states[i][0] for i in LAYERS], 1)[:-1]
            expected = plain.logits(drafter, hidden, history, draft.tokens[row, :n].tolist())
            assert len(expected) == n
            for i, logits in enumerate(expected):
                probs = (logits / temperature).softmax(-1)
                torch.testing.assert_close(draft.q[row, i], probs, atol=1e-5, rtol=1e-3)
                checked += 1
        return draft

    loop.drafter.propose = watched
    taus = taus_of(loop, 4)
    assert checked >= 4 * 2 * 3 and min(taus) < DRAFTS[drafter] and max(taus) > 1
    assert loop.drafter.passes == 4  # one for a block, whatever was committed


@pytest.mark.parametrize("name", NAMES)
def test_wrong_draft_probs_are_detected(make: Callable, target: Any, name: str) -> None:
    """Counter-test: a feature that is one position off changes the distribution."""
    loop = make(name, "token", 1, 1.0)
    fuse = loop.drafter.head.fuse
    loop.drafter.head.fuse = lambda hidden: fuse(hidden.roll(1, 0)) if hidden.shape[0] > 3 else fuse(hidden)
    plain = Plain(kept(loop.drafter.head), target)
    loop.start(0, PROMPTS[2])
    history = list(PROMPTS[2])
    with torch.inference_mode():
        draft = loop.drafter.propose(loop.sequences, loop.rng.for_step([0], [len(history)], torch.device("cpu")))
        states = target(torch.tensor([history]), output_hidden_states=True).hidden_states
        hidden = torch.stack([states[i][0] for i in LAYERS], 1)[:-1]
        expected = plain.logits(name, hidden, history, draft.tokens[0].tolist())
    assert float((draft.q[0, 0] - expected[0].softmax(-1)).abs().sum()) > 1e-2


# -- outputs stay the same --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def plainly(heads_decoder: Callable, target: Any) -> Callable[[tuple], list[list[int]]]:
    @cache
    def output(prompts: tuple) -> list[list[int]]:
        loop = heads_decoder(target, "none", {}, "greedy", batch_size=1, max_new_tokens=12)
        results = {r.index: r.tokens for r in loop.run([list(p) for p in prompts])}
        return [results[i] for i in range(len(prompts))]

    return output


@pytest.mark.parametrize("name", NAMES)
def test_text_that_was_learnt_is_accepted_whole(make: Callable, trained: Callable, text: list[int], name: str) -> None:
    """Every token of every block: steps after the first live on features of accepted tokens."""
    (response,) = make(name, "greedy", 1, model=trained(name), max_new_tokens=16).run([START])
    assert response.tokens == text[len(START) : len(START) + 16]
    assert [r.tau for r in response.steps[:3]] == [DRAFTS[name]] * 3


@pytest.mark.parametrize("name", NAMES)
def test_steps_without_drafts_are_made_up_for(make: Callable, plainly: Callable, trained: Callable, name: str) -> None:
    """A policy drafts nothing while two rows are decoded, and more features wait than a step commits."""
    own = {"policy": {"name": "batch-size", "lengths": [[1, 3], [2, 0]]}, "gamma": 3}
    prompts = (tuple(PROMPTS[2]), tuple(START))
    expected = plainly(prompts)
    stop = expected[1][8]
    cut = expected[1].index(stop) + 1
    assert stop not in expected[0] and 6 < cut < 10
    loop = make(name, "greedy", 2, model=trained(name), options=own, eos=[stop])
    responses = {r.index: r for r in loop.run([list(p) for p in prompts])}
    assert responses[1].tokens == expected[1][:cut] and responses[0].tokens == expected[0]
    assert [r.nodes for r in responses[0].steps][: cut + 1] == [0] * cut + [min(3, 12 - cut - 1)]


@pytest.mark.slow
def test_block_stays_inside_context(make: Callable) -> None:
    for name in NAMES:
        prompts = [list(range(85)), list(range(7, 87))]
        for response in make(name, "greedy", 2, max_new_tokens=200).run(prompts):
            assert response.finish_reason == "length" and len(prompts[response.index]) + len(response.tokens) == 96


# -- where a draft ends -----------------------------------------------------------------------------------


def test_confidence_head_ends_draft_before_it_draws(make: Callable, target: Any) -> None:
    """Its word on a token follows from the tokens before it alone."""
    threshold = 0.5
    loop = make("dspark", "token", 3, 8.0, options={"confidence": threshold}, max_new_tokens=40)
    plain = Plain(kept(loop.drafter.head), target)
    propose, visited = loop.drafter.propose, set()

    def watched(sequences: Any, rng: Any) -> Draft:
        draft = propose(sequences, rng)
        for row, history in enumerate(sequences.history):
            n = int(draft.valid[row].sum())
            states = target(torch.tensor([history]), output_hidden_states=True).hidden_states
            hidden = torch.stack([states[i][0] for i in LAYERS], 1)[:-1]
            output = plain.expected(hidden, history, draft.tokens[row, :n].tolist())
            assert all(x >= threshold - 1e-4 for x in output[:n])
            assert n == BLOCK or output[n] < threshold + 1e-4
            visited.add(n)
        return draft

    loop.drafter.propose = watched
    for row, prompt in enumerate(PROMPTS):
        loop.start(row, prompt)
    for _ in range(4):
        with torch.inference_mode():
            loop.step()
    assert len(visited) > 1


@pytest.mark.parametrize("name", NAMES)
def test_policies_end_draft(make: Callable, plainly: Callable, trained: Callable, name: str) -> None:
    own = {"policy": {"name": "confidence", "threshold": 0.5}}
    prompts = tuple(map(tuple, PROMPTS))
    nodes = set()
    for response in make(name, "greedy", 3, model=trained(name), options=own).run([list(p) for p in prompts]):
        assert response.tokens == plainly(prompts)[response.index]
        nodes |= {r.nodes for r in response.steps}
    assert len(nodes) > 1


def test_gamma_cuts_block(make: Callable, target: Any) -> None:
    """The whole block is fed, so shorter drafts have the same first distribution."""
    distributions = []
    for gamma in (1, 3):
        loop = make("dflash", "token", 1, 1.0, options={"gamma": gamma})
        loop.start(0, PROMPTS[2])
        with torch.inference_mode():
            draft = loop.drafter.propose(loop.sequences, loop.rng.for_step([0], [13], torch.device("cpu")))
        assert draft.width == gamma
        distributions.append(draft.q[0, 0])
    assert torch.equal(*distributions)
