"""One mistake of each kind, in a draft or a verdict: the first step names the strategy, the place and the mistake."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from oracle_trees import verifier_class
from scripted_strategies import KINDS, UNIFORM, B, V, at, decoder, first_step, honest
from torch import Tensor

from crossdraft.framework.contracts.draft import Draft, Sequences, Verdict
from crossdraft.framework.contracts.draft_kind import DETERMINISTIC, IID
from crossdraft.framework.errors import ContractError, CrossdraftError, NumericalError


@pytest.mark.parametrize("validate", ["sampled", "never"])
@pytest.mark.parametrize("kind", KINDS)
def test_honest_strategies_pass(kind: str, validate: str) -> None:
    first_step(decoder(kind, validate=validate))


def replace_field(name: str, function: Callable) -> Callable:
    return lambda group, _: setattr(group, name, function(getattr(group, name)))


def wider(draft: Draft, _: Any) -> Draft:
    more = torch.arange(B * 6).view(B, 6)
    return Draft.chain(more, torch.tensor([3, 3]), UNIFORM.expand(B, 6, V))


def own_limit(draft: Draft, sequences: Sequences) -> None:
    sequences.limit[0] += 9


def own_stream(draft: Draft, sequences: Sequences) -> None:
    sequences.stream[1] = 7


def own_history(draft: Draft, sequences: Sequences) -> None:
    sequences.history[1] = list(sequences.history[1])


def longer_history(draft: Draft, sequences: Sequences) -> None:
    sequences.history[1].append(3)


def other_history(draft: Draft, sequences: Sequences) -> None:
    sequences.history[1][0] = 3


def deep_tree(draft: Draft, _: Any) -> Draft:
    chain = Draft.chain(torch.tensor([[1, 2, 3, 4, 5]] * B), torch.tensor([5, 0]))
    return replace(chain, kind=DETERMINISTIC)


def cycle_of_two(draft: Draft, _: Any) -> None:
    draft.parents = torch.tensor([[1, 0, 0, 1], [-1, -1, 0, 1]])


half = UNIFORM / 2
ALL, SOME = "every step", "validated steps"

#: kind of draft, mistake, words of its sentence, and in which steps it is seen.
DRAFTS: dict[str, tuple[str, Callable, str, str]] = {
    "q is NaN": ("chain", at("q", (0, 1), torch.nan), "q that is NaN or infinite for prompt 0 at position 1", ALL),
    "q is NaN in padding": ("chain", at("q", (1, 2), torch.nan), "q that is NaN or infinite for prompt 1", ALL),
    "q is infinite": ("wor", at("q", (0, 2, 5), torch.inf), "q that is NaN or infinite for prompt 0", ALL),
    "q is zero": ("chain", at("q", (0, 1), 0.0), "row of q that sums to 0, not 1, .* slot 0 .prompt 0., node 1;", SOME),
    "q sums to 2": ("chain", at("q", (1, 0), 2 / V), "row of q that sums to 2, not 1, .* slot 1 .*node 0;", SOME),
    "q sums to 1/2": ("wor", at("q", (0, 3), half), "row of q that sums to 0.5, not 1, .* slot 0 .*node 3;", SOME),
    "q is negative": ("chain", at("q", (0, 0, slice(7, 9)), torch.tensor([-0.5, 0.53125])), "negative q, -0.5", SOME),
    "q is 0 at the token": ("chain", at("q", (0, 0, slice(1, 3)), torch.tensor([0, 2 / V])), "0 at the token 1", SOME),
    "q is integer": (
        "chain",
        replace_field("q", lambda q: q.long()),
        "draft.q of dtype int64; .* float32 or float64",
        ALL,
    ),
    "q has too few rows": ("chain", replace_field("q", lambda q: q[:, :2]), "too few rows for 3 nodes", ALL),
    "q is too narrow": (
        "chain",
        replace_field("q", lambda q: q[..., 1:]),
        r"q of shape \[2, 3, 63\], not \[2, M, 64\]",
        ALL,
    ),
    "q of a point mass": ("point", lambda d, _: honest("chain"), "with q, but traits.point_mass is True", ALL),
    "no q": ("chain", lambda d, _: honest("point"), "without q, but traits.point_mass is False", ALL),
    "law names no row": (
        "chain",
        lambda d, _: replace(d, q_index=torch.full((B, 3), 3)),
        "has 3 in draft.q_index, but q has 3 rows",
        SOME,
    ),
    "its own parent": ("top", at("parents", (0, 2), 2), "has node 2 as a parent in slot 0 .prompt 0., node 2;", SOME),
    "a parent after its child": ("top", cycle_of_two, "has node 1 as a parent in slot 0 .prompt 0., node 0;", SOME),
    "a parent that is none": ("top", at("parents", (1, 3), 9), "has node 9 as a parent in slot 1", SOME),
    "a chain with a branch": (
        "point",
        lambda d, _: replace(d, parents=d.parents.clone().fill_(-1)),
        "as a parent in a chain",
        SOME,
    ),
    "twins": ("wor", at("tokens", (0, 1), 1), "two siblings the same token 1 in slot 0 .prompt 0., node 1;", SOME),
    "valid after invalid": (
        "chain",
        at("valid", (0, 1), False),
        "valid node below an invalid one in slot 0 .* 2;",
        SOME,
    ),
    "valid below invalid": ("top", at("valid", (0, 0), False), "valid node below an invalid one in slot 0 .* 2;", SOME),
    "drawn lies": ("wor", lambda d, _: replace(d, kind=IID), "'iid', but traits.kind is 'without_replacement'", ALL),
    "wider than traits.nodes": ("chain", wider, "drafted 6 nodes, more than traits.nodes = 5", ALL),
    "deeper than traits.depth": ("top", deep_tree, "drafted 5 tokens deep, deeper than traits.depth = 4", SOME),
    "more levels than traits.depth": (
        "top",
        lambda d, _: replace(d, levels=5),
        "levels, deeper than traits.depth",
        ALL,
    ),
    "fewer levels than there are": ("top", lambda d, _: replace(d, levels=1), "deeper than draft.levels = 1", SOME),
    "int32 tokens": ("chain", replace_field("tokens", lambda t: t.int()), "draft.tokens of dtype int32", ALL),
    "float tokens": ("chain", replace_field("tokens", lambda t: t.float()), "draft.tokens of dtype float32", ALL),
    "a token of 64": ("chain", at("tokens", (0, 0), V), "drafted the token 64, outside of the vocabulary of 64", ALL),
    "a token of -1": (
        "top",
        at("tokens", (1, 0), -1),
        "drafted the token -1, outside .* slot 1 .prompt 1., node 0",
        SOME,
    ),
    "padding of 64": ("chain", at("tokens", (1, 2), V), "drafted padding with the token 64, outside", ALL),
    "parents of another shape": (
        "chain",
        replace_field("parents", lambda t: t[:, 1:]),
        r"\[2, 2\], not \[2, 3\]: a shape",
        ALL,
    ),
    "valid as numbers": ("chain", replace_field("valid", lambda t: t.long()), "draft.valid of dtype int64", ALL),
    "no Draft": ("chain", lambda d, _: d.tokens, "proposed a Tensor; propose.. must return a Draft", ALL),
    "elsewhere": ("chain", replace_field("tokens", lambda t: t.to("meta")), "draft.tokens on meta; .* on cpu", ALL),
    "probes that are none": ("chain", lambda d, _: replace(d, probes=4), "has 4 probes among 3 nodes", ALL),
    "finite of another shape": ("chain", lambda d, _: replace(d, finite=d.valid), "draft.finite of shape", ALL),
    "iid without sequences": ("iid", lambda d, _: replace(d, sequences=None), "'iid' without draft.sequences", ALL),
    "sequences off the tree": ("iid", at("sequences", (0, 0, 1), 0), "not paths of valid nodes from the root", SOME),
    "unequal sequences": ("iid", at("sequences", (0, 0, 1), -1), r"draft.sequences of \[1, 2\] tokens", SOME),
    "one row of q for siblings": (
        *("wor", lambda d, _: replace(d, q_index=torch.tensor([[0, 0, 2, 3]] * B))),
        *("two siblings without replacement from one row of q in slot 0 .prompt 0., node 1;", SOME),
    ),
    "an earlier sibling drawn at random": (
        "greedy",
        at("q", (0, 0), UNIFORM),
        "0.01562 at a token chosen deterministically",
        SOME,
    ),
    "an earlier sibling left in q": (
        "greedy",
        at("q", (0, 1), UNIFORM),
        "above 0 at the token of an earlier sibling",
        SOME,
    ),
    "limit overwritten": ("chain", own_limit, r"sequences.limit from \[11, 11\] to \[20, 11\]", ALL),
    "stream overwritten": ("chain", own_stream, r"sequences.stream from \[0, 1\] to \[0, 7\]", ALL),
    "history replaced": ("chain", own_history, "changed sequences.history; sequences are read-only", ALL),
    "history longer": ("chain", longer_history, "changed sequences.history", ALL),
    "history overwritten": ("chain", other_history, "changed sequences.history", SOME),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_mistake_in_draft_is_named(name: str) -> None:
    kind, change, words, _ = DRAFTS[name]
    with pytest.raises(CrossdraftError, match=f"^drafter 'seeded' .*{words}") as caught:
        first_step(decoder(kind, draft=change))
    number = words.startswith(("q that", "row of q", "negative", "0 at", "0.0", "above"))
    assert isinstance(caught.value, NumericalError if number else ContractError)


@pytest.mark.parametrize("name", [name for name, (*_, steps) in DRAFTS.items() if steps == ALL])
def test_cheap_checks_run_every_step(name: str) -> None:
    """Also what would be a stack trace of the target or the verifier: a token that is not an id."""
    kind, change, words, _ = DRAFTS[name]
    rule = {"chain": "block", "point": "block", "top": "greedy", "wor": "traversal", "iid": "spectr"}[kind]
    with pytest.raises(CrossdraftError, match=f"^drafter 'seeded' .*{words}"):
        first_step(decoder(kind, draft=change, rule=verifier_class(rule)(), validate="never"))


def never_said(verdict: Verdict, p: Tensor) -> None:
    p[:, 1, 9] = 0


def draft_never_said(verdict: Verdict, p: Tensor) -> None:
    p[0, 0, 1] = 0


VERDICTS: dict[str, tuple[str, Callable, str, str]] = {
    "a last token of 69": ("chain", at("token", 1, 69), "the token 69, outside of the vocabulary of 64,", ALL),
    "a last token of -1": ("top", at("token", 0, -1), "the token -1, outside of the vocabulary of 64,", ALL),
    "more tokens than drafted": (
        "chain",
        at("length", 1, 3),
        "accepted 3 tokens of a draft that is 2 deep in slot 1",
        ALL,
    ),
    "many more": ("chain", at("length", 0, 99), "accepted 99 tokens of a draft that is 3 deep in slot 0", ALL),
    "fewer than none": ("chain", at("length", 0, -1), "accepted -1 tokens", ALL),
    "more than the path names": (
        "top",
        replace_field("path", lambda t: t[:, :1]),
        "2 tokens o[fn] a (path of 1|draft)",
        ALL,
    ),
    "a path with duplicates": ("top", at("path", (0, 1), 0), r"the path \[0, 0\], which is not a path", SOME),
    "a path out of order": ("wor", at("path", (0, slice(2)), torch.tensor([2, 0])), r"the path \[2, 0\]", SOME),
    "a path from elsewhere": ("top", at("path", (0, slice(2)), torch.tensor([1, 2])), r"the path \[1, 2\]", SOME),
    "a path over padding": ("top", at("path", (1, slice(2)), torch.tensor([1, 3])), r"path \[1, 3\].* slot 1", SOME),
    "a path over no node": ("top", at("path", (1, 1), 7), r"the path \[0, 7\]", SOME),
    "a path that goes on": ("top", at("path", (0, 2), 3), r"with \[0, 2, 3, -1\] for 2 accepted nodes", SOME),
    "no path": ("top", lambda v, _: Verdict(v.length, v.token), "verified a tree without verdict.path", ALL),
    "float tokens": ("chain", replace_field("token", lambda t: t.float()), "verdict.token of dtype float32", ALL),
    "float lengths": ("chain", replace_field("length", lambda t: t.double()), "verdict.length of dtype float64", ALL),
    "a column": (
        "chain",
        replace_field("length", lambda t: t[:, None]),
        r"length of shape \[2, 1\], not \[2\]: a shape is off",
        ALL,
    ),
    "no Verdict": ("chain", lambda v, _: (v.length, v.token), "returned a tuple", ALL),
    "survival that is NaN": ("chain", at("survival", (0, 1), torch.nan), "survival", ALL),
    "survival above 1": ("chain", at("survival", (1, 1), 1.5), r"survival \[0.5, 1.5, 0.5\]", SOME),
    "a token the target never says": ("chain", never_said, "emitted a token of target probability 0", SOME),
    "a draft the target never says": (
        "chain",
        draft_never_said,
        "accepted a drafted token of target probability 0",
        SOME,
    ),
}


@pytest.mark.parametrize("validate", ["sampled", "never"])
@pytest.mark.parametrize("name", VERDICTS)
def test_mistake_in_verdict_is_named(name: str, validate: str) -> None:
    kind, change, words, steps = VERDICTS[name]
    if validate == "never" and steps == SOME:
        pytest.skip("seen in validated steps")
    with pytest.raises(CrossdraftError, match=f"^verifier 'fixed' .*{words}"):
        first_step(decoder(kind, verdict=change, validate=validate))
