"""Prompts that share prefill passes: the same tokens and hidden states as one by one, fewer passes, and no stalls."""

from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle_trees import drafter_class, verifier_class
from tiny_models import save_model

from crossdraft import generate, load_model, stream
from crossdraft.framework.certificate.table_lm import TableLM
from crossdraft.framework.contracts.steps import Request
from crossdraft.framework.engine.decoder import Decoder
from crossdraft.framework.engine.prefill import passes, prefills
from crossdraft.framework.errors import UsageError
from crossdraft.framework.lm.architectures import RECENT
from crossdraft.framework.lm.transformers_lm import TransformersLM

pytestmark = pytest.mark.usefixtures("third_party")
#: Ragged; two have nothing to prefill but the root, some outgrow a window of 8, one what a pass may feed below.
LENGTHS = [2, 23, 1, 9, 40, 5, 9, 1, 14, 3]
PROMPTS = [[(5 + 7 * i + 3 * j * j) % 90 for j in range(length)] for i, length in enumerate(LENGTHS)]
CHAIN = "draft-model", {"model": "noisy", "gamma": 3}
PAIRS = {
    "chain": (*CHAIN, "block"),
    "iid": ("draft-model-iid", {"model": "noisy", "gamma": 2, "K": 2}, "spectr"),
    "tree": ("draft-model-tree", {"model": "noisy", "branching": [2, 2]}, "traversal"),
    "fork": ("first-layers", {"layers": (0,), "gamma": 3}, "token"),
}


class CountingLM(TransformersLM):
    """Notes the rows and the width of every prefill pass."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.fed: list[tuple[int, ...]] = []
        run = self.forward_pass.run

        def counted(tokens: Any, *arguments: Any, want_logits: bool = True) -> Any:
            if not want_logits:
                self.fed.append(tuple(tokens.shape))
            return run(tokens, *arguments, want_logits=want_logits)

        self.forward_pass.run = counted


@pytest.fixture
def make_decoder(tiny_model: Callable, decoder: Callable) -> Callable[..., Decoder]:
    def make(pair: str, family: str = "llama", batch_size: int = 4, **loop: Any) -> Decoder:
        drafter, options, rule = PAIRS[pair]
        loop = {"temperature": 1.0, "max_new_tokens": 9, **loop}
        models = tiny_model(family), tiny_model(family, noise=0.05)
        return decoder(
            models[0], drafter_class(drafter), options, verifier_class(rule), batch_size=batch_size, drafting=models[1],
            lm=CountingLM, **loop,
        )  # fmt: skip

    return make


def outputs(loop: Decoder) -> list[Any]:
    responses = sorted(loop.run(PROMPTS), key=lambda response: response.index)
    return [(r.tokens, r.finish_reason, [(item.tau, item.nodes) for item in r.steps]) for r in responses]


@pytest.mark.parametrize(
    "pair, family",
    [*((pair, "llama") for pair in PAIRS), ("chain", "mistral-sliding"), ("fork", "gpt2")],
)
def test_tokens_are_those_of_prompts_prefilled_one_by_one(make_decoder: Callable, pair: str, family: str) -> None:
    """Prompts that share a pass, or wait while others decode and are prefilled in chunks of 24 tokens."""
    separate, batched, pieces = (make_decoder(pair, family, prefill_tokens=maximum) for maximum in (0, 1024, 24))
    assert outputs(batched) == outputs(separate) == outputs(pieces)
    fed = [loop.target.fed for loop in (separate, batched, pieces)]  # type: ignore[attr-defined]
    assert all(rows == 1 for rows, _ in fed[0]) and any(rows > 2 for rows, _ in fed[1])
    assert all(rows * width <= 24 for rows, width in fed[2]) and any(rows > 1 for rows, _ in fed[2])


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2", "opt"])
def test_hidden_states_are_those_of_prompts_prefilled_one_by_one(tiny_model: Callable, family: str) -> None:
    batched, pieces, separate = (TransformersLM(tiny_model(family), len(PROMPTS), 64) for _ in range(3))
    for lm in (batched, pieces, separate):
        lm.hidden_layers = (0, 1, -1)
    batched.prefill({row: prompt[:-1] for row, prompt in enumerate(PROMPTS)})
    for row, prompt in enumerate(PROMPTS):
        for upto in range(6, len(prompt) - 1, 6):
            pieces.prefill({row: prompt[:upto]})
    for row, prompt in enumerate(PROMPTS):
        want = separate.start(row, prompt)
        for lm in (batched, pieces):
            actual = lm.start(row, prompt)
            assert lm.lengths[row] == len(prompt) - 1
            if want is None:
                assert actual is None
                continue
            assert actual is not None and actual.shape == (len(prompt) - 1, 3, 32)
            torch.testing.assert_close(actual, want, atol=2e-5, rtol=1e-4)
    root = torch.tensor([[prompt[-1]] for prompt in PROMPTS])
    want, _ = separate.forward(root)
    for lm in (batched, pieces):
        torch.testing.assert_close(lm.forward(root)[0], want, atol=1e-4, rtol=1e-4)


@pytest.mark.skipif(not RECENT, reason="this transformers keeps the hidden states of all layers or none")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hidden_states_of_no_other_layer_are_kept(tiny_model: Callable, family: str) -> None:
    lm, kept = TransformersLM(tiny_model(family, copy="heard"), 2, 32), []
    hook = lm.model.register_forward_hook(
        lambda module, inputs, out: kept.append([state is not None for state in out.hidden_states])
    )
    try:
        for layers, present in (((-1,), [False, False, True]), ((0, 0.5), [True, True, False])):
            lm.hidden_layers = layers
            lm.prefill({0: [5, 6, 7], 1: [8]})
            lm.start(0, [5, 6, 7, 9, 9])
            lm.forward(torch.tensor([[3], [4]]))
            assert kept == [present] * 3
            kept.clear()
    finally:
        hook.remove()


def test_eight_short_prompts_are_one_pass_of_each_model(make_decoder: Callable) -> None:
    for maximum, count in ((1024, 1), (0, 8)):
        loop = make_decoder("chain", batch_size=8, prefill_tokens=maximum)
        finished = list(loop.run([prompt[:8] * 2 for prompt in PROMPTS if len(prompt) > 1]))
        assert len(finished) == 8
        assert len(loop.target.fed) == len(loop.drafter.model.lm.fed) == count
        assert sum(rows for rows, _ in loop.target.fed) == 8


def test_running_row_waits_for_one_pass_at_most(make_decoder: Callable) -> None:
    """Prompts that are longer than a pass come beside a running sequence, and begin when they are whole."""
    loop, log = make_decoder("chain", prefill_tokens=8, max_new_tokens=30), []
    loop.on_step = lambda event: log.append((len(loop.target.fed), [i for i in event.prompts if i is not None]))
    first = Request(PROMPTS[0], 0, 0)
    later = [Request(PROMPTS[i], i, i, max_new_tokens=4) for i in (4, 1, 5)]
    answers = {r.index: r.tokens for done in loop.steps([first, None, *later]) for r in done}
    fed = [count for count, _ in log]
    assert fed[0] == 1 and all(b - a <= 1 for a, b in pairwise(fed))
    # 39 tokens are five passes, 22 are three, 4 go before them, alone: shorter prompts begin first.
    assert fed[-1] == 1 + 1 + 3 + 5
    resume_from = [next(n for n, running in log if i in running) for i in (5, 1, 4)]
    assert resume_from == [2, 5, 10]
    (separate,) = make_decoder("chain", batch_size=1, max_new_tokens=4).run([PROMPTS[4]], streams=[4])
    assert answers[4] == separate.tokens


def test_aborted_prefill_leaves_no_state(make_decoder: Callable) -> None:
    loop = make_decoder("fork", prefill_tokens=6, max_new_tokens=20)
    steps = loop.steps([Request(PROMPTS[0], 0, 0), None, Request([95] * 30, 1, 1), Request([95] * 20, 2, 2)])
    for _ in range(3):
        next(steps)
    assert max(loop.target.lengths[1:]) > 0 and loop.occupied == 1
    steps.close()
    assert loop.target.lengths == [0] * 4
    loop.max_new_tokens = 9
    assert outputs(loop) == outputs(make_decoder("fork", prefill_tokens=0))


def test_model_that_cannot_share_passes_begins_as_ever(make_decoder: Callable) -> None:
    """Its prompts take no step more, however long they are."""
    assert not hasattr(TableLM, "prefill")
    loop, separate = make_decoder("chain", prefill_tokens=64), make_decoder("chain", prefill_tokens=0)
    for item in (loop.target, loop.drafter.model.lm):
        item.__class__ = type("Whole", (type(item),), {"prefill": None})
    assert outputs(loop) == outputs(separate)
    assert loop.batch_steps == separate.batch_steps and sorted(loop.target.fed) == sorted(separate.target.fed)


@pytest.mark.parametrize("maximum", [4, 30, 1000])
def test_passes_respect_token_limit(maximum: int) -> None:
    lengths = {row: length - 1 for row, length in enumerate(LENGTHS)}
    stored: dict[int, int] = {}
    for step in passes(lengths, maximum):
        new = _new(step, stored)
        assert len(new) * max(new) <= maximum
        assert len(step) == 1 or not any(row in stored for row in step)
        stored |= step
    assert stored == lengths


def _new(step: Mapping[int, int], earlier: Mapping[int, int]) -> list[int]:
    return [upto - earlier.get(row, 0) for row, upto in step.items()]


def test_stream_skips_unstarted_sequences(tmp_path: Path) -> None:
    target = load_model(save_model(tmp_path / "target"), dtype="float32", device="cpu")
    prompts = [[token % 60 + 5 for token in prompt] for prompt in PROMPTS]
    options: dict[str, Any] = {"batch_size": 3, "max_new_tokens": 7, "ignore_eos": True}
    whole = generate(target, prompts, prefill_tokens=0, **options)
    pieces = list(stream(target, prompts, prefill_tokens=4, **options))
    assert all(piece.tokens or piece.response for piece in pieces)
    for response in whole:
        assert [t for piece in pieces if piece.index == response.index for t in piece.tokens] == response.tokens


def test_drafter_overriding_start_does_not_prefill() -> None:
    chain = drafter_class("draft-model")
    reads_another_text = type("ReadsAnotherText", (chain,), {"start": chain.start})
    does_both = type("DoesBoth", (reads_another_text,), {"start": chain.start, "prefill": chain.prefill})
    likes = {chain: True, drafter_class("first-layers"): False, does_both: True, reads_another_text: False}
    likes |= {drafter_class("prompt-lookup"): False, drafter_class("eagle3"): False}
    assert {drafter: prefills(drafter) for drafter in likes} == likes


def test_cap_below_none_is_refused(make_decoder: Callable) -> None:
    with pytest.raises(UsageError, match="prefill_tokens=-1 must be at least 1, or 0"):
        make_decoder("chain", prefill_tokens=-1)
