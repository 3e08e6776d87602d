"""The contract of a drafter, merged drafts, and rejected combinations."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from crossdraft_combine.drafter import Combine
from crossdraft_combine.merging import merge_trees
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from crossdraft import CHAIN, DETERMINISTIC, Sampling, UsageError
from crossdraft.testing import DrafterContract

LOOKUP = {"name": "prompt-lookup", "gamma": 3}
MODEL = {"name": "draft-model", "model": "toy", "gamma": 2}
TREE = {"name": "draft-model-dynamic-tree", "model": "toy", "depth": 2, "top_k": 2, "nodes": 4}


class TestLookupElseModel(DrafterContract):
    drafter = Combine
    options = {"drafters": [LOOKUP, MODEL]}  # noqa: RUF012


class TestModelElseModel(DrafterContract):
    """Two sampling drafters with distinct random numbers. The first stops if unsure and then returns no draft."""

    drafter = Combine
    options = {  # noqa: RUF012
        "drafters": [{**MODEL, "policy": {"name": "confidence", "stop": "before", "threshold": 0.5}}, MODEL]
    }


class TestLookupElseTree(DrafterContract):
    drafter = Combine
    options = {"drafters": [{**LOOKUP, "min_ngram": 2}, TREE]}  # noqa: RUF012


class TestMerged(DrafterContract):
    drafter = Combine
    options = {"mode": "merge", "nodes": 4, "drafters": [LOOKUP, {**MODEL, "temperature": 0}]}  # noqa: RUF012


class TestMergedTrees(DrafterContract):
    drafter = Combine
    options = {  # noqa: RUF012
        "mode": "merge",
        "nodes": 5,
        "drafters": [
            TREE,
            {"name": "draft-model-tree", "model": "toy", "branching": [2, 1], "siblings": "top-k"},
        ],
    }


# -- merging ---------------------------------------------------------------------------------------------------


def test_equal_beginnings_are_one() -> None:
    result = merge_trees([[(5, -1), (6, 0), (7, 1)], [(5, -1), (8, 0), (9, -1)]], 9)
    assert (result.tokens, result.parents) == ([5, 6, 8, 7, 9], [-1, 0, 0, 1, -1])
    assert result.indices == [[0, 1, 3], [0, 2, 4]]
    assert merge_trees([[(5, -1), (6, 0), (7, 1)], [(5, -1), (8, 0), (9, -1)]], 2).indices == [[0, 1, -1], [0, -1, -1]]
    assert merge_trees([[(-1, -1), (6, 0)], [(5, -1)]], 3).indices == [[-1, -1], [0]]
    assert merge_trees([[], []], 3).tokens == []


@st.composite
def trees(draw: Any) -> list[tuple[int, int]]:
    n = draw(st.integers(0, 8))
    nodes: list[tuple[int, int]] = []
    for i in range(n):
        node = (draw(st.integers(-1, 2)), draw(st.integers(-1, i - 1)))
        if node[0] < 0 or node not in nodes:
            nodes.append(node)
    return [(token, min(parent, i - 1)) for i, (token, parent) in enumerate(nodes)]


def path(tree: list[tuple[int, int]], node: int) -> tuple[int, ...] | None:
    """The tokens down to a node; None where one of them is none."""
    token, parent = tree[node]
    above: tuple[int, ...] | None = path(tree, parent) if parent >= 0 else ()
    return None if above is None or token < 0 else (*above, token)


@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 12))
def test_merged_tree_is_one(drafts: list[list[tuple[int, int]]], maximum: int) -> None:
    result = merge_trees(drafts, maximum)
    tree = list(zip(result.tokens, result.parents, strict=True))
    assert (
        len(tree) <= maximum and len(set(tree)) == len(tree) and all(parent < i for i, (_, parent) in enumerate(tree))
    )
    paths = set()
    for item, places in zip(drafts, result.indices, strict=True):
        for node, place in enumerate(places):
            expected = path(item, node)
            paths.add(expected)
            assert place < 0 or path(tree, place) == expected, "a node is where its path leads"
            assert place >= 0 or expected is None or len(tree) == maximum, "what is left out had no room"
    assert {path(tree, i) for i in range(len(tree))} <= paths


# -- accepted drafters ---------------------------------------------------------------------------------------------


def traits(temperature: float, *drafters: Any, **options: Any) -> Any:
    return Combine.traits(Combine.Config(drafters=drafters, **options), Sampling(temperature=temperature))


def test_traits_follow_from_parts() -> None:
    chain = traits(1, LOOKUP, MODEL)
    assert (chain.kind, chain.point_mass, chain.nodes, chain.depth) == (CHAIN, False, 3, 3)
    assert chain.waits == traits(1, MODEL, LOOKUP).waits == 0 and not chain.on_host
    assert traits(1, TREE, LOOKUP).waits == 1
    assert traits(0, LOOKUP, LOOKUP, mode="merge").waits == 1 and traits(0, LOOKUP, MODEL, mode="merge").waits == 2
    assert traits(0, LOOKUP, MODEL).point_mass
    tree = traits(1, LOOKUP, {**TREE, "top_k": 3, "nodes": 9})
    assert (tree.kind, tree.point_mass, tree.nodes, tree.adapts) == (DETERMINISTIC, True, 9, False)
    both = traits(0, LOOKUP, MODEL, mode="merge", nodes=2)
    assert (both.kind, both.nodes, both.depth) == (DETERMINISTIC, 2, 2)


@pytest.mark.parametrize(
    ("drafters", "options", "sentence"),
    [
        (
            [LOOKUP, MODEL],
            {"mode": "merge"},
            "cannot use 'draft-model': it samples its tokens, but merge needs point masses",
        ),
        ([LOOKUP, {"name": "medusa", "model": "m"}], {}, "cannot use 'medusa': it reads the target's hidden states"),
        ([LOOKUP, "none"], {}, "cannot use 'none': it never drafts"),
        ([LOOKUP, {"name": "draft-model-iid", "model": "m"}], {}, "cannot use 'draft-model-iid': it drafts 'iid'"),
        ([TREE, MODEL], {}, "cannot use a tree together with a sampled chain"),
    ],
)
def test_incompatible_drafters_raise(drafters: Any, options: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        traits(1, *drafters, **options)


def test_drafts_with_probes_raise() -> None:
    pytest.importorskip("crossdraft_drafters", reason="lookahead is part of crossdraft-drafters")
    from crossdraft.framework.api.build import build_decoder
    from crossdraft.testing import Toys

    config = Combine.Config(drafters=(LOOKUP, "lookahead"))
    context = Toys().context(1, Sampling(temperature=0))
    (rule,) = [rule for rule in TestMerged().rules(Sampling(temperature=0)) if rule.name == "sample-match"]
    decoder = build_decoder(context, (Combine, config), (rule, rule.Config()), max_new_tokens=12)
    with pytest.raises(UsageError, match="cannot use 'lookahead': its drafts contain probes"):
        list(decoder.run([[2, 1, 2, 1, 2]]))


def test_results_depend_on_code_of_all_parts() -> None:
    inner = {"name": "combine", "drafters": [LOOKUP, TREE]}
    result = Combine.wrapped(Combine.Config(drafters=(MODEL, inner)))
    assert [cls.name for cls in result] == ["draft-model", "combine", "prompt-lookup", "draft-model-dynamic-tree"]


def test_options_are_checked_at_once() -> None:
    for drafters, sentence in (
        ([LOOKUP], "at least 2"),
        ([LOOKUP, "nobody"], "there is no drafter named 'nobody'"),
        ([LOOKUP, {"name": "prompt-lookup", "gama": 2}], "key 'gama'"),
    ):
        with pytest.raises(ValidationError, match=sentence):
            Combine.Config(drafters=cast(Any, drafters))


def test_model_is_skipped_if_copy_exists() -> None:
    from crossdraft.framework.api.build import build_decoder
    from crossdraft.testing import Toys

    passes = []
    for shortest in (1, 9):
        config = Combine.Config(drafters=({**LOOKUP, "min_ngram": shortest, "max_ngram": 9}, MODEL))
        context = Toys().context(1, Sampling(temperature=0))
        (rule,) = [rule for rule in TestMerged().rules(Sampling(temperature=0)) if rule.name == "sample-match"]
        decoder = build_decoder(context, (Combine, config), (rule, rule.Config()), max_new_tokens=12)
        (response,) = decoder.run([[2, 1, 2, 1, 2]])
        passes.append((decoder.drafter.passes, [r.tau for r in response.steps]))
    assert passes[0][0] < passes[1][0], passes
    assert torch.tensor(passes[0][1]).sum() > 0
