"""The draft model that drafts several sequences, fixed trees and dynamic trees, on tiny transformers models.

At temperature 0 the output is that of plain decoding, whatever the tree; the drafter's cache stays right from
step to step; a node's distribution equals a fresh model's; and the dynamic tree equals that of a naive search.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from crossdraft.drafters.autoregressive.trees import grow_dynamic, ordered
from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.draft_kind import DELAYED_IID, DETERMINISTIC, IID

NEW = 10
#: The shortest prompt has no committed token before its root; prompts of different lengths end in different steps.
PROMPTS = ([5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 11, 12, 13])
#: Drafter, its options besides the model, and verifiers of different kinds that support its drafts.
DRAFTS = {
    "iid": ("draft-model-iid", {"gamma": 3, "K": 3, "temperature": 1}, ("greedy", "spectr", "multipath-block")),
    "iid-delayed": (
        "draft-model-iid",
        {"gamma": 3, "K": 3, "delay": 1, "temperature": 1},
        ("greedy", "spectr", "specinfer"),
    ),
    "iid-argmax": ("draft-model-iid", {"gamma": 3, "K": 3, "temperature": 0}, ("greedy",)),
    "branching": ("draft-model-tree", {"branching": [2, 2, 1], "temperature": 1}, ("traversal", "specinfer")),
    # Near the end of a sequence only its path is left, which is verified as a tree all the same.
    "path-then-branches": (
        "draft-model-tree",
        {"branching": [1, 2, 1], "siblings": "greedy", "temperature": 1},
        ("traversal", "univer"),
    ),
    "choices": (
        "draft-model-tree",
        {"choices": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]], "siblings": "top-k"},
        ("greedy", "sample-match"),
    ),
    "gaps": ("draft-model-tree", {"choices": [[0], [2], [2, 1]], "siblings": "top-k", "temperature": 1}, ("greedy",)),
    "greedy-siblings": (
        "draft-model-tree",
        {"branching": [3, 1, 2], "siblings": "greedy", "temperature": 1},
        ("greedy-draft-optimal",),
    ),
    "sequoia": (
        "draft-model-tree",
        {"growth": "sequoia", "nodes": 7, "depth": 3, "acceptance": [0.5, 0.3, 0.1], "temperature": 1},
        ("specinfer", "traversal"),
    ),
    "opt-tree": ("draft-model-tree", {"growth": "opt-tree", "nodes": 6, "depth": 3, "threshold": 0}, ("greedy",)),
    "dynamic": ("draft-model-dynamic-tree", {"depth": 3, "top_k": 3, "nodes": 8}, ("greedy", "traversal")),
}


def make(
    decoder: Callable, tiny_model: Callable, family: str, label: str, verifier: str, batch_size: int, **loop: Any
) -> Any:
    name, options, _ = DRAFTS[label]
    return decoder(
        tiny_model(family),
        plugins.get("drafters", name),
        {"model": "noisy", **options},
        plugins.get("verifiers", verifier),
        batch_size=batch_size,
        drafting=tiny_model(family, noise=0.1),
        **{"max_new_tokens": NEW, **loop},
    )


@pytest.fixture(scope="module")
def plain(decoder: Callable, tiny_model: Callable) -> Callable[[str], dict[int, list[int]]]:
    """``plain(family)``: the tokens of every prompt, decoded one by one without drafts."""
    known: dict[str, dict[int, list[int]]] = {}

    def continue_(family: str) -> dict[int, list[int]]:
        if family not in known:
            none = plugins.get("drafters", "none")
            loop = decoder(
                tiny_model(family), none, {}, plugins.get("verifiers", "greedy"), batch_size=1, max_new_tokens=NEW
            )
            known[family] = {r.index: r.tokens for r in loop.run(PROMPTS)}
        return known[family]

    return continue_


# -- temperature 0 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, label, verifier, batch_size",
    [
        (("llama", "gpt2")[i % 2], label, rules[i % len(rules)], 3)
        for i, (label, (_, _, rules)) in enumerate(DRAFTS.items())
    ],
)
def test_temperature_zero_is_plain_decoding(
    decoder: Callable, tiny_model: Callable, plain: Callable, family: str, label: str, verifier: str, batch_size: int
) -> None:
    loop = make(decoder, tiny_model, family, label, verifier, batch_size)
    for response in loop.run(PROMPTS):
        assert response.tokens == plain(family)[response.index]
        assert sum(r.emitted for r in response.steps) == NEW


@pytest.mark.thorough
@pytest.mark.parametrize("label", DRAFTS)
def test_drafter_is_right_now_and_then(decoder: Callable, tiny_model: Callable, label: str) -> None:
    """Otherwise the tests here would see only acceptance, or only rejection; and trees must leave the first path."""
    loop = make(decoder, tiny_model, "llama", label, "greedy", 3, max_new_tokens=40)
    paths, verify = [], loop.verifier.verify

    def watched(draft: Draft, p: Tensor, rng: Any) -> Any:
        verdict = verify(draft, p, rng)
        if verdict.path is not None:
            paths.extend(row[:tau].tolist() for row, tau in zip(verdict.path, verdict.length.tolist(), strict=True))
        return verdict

    loop.verifier.verify = watched
    taus = {r.tau for response in loop.run(PROMPTS) for r in response.steps}
    assert len(taus) > 1
    assert label == "iid-argmax" or any(path != list(range(len(path))) for path in paths)


@pytest.mark.parametrize("label", DRAFTS)
def test_draft_stays_inside_context(decoder: Callable, tiny_model: Callable, label: str) -> None:
    small = tiny_model("gpt2", context=20)
    name, options, rules = DRAFTS[label]
    loop = decoder(
        small,
        plugins.get("drafters", name),
        {"model": "same", **options},
        plugins.get("verifiers", rules[0]),
        batch_size=2,
        drafting=small,
        max_new_tokens=64,
    )
    for response in loop.run(PROMPTS):
        assert response.finish_reason == "length"
        assert len(PROMPTS[response.index]) + len(response.tokens) == 20


# -- the drafter's own model ------------------------------------------------------------------------------


def path(draft: Draft, row: int, node: int) -> list[int]:
    """Tokens from the root's child down to ``node``."""
    tokens: list[int] = []
    while node >= 0:
        tokens.insert(0, int(draft.tokens[row, node]))
        node = int(draft.parents[row, node])
    return tokens


def without(probs: Tensor, tokens: list[int]) -> Tensor:
    probs = probs.clone()
    probs[tokens] = 0
    return probs / probs.sum()


@pytest.mark.parametrize(
    "label, family", [*((label, "llama") for label in DRAFTS), ("iid", "gpt2"), ("branching", "gpt2")]
)
def test_draft_probs_match_fresh_model(decoder: Callable, tiny_model: Callable, label: str, family: str) -> None:
    """After several steps of accepted and rejected branches; a stale or misplaced cache entry shows up here."""
    loop = make(decoder, tiny_model, family, label, DRAFTS[label][2][0], 3, max_new_tokens=32)
    fresh = tiny_model(family, noise=0.1, copy="reference")
    propose, siblings = loop.drafter.propose, DRAFTS[label][1].get("siblings")
    checked = 0

    @cache
    def logits_after(tokens: tuple[int, ...]) -> Tensor:
        with torch.inference_mode():
            return fresh(torch.tensor([tokens])).logits[0, -1]

    def watched(sequences: Any, rng: Any) -> Draft:
        nonlocal checked
        draft = propose(sequences, rng)
        for row, history in enumerate(sequences.history):
            for node in range(int(draft.count[row])):
                parent = int(draft.parents[row, node])
                logits = logits_after((*history, *path(draft, row, parent)))
                token = int(draft.tokens[row, node])
                earlier_siblings = [j for j in range(node) if draft.parents[row, j] == parent]
                used = draft.tokens[row, earlier_siblings].tolist()
                checked += 1
                if draft.q is None:  # a point mass: one of the most probable, in order if none is left out
                    better = int((logits > logits[token]).sum())
                    assert better <= (5 if label == "opt-tree" else 2)
                    assert better == len(earlier_siblings) or label == "gaps"
                    continue
                probs = logits.softmax(-1)
                if draft.kind not in (IID, DELAYED_IID):
                    probs = without(probs, used)
                if (
                    siblings == "greedy"
                    and len(earlier_siblings) + 1 < DRAFTS[label][1]["branching"][len(path(draft, row, node)) - 1]
                ):
                    probs = torch.zeros_like(probs).scatter_(0, probs.argmax(0, keepdim=True), 1.0)
                q = draft.q_of(torch.full((3,), node), draft.q[:, 0])[row]
                torch.testing.assert_close(q, probs, atol=1e-4, rtol=1e-3)
        return draft

    loop.drafter.propose = watched
    for row, prompt in enumerate(PROMPTS):
        loop.start(row, prompt)
    for _ in range(4):
        loop.step()
    assert checked >= 3 * 4 * 3  # chains of three, and trees, of three rows in four steps
    # One pass a level and, at most, one to catch up; an accepted node is not fed again.
    assert loop.drafter.passes <= 4 * 4
    for length, history in zip(loop.drafter.model.lm.lengths, loop.sequences.history, strict=True):
        assert len(history) - 2 <= length <= len(history) - 1


# -- temperature 1 --------------------------------------------------------------------------------------


# -- configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "drafter, options, sentence",
    [
        ("draft-model-iid", {"K": 0}, "greater than or equal to 1"),
        ("draft-model-iid", {"gamma": -1}, "greater than or equal to 0"),
        ("draft-model-tree", {"branching": [2, 0, 1]}, r"branching is \[2, 0, 1\]; all numbers must be positive"),
        ("draft-model-tree", {"branching": [64, 64]}, "the draft has 4160 nodes; the maximum is 4096"),
        ("draft-model-tree", {"choices": [[0], [1, 0]]}, r"choices hold \[1, 0\] but not its parent \[1\]"),
        ("draft-model-tree", {"choices": [[0], [0]]}, "choices must be distinct, non-empty lists of ranks"),
        ("draft-model-tree", {"choices": [[]]}, "choices must be distinct, non-empty lists of ranks"),
        ("draft-model-tree", {"choices": [[-1]]}, "choices must be distinct, non-empty lists of ranks"),
        (
            "draft-model-tree",
            {"choices": [[1]]},
            r"choices hold \[1\] but not its sibling of rank 0; only siblings 'top-k'",
        ),
        ("draft-model-tree", {"siblings": "beam"}, "'without-replacement', 'top-k' or 'greedy'"),
        ("draft-model-tree", {"gamma": 3}, "Extra inputs are not permitted"),
        (
            "draft-model-dynamic-tree",
            {"depth": 2, "top_k": 3, "nodes": 13},
            "depth 2 and top_k 3 give 12 nodes, not 13",
        ),
        ("draft-model-dynamic-tree", {"temperature": 1}, "Input should be None"),
    ],
)
def test_config_errors_are_sentences(drafter: str, options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        plugins.get("drafters", drafter).Config(model="m", **options)


@pytest.mark.parametrize("options", [{"branching": []}, {"choices": []}])
def test_tree_without_nodes_is_empty(
    decoder: Callable, tiny_model: Callable, plain: Callable, options: dict[str, Any]
) -> None:
    loop = decoder(
        tiny_model("llama"),
        plugins.get("drafters", "draft-model-tree"),
        {"model": "noisy", **options},
        plugins.get("verifiers", "greedy"),
        batch_size=3,
        drafting=tiny_model("llama", noise=0.1),
        max_new_tokens=NEW,
    )
    assert {r.index: r.tokens for r in loop.run(PROMPTS)} == plain("llama")
    assert loop.drafter.passes == 0


# -- the dynamic tree -----------------------------------------------------------------------------------

STATES = 17


class RandomLM:
    """Logits that depend on the prefix through a state; counts what it was fed."""

    def __init__(self, seed: int, b: int, vocab: int):
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(b, STATES, vocab, generator=generator) * 2
        self.states = torch.zeros(b, 1, dtype=torch.long)
        self.fed = 0

    @staticmethod
    def after(state: Any, token: Any) -> Any:
        return (state * 5 + token + 1) % STATES

    def expand(self, tokens: Tensor, parents: Tensor) -> Tensor:
        new = self.after(self.states.gather(1, parents + 1), tokens)
        self.states = torch.cat([self.states, new], 1)
        self.fed += tokens.shape[1]
        return self.table[torch.arange(len(tokens))[:, None], new]


Prefix = tuple[int, ...]


def naive(table: Tensor, depth: int, top_k: int, nodes: int, limit: int) -> tuple[set[Prefix], list[Prefix]]:
    """The prefixes that EAGLE-2 keeps for one row, and those it feeds, in order."""

    def children(prefix: Prefix, value: float, state: int) -> list[tuple[float, Prefix, int]]:
        logp = table[state].log_softmax(-1).tolist()
        best = sorted(range(len(logp)), key=lambda token: -logp[token])[:top_k]
        return [(value + logp[token], (*prefix, token), RandomLM.after(state, token)) for token in best]

    level = children((), 0.0, 0)
    candidates, fed = list(level), []
    for _ in range(1, depth):
        expanded = sorted(level, key=lambda node: -node[0])[:top_k]
        fed += [prefix for _, prefix, _ in expanded]
        level = [child for value, prefix, state in expanded for child in children(prefix, value, state)]
        candidates += level
    allowed = [node for node in candidates if len(node[1]) <= limit]
    return {prefix for _, prefix, _ in sorted(allowed, key=lambda node: -node[0])[:nodes]}, fed


@settings(deadline=None, max_examples=30)
@given(
    seed=st.integers(0, 2**31),
    b=st.integers(1, 3),
    depth=st.integers(1, 4),
    top_k=st.integers(1, 4),
    vocab=st.integers(4, 9),
    data=st.data(),
)
def test_dynamic_tree_is_that_of_naive_search(
    seed: int, b: int, depth: int, top_k: int, vocab: int, data: st.DataObject
) -> None:
    nodes = data.draw(st.integers(1, top_k + (depth - 1) * top_k**2))
    limit = [data.draw(st.integers(0, depth)) for _ in range(b)]
    lm = RandomLM(seed, b, vocab)
    draft, place = grow_dynamic(depth, top_k, nodes, lm.table[:, 0], lm.expand, torch.tensor(limit))
    assert draft.q is None and draft.kind is DETERMINISTIC and draft.width == nodes
    assert lm.fed == (depth - 1) * top_k
    for row in range(b):
        kept, fed = naive(lm.table[row], depth, top_k, nodes, limit[row])
        count = int(draft.count[row])
        assert draft.valid[row, :count].all(), "an invalid node comes before a valid one"
        assert all(int(draft.parents[row, node]) < node for node in range(count))
        prefixes = [tuple(path(draft, row, node)) for node in range(count)]
        assert set(prefixes) == kept and len(prefixes) == len(kept)
        for node, prefix in enumerate(prefixes):
            assert place[row, node] == (fed.index(prefix) if prefix in fed else -1)


@given(st.lists(st.sampled_from([-math.inf, -2.0, -0.0, 0.0, 1e-30, 1.0, math.inf, math.nan, -math.nan]), min_size=1))
def test_ordered_by_score_then_index(scores: list[float]) -> None:
    """Every token once, NaN first, ties by lowest index; then 0."""
    ranks = [(1, -score) if score == score else (0, 0.0) for score in scores]
    order = sorted(range(len(scores)), key=ranks.__getitem__)
    for k in range(1, len(scores) + 3):
        assert ordered(torch.tensor([scores]), k).tolist() == [[*order, 0, 0][:k]]
