"""The decode loop on real architectures: at temperature 0 every drafter gives what ``generate`` gives.

Also the cache (it holds what a fresh forward computes), the slots (refilled, ragged, in any order), how
sequences end, and what is refused.
"""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers

from crossdraft.framework import plugins
from crossdraft.framework.decoding.lm import TransformersLM
from crossdraft.framework.decoding.loop import Decoder, Response
from crossdraft.framework.decoding.sampling import Sampling
from crossdraft.framework.draft import Draft
from crossdraft.framework.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from crossdraft.framework.errors import ContractError, ModelError, NumericalError, UsageError
from crossdraft.framework.rng import CounterRng
from crossdraft.framework.tablelm import TableLM, Toy

#: Every drafter, verifier and batch size; those that repeat what another one shows are slow ones.
PAIRS = [
    pytest.param(
        drafter,
        verifier,
        batch_size,
        marks=[pytest.mark.slow] if verifier != "greedy" and (batch_size == 1 or drafter == "none") else [],
    )
    for drafter in ("none", "prompt-lookup", "small-lm")
    for verifier in ("greedy", "token", "block")
    for batch_size in (1, 3)
]
NEW = 18
#: Lengths differ, the shortest has no committed token before its root, the longest outgrows a window of 8;
#: the repetitions give prompt lookup something to find.
PROMPTS = ([5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 11, 12, 13])


@pytest.fixture(scope="module")
def expected(tiny_model: Callable) -> Callable[[str, list[int]], list[int]]:
    """``expected(family, prompt)``: transformers' own greedy continuation of `NEW` tokens, alone."""
    known: dict[tuple, list[int]] = {}

    def continue_(family: str, prompt: list[int]) -> list[int]:
        key = (family, *prompt)
        if key not in known:
            # Another copy: what the decoder does to its models must not reach the reference.
            reference = tiny_model(family, copy="reference")
            out = reference.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=NEW)
            known[key] = out[0, len(prompt) :].tolist()
        return known[key]

    return continue_


def drafter_class(name: str) -> Any:
    return plugins.get("drafters", name)


def verifier_class(name: str) -> Any:
    return plugins.get("verifiers", name)


def in_order(responses: Iterator[Response]) -> list[Response]:
    return sorted(responses, key=lambda response: response.index)


class OracleTrees(Drafter):
    """Random trees around the right answer, which it is told."""

    name = "oracle-trees"

    class Config(StrategyConfig):
        answers: dict[tuple[int, ...], list[int]]
        nodes: int = 7
        seed: int = 0

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.random = random.Random(self.config.seed)
        self.started: dict[int, int] = {}
        self.answer: dict[int, list[int]] = {}
        self.branched = 0  # accepted paths that were not simply the first nodes

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(drawn="deterministic", point_mass=True, nodes=16)

    def begin(self, row: int, prompt: Any, hidden: Any = None) -> None:
        self.started[row], self.answer[row] = len(prompt), self.config.answers[tuple(prompt)]

    def propose(self, sequences: Any, rng: Any) -> Draft:
        b, n = sequences.batch_size, self.config.nodes
        tokens, parents = torch.zeros(b, n, dtype=torch.long), torch.full((b, n), -1)
        valid = torch.zeros(b, n, dtype=torch.bool)
        for row, history in enumerate(sequences.history):
            if not history:
                continue
            ahead = self.answer[row][len(history) - self.started[row] :]
            right, depth = {-1}, {-1: 0}
            for node in range(self.random.randint(0, n)):
                parent = self.random.choice([i for i in depth if depth[i] < sequences.limit[row]] or [None])
                if parent is None:
                    break
                token = self.random.randrange(self.context.vocab_size)
                if parent in right and self.random.random() < 0.7:
                    token = ahead[depth[parent]]
                    right.add(node)
                tokens[row, node], parents[row, node], valid[row, node] = token, parent, True
                depth[node] = depth[parent] + 1
        return Draft(tokens, parents, valid, drawn="deterministic")

    def observe(self, sequences: Any, draft: Any, verdict: Any, accepted: Any, scores: Any) -> None:
        for row, tau in enumerate(accepted):
            self.branched += verdict.path[row, :tau].tolist() != list(range(tau))


@pytest.fixture
def answers(expected: Callable) -> Callable[[str], dict]:
    return lambda family: {tuple(prompt): expected(family, prompt) for prompt in PROMPTS}


# -- equal to generate ----------------------------------------------------------------------------------


@pytest.mark.parametrize("drafter, verifier, batch_size", PAIRS)
def test_temperature_zero_equals_generate(
    tiny_model: Callable,
    expected: Callable,
    decoder: Callable,
    family: str,
    drafter: str,
    verifier: str,
    batch_size: int,
) -> None:
    options = {"none": {}, "prompt-lookup": {"gamma": 4}, "small-lm": {"model": "noisy", "gamma": 3}}[drafter]
    loop = decoder(
        tiny_model(family),
        drafter_class(drafter),
        options,
        verifier_class(verifier),
        batch_size=batch_size,
        drafting=tiny_model(family, noise=0.05),
        max_new_tokens=NEW,
    )
    for response, prompt in zip(in_order(loop.run(PROMPTS)), PROMPTS, strict=True):
        assert response.tokens == expected(family, prompt)
        assert response.finish == "length"
        assert sum(r.emitted for r in response.rounds) == NEW


def test_the_noisy_drafter_is_right_now_and_then(tiny_model: Callable, decoder: Callable, family: str) -> None:
    """Otherwise the test above would exercise only acceptance, or only rejection."""
    loop = decoder(
        tiny_model(family),
        drafter_class("small-lm"),
        {"model": "noisy", "gamma": 3},
        verifier_class("greedy"),
        batch_size=3,
        drafting=tiny_model(family, noise=0.05),
        max_new_tokens=NEW,
    )
    taus = {r.tau for response in loop.run(PROMPTS) for r in response.rounds if r.nodes == 3}
    assert len(taus) > 1


@pytest.mark.parametrize("batch_size", [1, 3])
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
            accepted += sum(r.tau for r in response.rounds)
        branched += loop.drafter.branched
    assert accepted > NEW and branched > 10


# -- the cache ------------------------------------------------------------------------------------------


def assert_cache_is_fresh(model: Any, lm: Any, history: list[list[int]]) -> None:
    """Keys and values of all committed tokens but the root equal those of one plain forward pass."""
    for row, tokens in enumerate(history):
        committed = len(tokens) - 1
        assert lm.lengths[row] == committed
        if not committed:
            continue
        fresh: Any = transformers.DynamicCache()
        with torch.inference_mode():
            model(input_ids=torch.tensor([tokens[:-1]]), past_key_values=fresh, use_cache=True)
        assert len(fresh.layers) == len(lm.cache.layers)
        for ours, theirs in zip(lm.cache.layers, fresh.layers, strict=True):
            for mine, plain in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
                torch.testing.assert_close(mine[row, :, :committed], plain[0], atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("drafter", ["prompt-lookup", "small-lm", "oracle-trees"])
def test_the_cache_is_what_a_fresh_forward_computes(
    tiny_model: Callable, decoder: Callable, answers: Callable, family: str, drafter: str
) -> None:
    options: dict[str, Any] = {
        "prompt-lookup": {"gamma": 4},
        "small-lm": {"model": "noisy", "gamma": 3},
        "oracle-trees": {"answers": answers(family), "seed": 5},
    }[drafter]
    found = OracleTrees if drafter == "oracle-trees" else drafter_class(drafter)
    loop = decoder(
        tiny_model(family),
        found,
        options,
        verifier_class("greedy"),
        batch_size=3,
        drafting=tiny_model(family, noise=0.05),
        max_new_tokens=NEW,
    )
    for row, prompt in enumerate(PROMPTS):
        loop.begin(row, prompt)
    for _ in range(4):
        loop.round()
        assert_cache_is_fresh(tiny_model(family, copy="reference"), loop.target, loop.sequences.history)
        if drafter == "small-lm":  # the drafter may lag behind by the tokens it feeds next round
            lm = loop.drafter.lm
            known = [h[: held + 1] for h, held in zip(loop.sequences.history, lm.lengths, strict=True)]
            assert_cache_is_fresh(tiny_model(family, noise=0.05, copy="reference"), lm, known)


@pytest.mark.parametrize("family", ["llama", "gemma3", "gpt2"])
def test_a_long_prompt_is_prefilled_in_pieces(tiny_model: Callable, monkeypatch: Any, family: str) -> None:
    from crossdraft.framework.decoding import lm as module

    monkeypatch.setattr(module, "PREFILL_CHUNK", 5)
    lm = TransformersLM(tiny_model(family), 2, 64)
    prompt = list(range(20, 43))
    lm.begin(1, prompt)
    assert_cache_is_fresh(tiny_model(family, copy="reference"), lm, [[0], prompt])


@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "opt"])
def test_a_tree_may_be_grown_in_pieces(tiny_model: Callable, family: str) -> None:
    """Level by level and all at once give the same logits; so does every branch as a plain sequence.

    Siblings lie between ancestors, and the branches outgrow a window of 8: slots are not positions.
    """
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7]]
    parents = torch.tensor([[-1, 0, 0, 1, 1, *range(4, 13)], [-1, 0, 1, 0, 1, *range(4, 10), 3, 11, 10]])
    size = parents.shape[1]
    tokens = torch.tensor([[prompt[-1], *range(10, 9 + size)] for prompt in prompts])

    def grown(pieces: list[slice]) -> torch.Tensor:
        lm = TransformersLM(tiny_model(family), 2, 64)
        for row, prompt in enumerate(prompts):
            lm.begin(row, prompt)
        return torch.cat([lm.grow(tokens[:, piece], parents[:, piece])[0] for piece in pieces], 1)

    at_once = grown([slice(0, size)])
    torch.testing.assert_close(grown([slice(0, 1), slice(1, 3), slice(3, size)]), at_once, atol=1e-4, rtol=1e-4)
    for row, prompt in enumerate(prompts):
        for node in range(size):
            branch, at = [], node
            while at > 0:
                branch.insert(0, int(tokens[row, at]))
                at = int(parents[row, at])
            with torch.inference_mode():
                plain = tiny_model(family, copy="reference")(torch.tensor([prompt + branch])).logits[0, -1]
            torch.testing.assert_close(at_once[row, node], plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_hidden_states_are_those_of_the_model(tiny_model: Callable, family: str) -> None:
    lm, prompt = TransformersLM(tiny_model(family), 1, 64, hidden_layers=[0, 1, -1]), [3, 1, 4, 1, 5, 9]
    prefilled = lm.begin(0, prompt)
    _, grown = lm.grow(torch.tensor([[9, 2]]))
    assert prefilled is not None and grown is not None
    with torch.inference_mode():
        plain = tiny_model(family, copy="reference")(
            torch.tensor([[*prompt, 2]]), output_hidden_states=True
        ).hidden_states
    want = torch.stack([plain[i][0] for i in (0, 1, -1)], 1)
    torch.testing.assert_close(torch.cat([prefilled, grown[0]]), want, atol=1e-4, rtol=1e-4)


# -- slots ----------------------------------------------------------------------------------------------

MANY = tuple([2 + i, 9, 9, 2 + i, 9] + [4] * (i % 4) for i in range(10))


def sampled(decoder: Callable, tiny_model: Callable, batch_size: int, prompts: Any = MANY, **loop: Any) -> dict:
    """Tokens by stream, sampled at temperature 1."""
    made = decoder(
        tiny_model("llama"),
        drafter_class("small-lm"),
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
    return {streams[r.index]: r.tokens for r in made.run(prompts, streams=list(streams))}


@pytest.mark.parametrize("batch_size", [3, 8, 16])
def test_samples_do_not_depend_on_the_batch_size(decoder: Callable, tiny_model: Callable, batch_size: int) -> None:
    alone = sampled(decoder, tiny_model, 1)
    assert sampled(decoder, tiny_model, batch_size) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == len(MANY)


def test_samples_do_not_depend_on_the_order_of_the_prompts(decoder: Callable, tiny_model: Callable) -> None:
    order = [7, 2, 9, 0, 4, 1, 8, 3, 6, 5]
    shuffled = sampled(decoder, tiny_model, 3, [MANY[i] for i in order], streams=order)
    assert shuffled == sampled(decoder, tiny_model, 3)


def test_a_slot_is_refilled_while_others_go_on(decoder: Callable, tiny_model: Callable, expected: Callable) -> None:
    """Ten prompts on three slots: rows end at different rounds, and the newcomers are not disturbed."""
    loop = decoder(
        tiny_model("llama"),
        drafter_class("small-lm"),
        {"model": "noisy", "gamma": 3},
        verifier_class("greedy"),
        batch_size=3,
        drafting=tiny_model("llama", noise=0.05),
        max_new_tokens=NEW,
    )
    finished, together = [], []
    for response in loop.run(MANY):
        finished.append(response.index)
        together.append(loop.batch_rounds)
        assert response.tokens == expected("llama", MANY[response.index])
    assert sorted(finished) == list(range(len(MANY)))
    assert len(set(together)) > 4, "the rows all ended together: nothing was refilled in mid-flight"
    assert loop.occupied == 0


@pytest.mark.parametrize("drafter", ["small-lm", "oracle-trees"])
def test_eos_inside_a_draft_ends_the_sequence(
    decoder: Callable, tiny_model: Callable, expected: Callable, answers: Callable, drafter: str
) -> None:
    """Tokens drafted behind an accepted end-of-sequence token are dropped; any of several ids ends it."""
    want = {i: expected("llama", prompt) for i, prompt in enumerate(PROMPTS)}
    eos = {want[1][9], want[2][14]}
    options = {"small-lm": {"model": "same", "gamma": 5}, "oracle-trees": {"answers": answers("llama")}}[drafter]
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
        assert response.finish == ("length" if end is None else "eos")
        assert sum(r.emitted for r in response.rounds) == len(response.tokens)
        assert all(r.tau <= r.emitted for r in response.rounds)


def test_eos_in_the_prompt_does_not_end_it(decoder: Callable, tiny_model: Callable, expected: Callable) -> None:
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
        drafter_class("small-lm"),
        {"model": "same", "gamma": 5},
        verifier_class("greedy"),
        batch_size=3,
        drafting=tiny_model("llama"),
        max_new_tokens=new,
    )
    for response, prompt in zip(in_order(loop.run(PROMPTS)), PROMPTS, strict=True):
        assert response.tokens == expected("llama", prompt)[:new]
        assert response.finish == "length"
        assert sum(r.emitted for r in response.rounds) == new


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
@pytest.mark.parametrize("drafter", ["none", "small-lm"])
def test_a_sequence_ends_where_the_context_does(
    decoder: Callable, tiny_model: Callable, expected: Callable, family: str, drafter: str
) -> None:
    small = tiny_model(family, context=20)
    options = {"none": {}, "small-lm": {"model": "same", "gamma": 4}}[drafter]
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
        assert response.finish == "context"
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


def test_a_reader_who_leaves_early_leaves_the_slots_clean(
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


# -- what goes wrong with a sentence --------------------------------------------------------------------


def table_decoder(toy: Toy, drafter: Drafter, **loop: Any) -> Decoder:
    return Decoder(
        TableLM(toy.target, 2),
        drafter,
        verifier_class("token")(),
        sampling=Sampling(),
        max_new_tokens=4,
        **loop,
    )


def table_context(toy: Toy) -> DraftContext:
    return DraftContext(
        sampling=Sampling(),
        batch_size=2,
        max_length=64,
        vocab_size=toy.vocab_size,
        device=torch.device("cpu"),
        load_lm=lambda name: TableLM(toy.drafter, 2),
    )


@pytest.mark.parametrize("who", ["target", "drafter"])
def test_nan_logits_are_reported(toys: dict[str, Toy], who: str) -> None:
    nan = torch.full_like(toys["G1"].target, torch.nan)
    g1 = toys["G1"]
    toy = Toy("nan", 2, nan if who == "target" else g1.target, nan if who == "drafter" else g1.drafter)
    small = drafter_class("small-lm")
    loop = table_decoder(toy, small(small.Config(model="toy", gamma=2), table_context(toy)))
    sentence = "the target produced NaN" if who == "target" else "drafter model 'toy' produced NaN"
    with pytest.raises(NumericalError, match=sentence):
        list(loop.run([[3], [3]]))
    assert loop.occupied == 0


class TooDeep(Drafter):
    """Ignores the limit, with a chain or with a tree that is one."""

    name = "too-deep"

    class Config(StrategyConfig):
        tree: bool

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(drawn="deterministic" if config.tree else "chain", point_mass=True, nodes=16)

    def propose(self, sequences: Any, rng: Any) -> Draft:
        draft = Draft.chain(torch.ones(2, 5, dtype=torch.long), torch.tensor([5, 5]))
        if self.config.tree:  # type: ignore[attr-defined]
            draft.drawn = "deterministic"
        return draft


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_a_draft_beyond_the_limit_breaks_the_contract(toys: dict[str, Toy], tree: bool) -> None:
    always_1 = torch.tensor([[0.0, 1.0]]).expand(3, 2).double()
    toy = Toy("ones", 5, always_1, always_1)
    loop = Decoder(
        TableLM(toy.target, 2),
        TooDeep(TooDeep.Config(tree=tree), table_context(toy)),
        verifier_class("greedy")(),
        sampling=Sampling(temperature=0),
        max_new_tokens=4,
    )
    with pytest.raises(ContractError, match=r"drafter 'too-deep' drafted 5 tokens deep in slot 0, but .* allows 3"):
        list(loop.run([[2], [2]]))


def test_a_draft_of_the_wrong_batch_breaks_the_contract(toys: dict[str, Toy]) -> None:
    class WrongBatch(TooDeep):
        def propose(self, sequences: Any, rng: Any) -> Draft:
            return Draft.empty(3)

    loop = table_decoder(toys["G1"], WrongBatch(TooDeep.Config(tree=False), table_context(toys["G1"])))
    with pytest.raises(ContractError, match="drafted 3 rows for 2 slots"):
        list(loop.run([[3], [3]]))


def small_mamba() -> Any:
    config = transformers.MambaConfig(vocab_size=31, hidden_size=16, num_hidden_layers=1, state_size=4)
    return transformers.MambaForCausalLM(config)


def small_t5() -> Any:
    config = transformers.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2)
    return transformers.T5ForConditionalGeneration(config)


def small_bloom() -> Any:
    return transformers.BloomForCausalLM(transformers.BloomConfig(vocab_size=31, hidden_size=16, n_layer=1, n_head=2))


@pytest.mark.parametrize(
    "make, sentence",
    [
        (
            small_mamba,
            "MambaForCausalLM has (recurrent layers|layers of type .*): their state cannot be rolled back",
        ),
        (small_t5, "T5ForConditionalGeneration is an encoder-decoder model"),
        (small_bloom, "BloomForCausalLM takes no position_ids"),
    ],
    ids=["mamba", "t5", "bloom"],
)
def test_models_that_would_run_wrongly_are_refused(make: Callable, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        TransformersLM(make(), 1, 16)


def test_a_hybrid_model_is_refused_by_the_name_of_its_layers(tiny_model: Callable) -> None:
    model = tiny_model("qwen3", seed=9)
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="layers of type linear_attention: their state cannot be rolled back"):
        TransformersLM(model, 1, 16)


def test_growing_past_the_buffer_is_an_error(tiny_model: Callable) -> None:
    lm = TransformersLM(tiny_model("llama"), 1, 8)
    lm.begin(0, [1, 2, 3, 4, 5, 6, 7])
    with pytest.raises(ModelError, match="exceed max_length 8"):
        lm.grow(torch.tensor([[7, 8, 9]]))
