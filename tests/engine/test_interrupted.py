"""Rounds that end in an error: a decoder that is used again drafts as a new one, and a NaN costs one sequence."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from oracle_trees import drafter_class, verifier_class

from crossdraft.framework.certificate.table_lm import Toy, ToyContext
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.contracts.steps import Response, raise_failed
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.errors import NumericalError, UsageError
from crossdraft.framework.testing.interruptions import Interrupted, interrupted
from crossdraft.testing import DrafterContract, TinyModel

#: Drafters with a model of their own, whose slots hold what an interrupted step left. Heads: see the contract tests.
OWN_MODEL = {
    "chain": ("draft-model", {"gamma": 3}),
    "heuristic": ("draft-model", {"gamma": 3, "policy": "heuristic"}),
    "iid": ("draft-model-iid", {"gamma": 2, "K": 2}),
    "tree": ("draft-model-tree", {"branching": [2, 1]}),
    "dynamic": ("draft-model-dynamic-tree", {"depth": 3, "top_k": 2, "nodes": 4}),
}
#: After this token the target, or the drafter, outputs NaN.
BAD = 4


@pytest.mark.parametrize("name", OWN_MODEL)
def test_interrupted_step_leaves_no_state(name: str) -> None:
    drafter, options = OWN_MODEL[name]
    attributes = {"drafter": drafter, "options": {"model": "noisy", **options}, "setting": TinyModel()}
    type("Contract", (DrafterContract,), attributes)().test_interrupted_step_leaves_no_state()


def toy_decoder(who: str = "", rule: str = "token", batch_size: int = 2, output: float = 0.0, **loop: Any) -> Decoder:
    """A toy of 5 tokens, of which `BAD` has probability ``said``; after it ``who`` outputs NaN."""
    table = torch.full((6, 5), 0.1, dtype=torch.float64)
    for token in range(5):
        table[token, (token + 1) % 4] = 0.7
    table[:, BAD] = output
    table /= table.sum(1, keepdim=True)
    broken = table.clone()
    broken[BAD] = torch.nan
    toy = Toy("toy", 2, broken if who == "target" else table, broken if who == "drafter" else table)
    context = ToyContext(toy.target, toy.drafter, Sampling(), batch_size)
    small = drafter_class("draft-model")
    drafter = small(small.Config(model="toy", gamma=2), context)
    rule = verifier_class(rule)()
    return Decoder(context.target, drafter, rule, sampling=Sampling(), **{"max_new_tokens": 12, **loop})  # type: ignore


@pytest.mark.parametrize("rule", ["token", "block", "greedy-block"])
@pytest.mark.parametrize("who", ["target", "drafter"])
def test_row_of_nan_does_not_end_others(who: str, rule: str) -> None:
    """The neighbour's output is unchanged, and the slot is clean for the next prompt."""
    prompts = [[BAD], [0, 1], [0, 2]]
    actual = {r.index: r for r in toy_decoder(who, rule).run(prompts, on_error="finish")}
    healthy = {r.index: r for r in toy_decoder("", rule).run(prompts)}
    produced = "the target produced NaN" if who == "target" else "drafter 'draft-model' produced NaN"
    assert actual[0].finish_reason == "error" and actual[0].tokens == [] and actual[0].steps == []
    assert str(actual[0].error).startswith(f"{produced} or infinite logits for prompt 0 at position 1; try dtype")
    for index in (1, 2):
        assert actual[index].finish_reason == "length" and actual[index].error is None
        assert actual[index].tokens == healthy[index].tokens
        assert [r.tau for r in actual[index].steps] == [r.tau for r in healthy[index].steps]


def test_output_before_nan_is_kept() -> None:
    (response,) = toy_decoder("target", batch_size=1, output=0.2).run([[0]], on_error="finish")
    (healthy,) = toy_decoder(batch_size=1, output=0.2).run([[0]])
    assert response.finish_reason == "error" and response.tokens == healthy.tokens[: len(response.tokens)]
    assert sum(r.emitted for r in response.steps) == len(response.tokens) > 0


def test_failures_carry_finished_responses() -> None:
    prompts = [[0, 1], [BAD], [2, BAD]]
    responses = list(toy_decoder("target").run(prompts, on_error="finish"))
    responses.sort(key=lambda response: response.index)
    with pytest.raises(NumericalError, match=r"for prompt 1 at position 1; .*; 1 more of 3 inputs failed$") as caught:
        raise_failed(responses)
    assert caught.value.responses is responses and len(responses[0].tokens) == 12
    raise_failed(responses[:1])


def test_by_default_first_nan_ends_run() -> None:
    decoder = toy_decoder("target")
    with pytest.raises(NumericalError, match="for prompt 0 at position 1"):
        list(decoder.run([[BAD], [0, 1]]))
    assert decoder.occupied == 0


def test_other_ways_to_go_on_are_refused() -> None:
    with pytest.raises(UsageError, match="on_error is one of raise, finish, not 'ignore'"):
        list(toy_decoder().run([[0]], on_error="ignore"))
    with pytest.raises(UsageError, match="validate is one of sampled, always, never, not 'often'"):
        toy_decoder(validate="often")


def test_run_inside_another_one_is_refused() -> None:
    decoder = toy_decoder(batch_size=1)
    first: Iterator[Response] = iter(decoder.run([[0], [1]]))
    next(first)
    decoder.start(0, [0])
    with pytest.raises(UsageError, match="running other sequences"):
        list(decoder.run([[2]]))
    decoder.abandon()
    assert len(list(decoder.run([[2]]))) == 1


def test_failing_update_frees_all_slots() -> None:
    decoder = toy_decoder()

    def fails(*_: Any) -> None:
        raise RuntimeError("it cannot even retire")

    decoder.drafter.free = fails  # type: ignore[method-assign]
    with interrupted(decoder, "verifier"), pytest.raises(RuntimeError, match="it cannot even retire") as caught:
        list(decoder.run([[0], [1]]))
    assert isinstance(caught.value.__context__, Interrupted)
    assert decoder.occupied == 0 and decoder.sequences.history == [[], []]
    del decoder.drafter.free
    fresh = {r.index: r.tokens for r in toy_decoder().run([[0], [1]])}
    assert {r.index: r.tokens for r in decoder.run([[0], [1]])} == fresh


def test_interrupted_step_frees_slot_of_failed_row() -> None:
    def fails(_: Any) -> None:
        raise RuntimeError("callback")

    decoder = toy_decoder("target", on_step=fails)
    with pytest.raises(RuntimeError, match="callback"):
        list(decoder.run([[BAD], [0, 1]], on_error="finish"))
    assert decoder.occupied == 0


def test_nan_in_cache_does_not_reach_next_sequence(tiny_model: Any, decoder: Any) -> None:
    """Masked slots enter attention with weight 0, and 0 x NaN is NaN: a slot that held NaN is wiped."""
    target = tiny_model("llama", copy="nan")
    bad, prompts = 13, [[3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 13, 8, 9, 10], [7, 8], [3, 5]]
    settings: dict[str, Any] = {
        "batch_size": 2,
        "max_new_tokens": 6,
        "drafting": tiny_model("llama", noise=0.2, copy="nan"),
    }
    small = drafter_class("draft-model")

    def decode(**run: Any) -> dict[int, Response]:
        loop = decoder(target, small, {"model": "m", "gamma": 2}, verifier_class("greedy"), **settings)
        return {response.index: response for response in loop.run(prompts, **run)}

    healthy = decode()
    weight = target.get_input_embeddings().weight
    good = weight[bad].clone()
    with torch.no_grad():
        weight[bad] = torch.nan
        try:
            actual = decode(on_error="finish")
        finally:
            weight[bad] = good
    assert bad not in [token for i in (0, 2, 3) for token in healthy[i].tokens]
    assert actual[1].finish_reason == "error"
    for i in (0, 2, 3):  # the long neighbour makes the short ones attend, masked, over what the slot held
        assert actual[i].error is None and actual[i].tokens == healthy[i].tokens
