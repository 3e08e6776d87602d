"""Compiled verifiers return the same verdicts; verifiers that cannot be compiled run eagerly."""

import dataclasses
import functools
import shutil
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from random_trees import ONE_SHAPE, PAIRS, RULES, random_draft, shipped_rng, tokens_of

from crossdraft.framework.contracts.verifier import VerifierTraits
from crossdraft.framework.engine import compiled_verifier
from crossdraft.framework.engine.compiled_verifier import MOST_SHAPES, CompiledVerifier
from crossdraft.framework.util import compilation

pytestmark = pytest.mark.thorough


def fused_as_usual(name: str, shape: str, seeds: Sequence[int], vocab: int) -> int:
    """Check a fused rule against the rule itself, every draft in two steps; returns how many shapes were compiled."""
    compiled, rule = CompiledVerifier(RULES[name]()), RULES[name]()
    for row in range(3):
        compiled.verifier.start(row)
        rule.start(row)
    for seed, position in product(seeds, range(2)):
        draft, p = random_draft(shape, seed, 3, 3, vocab, torch.float32)
        verdicts = [step(draft, p, shipped_rng(seed, range(3), position)) for step in (rule.verify, compiled)]
        assert tokens_of(draft, verdicts[1]) == tokens_of(draft, verdicts[0])
        for either, verdict in zip((rule, compiled.verifier), verdicts, strict=True):
            either.observe(verdict.length.tolist(), draft.count.tolist())
    return compiled.compiled


@pytest.mark.parametrize("name, shape", ONE_SHAPE)
def test_rule_is_function_of_tensors(name: str, shape: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(compiled_verifier, "compile_function", lambda step, inputs: lambda tensors: step(*tensors))
    assert 0 < fused_as_usual(name, shape, range(12), 9) <= MOST_SHAPES


@pytest.mark.slow
@pytest.mark.skipif(not (shutil.which("c++") or shutil.which("g++")), reason="needs a C++ compiler")
def test_compiled_token_verifier_matches_plain_one() -> None:
    assert fused_as_usual("token", "chain", range(2), 300) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name, shape", PAIRS)
def test_compiled_verifier_matches_plain_one(name: str, shape: str) -> None:
    assert fused_as_usual(name, shape, [3, 4], 2000) > 0


@pytest.mark.parametrize("name, shape", [("token", "chain"), ("greedy-block", "chain"), ("specinfer", "pair")])
def test_way_of_cuda_traces_rule_whole(name: str, shape: str, monkeypatch: Any) -> None:
    """`torch.compile` up to code for a device: the graph that it made, run as it is."""
    monkeypatch.setattr(compiled_verifier, "compile_function", compilation.trace_and_compile)
    calls: list[Any] = []
    compile_ = functools.partial(torch.compile, backend="eager")
    monkeypatch.setattr(torch, "compile", lambda step, **options: calls.append(options) or compile_(step, **options))
    assert fused_as_usual(name, shape, range(2), 9) > 0
    assert calls and all(options["fullgraph"] for options in calls)


def test_uncompilable_verifier_runs_eagerly(monkeypatch: Any, caplog: Any) -> None:
    def failing(step: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here\nand much more")

    monkeypatch.setattr(compiled_verifier, "compile_function", failing)
    assert fused_as_usual("token", "chain", range(3), 9) == 0
    assert [r.getMessage() for r in caplog.records] == [
        "crossdraft: verifier 'token' runs uncompiled: no compiler here"
    ]


def test_no_compilation_after_warm_up(monkeypatch: Any) -> None:
    monkeypatch.setattr(compiled_verifier, "compile_function", lambda step, inputs: lambda tensors: step(*tensors))
    compiled = CompiledVerifier(RULES["token"]())
    compiled.compiling = False
    draft, p = random_draft("chain", 1, 3, 3, 9)
    for _ in range(3):
        compiled(draft, p, shipped_rng(1, range(3)))
    assert compiled.compiled == 0


def test_rule_that_keeps_its_state_to_itself_is_not_fused() -> None:
    class Private(RULES["token"]):  # type: ignore[misc]
        name = "private"

        @classmethod
        def traits(cls, config: Any) -> VerifierTraits:
            return dataclasses.replace(super().traits(config), stateful=True)

    assert not CompiledVerifier.supports(Private())
    with pytest.raises(ValueError, match="'private' keeps state on the host"):
        CompiledVerifier(Private())
