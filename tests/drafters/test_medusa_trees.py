"""The trees that Medusa drafts, and its configuration."""

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from crossdraft_trainers.medusa_files import save_heads
from medusa_heads import PROMPTS, TREE, H, propose
from pydantic import ValidationError

from crossdraft.drafters.autoregressive.trees import best_paths
from crossdraft.drafters.heads.medusa.drafter import TREES, Medusa
from crossdraft.drafters.heads.medusa.weights import MedusaHeads
from crossdraft.framework.contracts.sampling import Sampling

# -- trees ----------------------------------------------------------------------------------------------


def test_published_tree() -> None:
    tree = TREES["mc_sim_7b_63"]
    assert len(set(tree)) == len(tree) == 63
    assert [sum(len(path) == depth for path in tree) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert {(1, 6), (2, 2), (3, 1), (9, 0), (0, 0, 9), (0, 1, 2), (0, 2, 1), (0, 7, 0), (1, 0, 1), (2, 0, 0)} <= {*tree}
    assert not {(1, 7), (2, 3), (3, 2), (4, 1), (0, 8, 0), (0, 1, 3), (1, 1, 0), (0, 0, 1, 0)} & {*tree}


@pytest.mark.parametrize("nodes", range(1, 15))
def test_best_tree_has_most_accepted_tokens(nodes: int) -> None:
    """Expected accepted tokens, the sum of the paths' probabilities: of all trees that size none has more."""
    accuracies = [[0.5, 0.1, 0.3], [0.6, 0.3], [0.25, 0.5]]

    def value(path: Sequence[int]) -> float:
        out = 1.0
        for depth, rank in enumerate(path):
            out *= accuracies[depth][rank]
        return out

    paths = [path for depth in (1, 2, 3) for path in product(*(range(len(a)) for a in accuracies[:depth]))]
    result = best_paths(accuracies, nodes)
    assert len(result) == len(set(result)) == nodes
    assert all(not path[:-1] or path[:-1] in result for path in result)
    # A parent is never worth less than its child, so the most valuable paths are a tree, and no tree has more.
    maximum = sum(sorted(map(value, paths), reverse=True)[:nodes])
    assert sum(map(value, result)) == pytest.approx(maximum)


def test_best_tree_omits_useless_nodes() -> None:
    assert best_paths([[0.5, 0.0], [0.4]], 10) == ((0,), (0, 0))
    assert best_paths([[0.0], [0.4]], 10) == ()
    assert best_paths([[0.5, 0.5], [1.0]], 2) == ((0,), (1,))  # of equals the shorter comes first


def test_tree_of_published_size(tiny_model: Callable, heads_decoder: Callable, tmp_path: Path) -> None:
    target = tiny_model("llama")
    save_heads(tmp_path, MedusaHeads(H, 5, lm_head=target.get_output_embeddings()), {})
    options = {"model": str(tmp_path), "choices": "mc_sim_7b_63"}
    loop = heads_decoder(target, "medusa", options, "sample-match", batch_size=1, sampling=Sampling(temperature=1))
    loop.start(0, PROMPTS[1])
    draft = propose(loop)
    assert draft.width == 63 and draft.valid.all() and draft.depth.max() == 4
    for node in range(63):  # siblings are different tokens
        siblings = draft.tokens[0, draft.parents[0] == draft.parents[0, node]]
        assert len(siblings.unique()) == len(siblings)


# -- configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"gamma": -1}, "greater than or equal to 0"),
        ({"gamma": 2, "choices": [[0]]}, "gamma and choices are different shapes; give one of them"),
        ({"branching": [2], "nodes": 3}, "branching and nodes are different shapes"),
        ({"branching": [2, 0]}, r"branching is \[2, 0\]; all numbers must be positive"),
        ({"branching": [64, 64]}, "the draft has 4160 nodes; the maximum is 4096"),
        ({"nodes": 4097}, "less than or equal to 4096"),
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"heads": 0}, "greater than or equal to 1"),
        ({"choices": [[0], [1, 0]]}, r"choices hold \[1, 0\] but not its parent \[1\]"),
        ({"choices": "mc_sim"}, "mc_sim_7b_63"),
        ({"choices": TREE, "temperature": 1}, "temperature belongs to a chain"),
        ({"siblings": "top-k"}, "Extra inputs are not permitted"),
    ],
)
def test_config_errors_are_sentences(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Medusa.Config(model="m", **options)


def test_traits_need_no_weights() -> None:
    def traits(temperature: float = 1, **options: Any) -> tuple:
        result = Medusa.traits(Medusa.Config(model="nowhere", **options), Sampling(temperature=temperature))
        assert result.hidden_layers == (-1,) and not result.replayable
        return result.kind and result.kind.name, result.point_mass, result.nodes

    assert traits() == ("chain", False, 16)
    assert traits(gamma=3) == ("chain", False, 3)
    assert traits(temperature=0, gamma=3) == ("chain", True, 3)
    assert traits(choices=TREE) == ("deterministic", True, 7)
    assert traits(choices="mc_sim_7b_63") == ("deterministic", True, 63)
    assert traits(branching=[1, 1]) == ("chain", True, 2)
    assert traits(nodes=9) == ("deterministic", True, 9)
