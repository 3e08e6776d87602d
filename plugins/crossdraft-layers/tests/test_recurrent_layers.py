"""Models with recurrent layers: chains and trees in ragged batches equal the model itself, without a cache."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from architecture_checks import disagreement, plain
from architecture_variants import OWN, variants
from architecture_walk import TOLERANCE, TYPES, class_name
from crossdraft_layers.recurrent_cache import RecurrentCache
from oracle_trees import NEW, PROMPTS, OracleTrees, drafter_class, verifier_class
from scipy.stats import chisquare
from tiny_architectures import noisy, tiny
from tiny_models import generated
from transformers import CONFIG_MAPPING

from crossdraft.framework.contracts.rng import CounterRng
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm import prompt_prefill
from crossdraft.framework.lm.architectures import RECENT
from crossdraft.framework.lm.architectures import RECURRENT as RECURRENT_CLASSES
from crossdraft.framework.lm.kv_cache import RaggedCache
from crossdraft.framework.lm.transformers_lm import TransformersLM

pytestmark = pytest.mark.skipif(not RECENT, reason="needs transformers 5.23")

#: One for each way in which a module keeps its states; all others are slow.
FEW = ["qwen3_next", "nemotron_h", "lfm2", "minimax", "recurrent_gemma", "rwkv", "xlstm", "inkling_text"]
RECURRENT = [name for name in TYPES if class_name(name) in RECURRENT_CLASSES]


def families(few: Sequence[str]) -> list[Any]:
    """Every model type with recurrent layers, those that are not among ``few`` marked slow."""
    return [*few, *(pytest.param(name, marks=pytest.mark.slow) for name in RECURRENT if name not in few)]


FOUR = [*PROMPTS, [40, 41, 42, 43, 44]]


@cache
def _tiny(model_type: str, **changes: Any) -> Any:
    return tiny(CONFIG_MAPPING[model_type], **changes)


def make_model(model_type: str, **changes: Any) -> Any:
    """A tiny model of the test's own."""
    return copy.deepcopy(_tiny(model_type, **changes))


@pytest.fixture
def stale_state(monkeypatch: Any) -> None:
    """Mistake: a commit keeps the states behind the last node of the step, accepted or not."""

    def select(self: RecurrentCache, counts: list[int]) -> None:
        for states in self._modules.values():
            for buffer in states.buffers:
                buffer[0] = buffer[-1]

    monkeypatch.setattr(RecurrentCache, "_select", select)


@pytest.mark.parametrize("model_type", families(FEW))
def test_logits_match_the_model(model_type: str) -> None:
    """Six steps, of which the first three draft chains; every row keeps another number of nodes."""
    assert disagreement(make_model(model_type), steps=6, chains=3, prompts=FOUR) < TOLERANCE


@pytest.mark.parametrize("model_type", families(["qwen3_next", "rwkv"]))
def test_logits_of_one_row_match_the_model(model_type: str) -> None:
    prompts = PROMPTS[2:]
    assert disagreement(make_model(model_type), steps=6, chains=3, prompts=prompts) < TOLERANCE


@pytest.mark.parametrize("model_type", families(["qwen3_next", "lfm2"]))
@pytest.mark.parametrize("prompts", [PROMPTS[2:], FOUR], ids=["one row", "four rows"])
@pytest.mark.usefixtures("stale_state")
def test_stale_state_is_detected(model_type: str, prompts: Sequence[list[int]]) -> None:
    assert disagreement(make_model(model_type), chains=4, prompts=prompts) > 0.1


def many_prompts(count: int) -> list[list[int]]:
    """Different prompts of 1 to 24 tokens."""
    chance = random.Random(count)
    return [[chance.randrange(1, 90) for _ in range(1 + i % 24)] for i in range(count)]


@pytest.mark.parametrize("prompts", [FOUR, pytest.param(many_prompts(24), marks=pytest.mark.slow)], ids=["4", "24"])
@pytest.mark.parametrize("model_type", families(["lfm2", "nemotron_h"]))
@pytest.mark.parametrize("drafter", ["chains", "trees"])
def test_greedy_text_is_that_of_generate(
    decoder: Callable, model_type: str, drafter: str, prompts: Sequence[list[int]]
) -> None:
    """In float32, token for token; every row accepts another number of drafted tokens."""
    target = make_model(model_type)
    expected = {tuple(prompt): generated(make_model(model_type), [prompt], NEW)[0] for prompt in prompts}
    chosen: tuple[Any, dict[str, Any]] = (OracleTrees, {"answers": expected})
    if drafter == "chains":
        chosen = drafter_class("draft-model"), {"model": "noisy", "gamma": 3}
    loop = decoder(target, *chosen, verifier_class("greedy"), batch_size=3, drafting=noisy(target), max_new_tokens=NEW)
    accepted = set()
    for response in loop.run(prompts):
        assert response.tokens == expected[tuple(prompts[response.index])]
        accepted |= {step.tau for step in response.steps}
    assert len(accepted) > 1


@torch.inference_mode()
@pytest.mark.parametrize("model_type", ["qwen3_next", "recurrent_gemma", "minimax", "rwkv", "inkling_text", "mamba"])
def test_prompts_in_pieces_and_in_one_batch(model_type: str, monkeypatch: Any) -> None:
    """Pieces of five tokens; two prompts of different length in one padded pass."""
    monkeypatch.setattr(prompt_prefill, "PREFILL_CHUNK", 5)
    long, short = list(range(10, 33)), [40, 41, 42]
    model = make_model(model_type)
    lm = TransformersLM(model, 3, 64)
    lm.prefill({1: long[:7]})
    lm.prefill({1: long[:-1]})  # continues
    lm.prefill({0: short[:-1], 2: long[:-1]})
    texts = [short, long, long]
    for row, text in enumerate(texts):
        lm.start(row, text)
    logits = lm.forward(torch.tensor([[text[-1], 3] for text in texts]))[0]
    for row, text in enumerate(texts):
        expected = plain(make_model(model_type), [*text, 3])[len(text) - 1 :]
        assert (logits[row] - expected).abs().max() < TOLERANCE * expected.std()


@torch.inference_mode()
def test_row_of_one_token_starts_without_state() -> None:
    """Also if the slot was not freed; nothing is fed for such a prompt."""
    lm = TransformersLM(make_model("qwen3_next"), 1, 64)
    lm.start(0, [7, 8, 9, 10])
    lm.start(0, [5])
    logits = lm.forward(torch.tensor([[5, 6]]))[0][0]
    expected = plain(make_model("qwen3_next"), [5, 6])
    assert (logits - expected).abs().max() < TOLERANCE * expected.std()


@torch.inference_mode()
def test_nan_ends_with_its_sequence() -> None:
    lm = TransformersLM(make_model("qwen3_next"), 2, 64)
    lm.start(0, [7, 8, 9])
    lm.start(1, [5, 6])
    for states in lm.cache._modules.values():
        for buffer in states.buffers:
            buffer[:, 0] = float("nan")
    logits = lm.forward(torch.tensor([[9, 3], [6, 3]]))[0]
    assert logits[0].isnan().all() and logits[1].isfinite().all()
    lm.commit([1, 1])
    lm.free(0)
    lm.start(0, [7, 8, 9])
    logits = lm.forward(torch.tensor([[9, 3], [3, 3]]))[0][0]
    expected = plain(make_model("qwen3_next"), [7, 8, 9, 3])[2:]
    assert (logits - expected).abs().max() < TOLERANCE * expected.std()


def test_longrope_and_recurrent_layers() -> None:
    model = tiny(CONFIG_MAPPING["qwen3_next"], **variants(CONFIG_MAPPING["qwen3_next"])["rope longrope"])
    assert disagreement(model, steps=8, chains=4) < TOLERANCE


def test_longer_slots_than_exact_are_refused() -> None:
    model = tiny(CONFIG_MAPPING["inkling_text"], **OWN["inkling_text"]["scaled attention"])
    with pytest.raises(ModelError, match=r"^InklingForCausalLM scales its attention from position 16 on"):
        TransformersLM(model, 2, 64)


@torch.inference_mode()
@pytest.mark.parametrize("model_type", ["qwen3_next", "falcon_h1", "mamba2", "recurrent_gemma"])
def test_hidden_states_of_heads(model_type: str) -> None:
    """State L is that before the final norm, which transformers does not return."""
    model, text = make_model(model_type), [7, 8, 9, 10, 11]
    lm = TransformersLM(model, 1, 64)
    lm.hidden_layers = (0, 1, -1, model.config.num_hidden_layers)
    prompt = lm.start(0, text)
    assert prompt is not None
    _, nodes = lm.forward(torch.tensor([[11, 3]]))
    assert nodes is not None
    output = make_model(model_type)(torch.tensor([[*text, 3]]), use_cache=False, output_hidden_states=True)
    expected = torch.stack([output.hidden_states[i][0] for i in (0, 1, -1)], 1)
    actual = torch.cat([prompt, nodes[0]])
    assert (actual[:, :3] - expected).abs().max() < TOLERANCE * expected.std()
    norm = next(
        m for n, m in model.get_decoder().named_children() if n in ("norm", "norm_f", "final_layernorm", "final_norm")
    )
    torch.testing.assert_close(norm(actual[:, 3]), actual[:, 2], atol=1e-5, rtol=1e-4)


def test_step_is_one_pass() -> None:
    model, calls = make_model("qwen3_next"), []
    model.model.register_forward_hook(lambda *_: calls.append(1))
    lm = TransformersLM(model, 2, 64)
    lm.start(0, [7, 8, 9])
    lm.start(1, [5, 6])
    calls.clear()
    for counts in ([1, 3], [4, 2], [0, 4]):
        lm.forward(torch.ones(2, 4, dtype=torch.long))
        lm.commit(counts)
    assert len(calls) == lm.passes == 3


def test_memory_of_states_is_counted() -> None:
    lm = TransformersLM(make_model("mamba"), 2, 64)
    lm.start(0, [7, 8, 9])
    before = lm.cache.nbytes()
    lm.forward(torch.ones(2, 4, dtype=torch.long))
    assert lm.cache.nbytes() == 5 * before > 0  # the committed state, and one of each node


def test_model_outside_of_decoder_is_unchanged() -> None:
    model, tokens = make_model("qwen3_next"), torch.tensor([[5, 6, 7, 8]])
    before = generated(make_model("qwen3_next"), [[5, 6, 7, 8]], NEW)
    TransformersLM(model, 1, 64)
    assert generated(model, [[5, 6, 7, 8]], NEW) == before
    model(tokens, labels=tokens).loss.backward()


def test_states_in_unknown_modules_are_refused(tiny_model: Callable) -> None:
    model = copy.deepcopy(tiny_model("qwen3", seed=9))
    model.config.layer_types = ["linear_attention", "full_attention"]
    with pytest.raises(ModelError, match="layers of type linear_attention: crossdraft cannot reset their state"):
        TransformersLM(model, 1, 16)


def test_other_caches_are_refused() -> None:
    with pytest.raises(ModelError, match="needs a RecurrentCache and got a RaggedCache, which does not keep"):
        TransformersLM(make_model("lfm2"), 2, 16, RaggedCache(2, 16))


# -- the sampling distribution --------------------------------------------------------------------------

VOCABULARY, LENGTH, SAMPLES = 4, 3, 1500


class SamePrompt(TransformersLM):
    """Prefills the one prompt once, into every slot: refilled, a slot still holds its keys, and gets its states."""

    states: Any = None

    @torch.inference_mode()
    def start(self, row: int, prompt: Sequence[int]) -> None:
        if self.states is None:
            super().start(row, prompt)
            for layer in self.cache.layers:
                for buffer in (layer.keys, layer.values):
                    if buffer is not None:
                        buffer[:] = buffer[row].clone()
            self.states = {key: states.of(row) for key, states in self.cache._modules.items()}
        for key, states in self.states.items():
            for buffer, state in zip(self.cache._modules[key].buffers, states, strict=True):
                buffer[0, row] = state[0]
        self.lengths[row] = self.cache.committed[row] = len(prompt) - 1

    def free(self, row: int) -> None:
        self.lengths[row] = self.cache.committed[row] = 0


#: Families whose tiny models hardly depend on their states: factors of the weights of their layers with which a stale
#: state changes the distribution of three tokens.
FACTORS = {
    **dict.fromkeys(("falcon_mamba", "inkling2_text", "inkling_text", "mamba", "recurrent_gemma"), 2),
    "zaya": 4,
}


def make_sensitive(model_type: str) -> Any:
    """A model whose distribution depends on its states."""
    sizes = ["vocab_size", *(["unpadded_vocab_size"] if model_type.startswith("inkling") else [])]
    model = make_model(model_type, **dict.fromkeys(sizes, VOCABULARY))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "embed" not in name and "lm_head" not in name:
                weight *= FACTORS.get(model_type, 1)
    return model


@pytest.mark.parametrize("mistake", [False, True], ids=["exact", "stale state"])
@pytest.mark.parametrize("model_type", families(["minimax"]))
def test_sampling_distribution(decoder: Callable, model_type: str, mistake: bool, request: Any) -> None:
    """Joint distribution of three tokens at temperature 1, by chi-square; with a stale state it is another one."""
    if mistake:
        request.getfixturevalue("stale_state")
    target, prompt = make_sensitive(model_type), [0, 1, 2, 3]
    probs = np.ones(1)
    for n in range(LENGTH):
        contexts = torch.tensor([[*prompt, *more] for more in itertools.product(range(VOCABULARY), repeat=n)])
        with torch.inference_mode():
            p = target(contexts, use_cache=False).logits[:, -1].double().softmax(-1).numpy()
        probs = (probs[:, None] * p).ravel()
    loop = decoder(
        target,
        drafter_class("draft-model"),
        {"model": "noisy", "gamma": 2},
        verifier_class("token"),
        drafting=noisy(target, 0.5),
        lm=SamePrompt,
        temperature=1.0,
        batch_size=1000,
        max_length=32,
        max_new_tokens=LENGTH,
        rng=CounterRng(2024),
    )
    counts = np.zeros(VOCABULARY**LENGTH)
    for response in loop.run([prompt] * SAMPLES):
        counts[int(np.ravel_multi_index(response.tokens, (VOCABULARY,) * LENGTH))] += 1
    frequent = probs * SAMPLES >= 5  # the other texts are one cell
    observed, expected = (
        np.append(values[frequent], values[~frequent].sum()) for values in (counts, probs / probs.sum() * SAMPLES)
    )
    p_value = chisquare(observed, expected).pvalue
    assert (p_value < 1e-6) if mistake else (p_value > 1e-3)
