"""The packages under ``plugins/`` that bring strategies: their own tests, their recipes, and pip's view of them."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import crossdraft_by_shape
import crossdraft_combine
import crossdraft_drafters
import crossdraft_ngram_cache
import crossdraft_rest
import crossdraft_suffix
import pytest
import test_crossdraft_by_shape
import test_crossdraft_combine
import test_crossdraft_ngram_cache
import test_crossdraft_rest
import test_crossdraft_suffix
from companions import needs_command
from crossdraft_ngram_cache.drafter import NgramCache
from crossdraft_rest.datastore import build, tokenizer_sha256
from test_crossdraft_by_shape import test_rules_that_cannot_be_wrapped  # noqa: F401
from test_crossdraft_combine import (  # noqa: F401
    test_drafts_with_probes_raise,
    test_equal_beginnings_are_one,
    test_incompatible_drafters_raise,
    test_merged_tree_is_one,
    test_model_is_skipped_if_copy_exists,
    test_options_are_checked_at_once,
    test_results_depend_on_code_of_all_parts,
    test_traits_follow_from_parts,
)
from test_crossdraft_ngram_cache import (  # noqa: F401
    test_most_frequent_follower_of_longest_context,
    test_oldest_context_is_forgotten_first,
    test_sizes_that_cannot_be,
    test_thresholds_keep_guesses_back,
)
from test_crossdraft_rest import (  # noqa: F401
    bits,
    store,
    test_all_occurrences_of_longest_context,
    test_another_tokenizer_is_refused,
    test_bad_corpus_is_named,
    test_corpus_becomes_datastore,
    test_damaged_datastore_is_refused,
    test_directory_is_read_by_datasets,
    test_draft_depth_respects_limit,
    test_ids_need_no_tokenizer,
    test_invalid_corpora_raise,
    test_large_ids,
    test_more_hits_than_are_counted_are_taken_evenly,
    test_results_depend_on_datastore,
    test_unknown_context_has_no_continuation,
)
from test_crossdraft_rest import test_options_that_cannot_be as test_contexts_that_cannot_be  # noqa: F401
from test_crossdraft_suffix import (  # noqa: F401
    test_all_occurrences_are_found,
    test_best_match_by_counting_everywhere,
    test_draft_is_as_long_as_its_match_allows,
    test_latest_occurrences_are_counted,
    test_longest_match_is_not_always_best,
    test_memory_respects_capacity,
    test_most_frequent_continuation,
    test_options_that_cannot_be,
    test_outputs_are_remembered_and_prompts_are_not,
    test_overwritten_tokens_do_not_match,
    test_own_text_has_priority,
    test_recorded_texts_are_drafted_as_in_steps,
    test_text_is_forgotten_before_places_run_out,
    test_tree_takes_most_probable_nodes,
    test_trees_are_trees,
)
from tiny_models import make_tokenizer, save_model

import crossdraft
from crossdraft.framework.bench.matrix import expand, load_recipe
from crossdraft.framework.cli import main as cli
from crossdraft.framework.plugins import entries, manager

ROOT = Path(__file__).parents[1]
PACKAGES = {
    "drafters": {
        "combine": crossdraft_combine,
        "jacobi": crossdraft_drafters,
        "ngram-cache": crossdraft_ngram_cache,
        "rest": crossdraft_rest,
        "suffix": crossdraft_suffix,
    },
    "verifiers": {"by-shape": crossdraft_by_shape},
}


@pytest.fixture(autouse=True, scope="module")
def installed() -> Iterator[None]:
    """Install the package, unless it is installed."""
    missing = [module for kind, ours in PACKAGES.items() for n, module in ours.items() if n not in entries(kind)]
    for module in missing:
        manager().register(module)
    yield
    for module in missing:
        manager().unregister(module)


@pytest.mark.slow
class TestNgramCache(test_crossdraft_ngram_cache.TestNgramCache):
    pass


@pytest.mark.slow
class TestLookupElseModel(test_crossdraft_combine.TestLookupElseModel):
    pass


@pytest.mark.slow
class TestModelElseModel(test_crossdraft_combine.TestModelElseModel):
    pass


@pytest.mark.slow
class TestLookupElseTree(test_crossdraft_combine.TestLookupElseTree):
    pass


@pytest.mark.slow
class TestMerged(test_crossdraft_combine.TestMerged):
    pass


@pytest.mark.slow
class TestMergedTrees(test_crossdraft_combine.TestMergedTrees):
    pass


@pytest.mark.slow
class TestSuffix(test_crossdraft_suffix.TestSuffix):
    pass


@pytest.mark.slow
class TestSuffixTree(test_crossdraft_suffix.TestSuffixTree):
    pass


@pytest.mark.slow
class TestRest(test_crossdraft_rest.TestRest):
    pass


@pytest.mark.slow
class TestRestChain(test_crossdraft_rest.TestRestChain):
    pass


@pytest.mark.slow
class TestByShape(test_crossdraft_by_shape.TestByShape):
    pass


def test_certified(capsys: Any, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path))
    for drafter in ("ngram-cache, gamma: 2", "suffix, gamma: 2"):
        assert cli.main(["certify", "--drafter", f"{{name: {drafter}}}", "--verifier", "token"]) == 0
    shapes = ["chain", "tree-top-2-1"]  # the others are slow ones
    assert cli.main(["certify", "--verifier", "by-shape", *(word for s in shapes for word in ("--draft", s))]) == 0
    verdicts = [line for line in capsys.readouterr().out.splitlines() if line.startswith("lossless: ")]
    assert len(verdicts) == 3 and verdicts[-1].startswith("lossless: 12 pairs certified, ")


@pytest.mark.parametrize(
    "folder",
    ["crossdraft-ngram-cache", "crossdraft-by-shape", "crossdraft-combine", "crossdraft-rest", "crossdraft-suffix"],
)
def test_its_recipe_is_one(folder: str, tmp_path: Path) -> None:
    target = save_model(tmp_path / "target")
    changes = [f"target={target}"]
    if folder == "crossdraft-by-shape":
        changes += [f"drafters.{i}.model={target}" for i in range(3)]
    if folder == "crossdraft-combine":
        changes += [f"drafters.1.model={target}", f"drafters.2.drafters.1.model={target}"]
    result = expand(load_recipe(str(ROOT / "plugins" / folder / "recipe.yaml"), changes))
    names = {name for cell in result.cells for name in (cell.drafter.name, cell.verifier.name)}
    assert folder.removeprefix("crossdraft-") in names and not result.skipped
    project = tomllib.loads((ROOT / "plugins" / folder / "pyproject.toml").read_text(encoding="utf-8"))
    assert list(project["project"]["entry-points"]["crossdraft"]) == [folder.removeprefix("crossdraft-")]


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> crossdraft.LoadedModel:
    return crossdraft.load_model(save_model(tmp_path_factory.mktemp("m") / "target"), dtype="float32", device="cpu")


def test_kept_cache_contains_last_outputs(target: Any) -> None:
    """The same question twice: the second answer is drafted from the first one."""
    cache = NgramCache(NgramCache.Config(gamma=4))
    arguments = {"max_new_tokens": 16, "temperature": 0}
    (first,) = crossdraft.generate(target, [[5, 9, 3]], drafter=cache, **arguments)
    (repeat,) = crossdraft.generate(target, [[5, 9, 3]], drafter=cache, **arguments)
    (fresh,) = crossdraft.generate(target, [[5, 9, 3]], drafter=NgramCache, **arguments)
    assert first.tokens == repeat.tokens == fresh.tokens
    steps = [[r.tau for r in response.steps] for response in (first, repeat, fresh)]
    assert steps[0] == steps[2] and sum(steps[1]) > sum(steps[0]) and len(steps[1]) == 4  # 5 + 5 + 5 + 1 tokens


def test_by_shape_matches_verifier_of_shape(target: Any) -> None:
    settings = {"max_new_tokens": 12, "seed": 3}
    for drafter, rule in {
        "prompt-lookup": "block",
        "draft-model-tree": "traversal",
        "draft-model-iid": "spectr",
    }.items():
        arguments = {"name": drafter} | ({"model": target.name} if drafter != "prompt-lookup" else {})
        tokens = [
            crossdraft.generate(target, [[5, 9, 5, 9, 5]], drafter=arguments, verifier=verifier, **settings)[0].tokens
            for verifier in ("by-shape", rule)
        ]
        assert tokens[0] == tokens[1], drafter


@pytest.mark.parametrize("batch_size", [1, 8])
def test_retrieval_outputs_match_target(batch_size: int, target: Any, tmp_path: Path) -> None:
    """At temperature 0, with texts of its own in the datastore, so that something is accepted."""
    prompts = [[5, 9, 3], [7], [6, 2, 6, 2, 6], [11, 12, 13, 11, 12]]
    arguments = {"max_new_tokens": 24, "temperature": 0, "batch_size": batch_size, "ignore_eos": True}
    separate = [response.tokens for response in crossdraft.generate(target, prompts, drafter="none", **arguments)]
    documents = [[*prompt, *tokens] for prompt, tokens in zip(prompts, separate, strict=True)]
    build(documents, tmp_path / "d", tokenizer=tokenizer_sha256(make_tokenizer()))
    for drafter in (
        {"name": "suffix", "factor": 4},
        {"name": "suffix", "factor": 4, "tree": True},
        {"name": "rest", "datastore": str(tmp_path / "d")},
        {"name": "rest", "datastore": str(tmp_path / "d"), "tree": False},
    ):
        responses = crossdraft.generate(target, prompts, drafter=drafter, **arguments)
        assert [response.tokens for response in responses] == separate, drafter
        assert sum(r.tau for response in responses for r in response.steps) > 10, drafter


@needs_command("replay")
def test_copying_drafter_is_replayed(tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "responses.jsonl").write_text(
        '{"id": "a", "prompt": [5, 6, 7, 8, 5, 6], "tokens": [7, 8, 9, 9, 2], "finish_reason": "length"}\n'
        '{"id": "b", "prompt": [4], "tokens": [7, 8, 9, 9, 2], "finish_reason": "length"}\n',
        encoding="utf-8",
    )
    build([[5, 6, 7, 8, 9, 9, 2]], tmp_path / "d")
    rest = f"{{name: rest, datastore: {tmp_path / 'd'}, shortest: 1, tree: false}}"

    def replayed(drafter: str) -> tuple[int, Any]:
        code = cli.main(["replay", str(tmp_path / "responses.jsonl"), "--drafter", drafter, "--gamma", "2", "--json"])
        return code, capsys.readouterr()

    own, memory, datastore = (
        json.loads(replayed(drafter)[1].out)["rows"][0]["block_efficiency_all_steps"]
        for drafter in ("{name: suffix, factor: 2, memory: 0}", "{name: suffix, factor: 2}", rest)
    )
    assert own < memory < datastore, "the second answer is the first one's, and both are in the datastore"
    code, out = replayed("{name: suffix, tree: true}")
    assert code == 2 and "drafts trees ('deterministic'), which cannot be replayed" in out.err
