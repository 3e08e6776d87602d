"""The decode loop on real architectures: at temperature 0 every drafter gives what ``generate`` gives.

Also the slots (refilled, ragged, in any order) and how sequences end.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from oracle_trees import NEW, PROMPTS, OracleTrees, drafter_class, verifier_class

from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.contracts.steps import Response
from crossdraft.framework.errors import UsageError

#: Drafter, verifier and batch size on Llama, beside those of every family; other verifiers are slow ones.
PAIRS = [
    *[(drafter, "greedy", batch_size) for drafter, batch_size in (("none", 1), ("none", 3))],
    *[("prompt-lookup", "greedy", 3), ("draft-model", "greedy", 1)],
    *[
        pytest.param(drafter, verifier, batch_size, marks=pytest.mark.slow)
        for drafter, batch_size in (("none", 1), ("none", 3), ("prompt-lookup", 1), ("draft-model", 1))
        for verifier in ("token", "block")
    ],
]


def in_order(responses: Iterator[Response]) -> list[Response]:
    return sorted(responses, key=lambda response: response.index)


# -- equal to generate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter, verifier, batch_size", PAIRS)
def test_temperature_zero_equals_generate_of_llama(
    tiny_model: Callable, expected: Callable, decoder: Callable, drafter: str, verifier: str, batch_size: int
) -> None:
    equals_generate(tiny_model, expected, decoder, "llama", drafter, verifier, batch_size)


@pytest.mark.parametrize("drafter, batch_size", [("draft-model", 3), ("prompt-lookup", 1)])
def test_temperature_zero_equals_generate(
    tiny_model: Callable, expected: Callable, decoder: Callable, family: str, drafter: str, batch_size: int
) -> None:
    """Every family, with and without ragged rows."""
    equals_generate(tiny_model, expected, decoder, family, drafter, "greedy", batch_size)


def equals_generate(
    tiny_model: Callable,
    expected: Callable,
    decoder: Callable,
    family: str,
    drafter: str,
    verifier: str,
    batch_size: int,
) -> None:
    options = {"none": {}, "prompt-lookup": {"gamma": 4}, "draft-model": {"model": "noisy", "gamma": 3}}[drafter]
    loop = decoder(
        tiny_model(family),
        drafter_class(drafter),
        options,
        verifier_class(verifier),
        batch_size=batch_size,
        drafting=tiny_model(family, noise=0.05),
        max_new_tokens=NEW,
    )
    taus = set()
    for response, prompt in zip(in_order(loop.run(PROMPTS)), PROMPTS, strict=True):
        assert response.tokens == expected(family, prompt)
        assert response.finish_reason == "length"
        assert sum(r.emitted for r in response.steps) == NEW
        taus |= {r.tau for r in response.steps if r.nodes == 3}
    assert drafter != "draft-model" or len(taus) > 1, "only acceptance, or only rejection"


@pytest.mark.parametrize("family", ["llama", "mistral-sliding"])
@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("drafter", ["prompt-lookup", "draft-model"])
def test_verifiers_at_temperature_zero_equal_generate(
    tiny_model: Callable, expected: Callable, decoder: Callable, family: str, drafter: str, verifier: str
) -> None:
    """Verifiers read only logits: full and windowed attention stand for the other architectures."""
    equals_generate(tiny_model, expected, decoder, family, drafter, verifier, 3)


@pytest.mark.parametrize("batch_size", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_trees_equal_generate(
    tiny_model: Callable,
    expected: Callable,
    decoder: Callable,
    answers: Callable,
    family: str,
    batch_size: int,
) -> None:
    """Tree masks, positions by depth, compaction of the accepted branch, windows counted along the branch."""
    accepted = branched = 0
    for seed in range(3):
        loop = decoder(
            tiny_model(family),
            OracleTrees,
            {"answers": answers(family), "seed": seed},
            verifier_class("greedy"),
            batch_size=batch_size,
            max_new_tokens=NEW,
        )
        for response, prompt in zip(in_order(loop.run(PROMPTS)), PROMPTS, strict=True):
            assert response.tokens == expected(family, prompt)
            accepted += sum(r.tau for r in response.steps)
        branched += loop.drafter.branched
    assert accepted > NEW and branched > 10


# -- slots ----------------------------------------------------------------------------------------------


MANY = tuple([2 + i, 9, 9, 2 + i, 9] + [4] * (i % 4) for i in range(10))


def sampled(decoder: Callable, tiny_model: Callable, batch_size: int, prompts: Any = MANY, **loop: Any) -> dict:
    """Tokens by stream, sampled at temperature 1."""
    loop_decoder = decoder(
        tiny_model("llama"),
        drafter_class("draft-model"),
        {"model": "noisy", "gamma": 3},
        verifier_class("block"),
        batch_size=batch_size,
        drafting=tiny_model("llama", noise=0.2),
        temperature=1.0,
        max_new_tokens=12,
        rng=CounterRng(11),
        **{k: v for k, v in loop.items() if k != "streams"},
    )
    streams = loop.get("streams", range(len(prompts)))
    return {streams[r.index]: r.tokens for r in loop_decoder.run(prompts, streams=list(streams))}


def test_samples_depend_on_neither_batch_size_nor_order_of_prompts(decoder: Callable, tiny_model: Callable) -> None:
    separate = sampled(decoder, tiny_model, 1)
    assert len({tuple(tokens) for tokens in separate.values()}) == len(MANY)
    for batch_size in (3, 8, 16):
        assert sampled(decoder, tiny_model, batch_size) == separate
    order = [7, 2, 9, 0, 4, 1, 8, 3, 6, 5]
    assert sampled(decoder, tiny_model, 3, [MANY[i] for i in order], streams=order) == separate


def test_slot_is_refilled_while_others_go_on(decoder: Callable, tiny_model: Callable, expected: Callable) -> None:
    """Ten prompts on three slots: rows end at different steps, and the newcomers are not disturbed."""
    loop = decoder(
        tiny_model("llama"),
        drafter_class("draft-model"),
        {"model": "noisy", "gamma": 3},
        verifier_class("greedy"),
        batch_size=3,
        drafting=tiny_model("llama", noise=0.05),
        max_new_tokens=NEW,
    )
    finished, batched = [], []
    for response in loop.run(MANY):
        finished.append(response.index)
        batched.append(loop.batch_steps)
        assert response.tokens == expected("llama", MANY[response.index])
    assert sorted(finished) == list(range(len(MANY)))
    assert len(set(batched)) > 4, "the rows all ended together: nothing was refilled in mid-flight"
    assert loop.occupied == 0


@pytest.mark.parametrize("drafter", ["draft-model", "oracle-trees"])
def test_eos_inside_draft_ends_sequence(
    decoder: Callable, tiny_model: Callable, expected: Callable, answers: Callable, drafter: str
) -> None:
    """Tokens drafted behind an accepted end-of-sequence token are dropped; any of several ids ends it."""
    want = {i: expected("llama", prompt) for i, prompt in enumerate(PROMPTS)}
    eos = {want[1][9], want[2][14]}
    options = {"draft-model": {"model": "same", "gamma": 5}, "oracle-trees": {"answers": answers("llama")}}[drafter]
    loop = decoder(
        tiny_model("llama"),
        OracleTrees if drafter == "oracle-trees" else drafter_class(drafter),
        options,
        verifier_class("greedy"),
        batch_size=2,
        drafting=tiny_model("llama"),
        max_new_tokens=NEW,
        eos=eos,
    )
    for response in loop.run(PROMPTS):
        tokens = want[response.index]
        end = next((i for i, token in enumerate(tokens) if token in eos), None)
        assert response.tokens == (tokens if end is None else tokens[: end + 1])
        assert response.finish_reason == ("length" if end is None else "stop")
        assert sum(r.emitted for r in response.steps) == len(response.tokens)
        assert all(r.tau <= r.emitted for r in response.steps)


def test_eos_in_prompt_does_not_end_it(decoder: Callable, tiny_model: Callable, expected: Callable) -> None:
    want = expected("llama", PROMPTS[1])
    eos = next(token for token in PROMPTS[1] if token not in want)
    loop = decoder(
        tiny_model("llama"),
        drafter_class("none"),
        {},
        verifier_class("greedy"),
        batch_size=1,
        max_new_tokens=NEW,
        eos=[eos],
    )
    (response,) = loop.run([PROMPTS[1]])
    assert response.tokens == want


@pytest.mark.parametrize("new", [1, 2, 3, 7])
def test_exactly_max_new_tokens(decoder: Callable, tiny_model: Callable, expected: Callable, new: int) -> None:
    """Even from a drafter that is always right and drafts beyond the end."""
    loop = decoder(
        tiny_model("llama"),
        drafter_class("draft-model"),
        {"model": "same", "gamma": 5},
        verifier_class("greedy"),
        batch_size=3,
        drafting=tiny_model("llama"),
        max_new_tokens=new,
    )
    for response, prompt in zip(in_order(loop.run(PROMPTS)), PROMPTS, strict=True):
        assert response.tokens == expected("llama", prompt)[:new]
        assert response.finish_reason == "length"
        assert sum(r.emitted for r in response.steps) == new


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("drafter", ["none", "draft-model"])
def test_sequence_ends_at_context_length(
    decoder: Callable, tiny_model: Callable, expected: Callable, family: str, drafter: str
) -> None:
    small = tiny_model(family, context=20)
    options = {"none": {}, "draft-model": {"model": "same", "gamma": 4}}[drafter]
    loop = decoder(
        small,
        drafter_class(drafter),
        options,
        verifier_class("greedy"),
        batch_size=2,
        drafting=small,
        max_new_tokens=64,
    )
    for response in loop.run(PROMPTS):
        prompt = PROMPTS[response.index]
        assert response.finish_reason == "length"
        assert len(prompt) + len(response.tokens) == 20
        if family == "llama":  # rotary positions: the same weights whatever the context
            assert response.tokens == expected(family, prompt)[: len(response.tokens)] or len(response.tokens) > NEW


@pytest.mark.parametrize(
    "prompt, sentence",
    [
        ([], "prompt 1 is empty"),
        (list(range(20)), "prompt 1 has 20 tokens, but the target's context is 20 tokens"),
    ],
)
def test_bad_prompts(decoder: Callable, tiny_model: Callable, prompt: list[int], sentence: str) -> None:
    loop = decoder(tiny_model("llama", context=20), drafter_class("none"), {}, verifier_class("greedy"), batch_size=1)
    with pytest.raises(UsageError, match=sentence):
        list(loop.run([[1, 2], prompt]))


def test_reader_who_leaves_early_leaves_slots_clean(
    decoder: Callable, tiny_model: Callable, expected: Callable
) -> None:
    loop = decoder(
        tiny_model("llama"),
        drafter_class("prompt-lookup"),
        {},
        verifier_class("greedy"),
        batch_size=2,
        max_new_tokens=NEW,
    )
    responses = loop.run(PROMPTS)
    next(responses)
    responses.close()
    assert loop.occupied == 0
    for response, prompt in zip(in_order(loop.run(PROMPTS)), PROMPTS, strict=True):
        assert response.tokens == expected("llama", prompt)
