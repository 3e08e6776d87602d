"""Shared behaviour of `eagle` and `eagle3`: pairs, trees, and features that are fed again.

The heads are trained here, in a second or two each, on one text of a tiny random target: they are right on that text,
and now and then on others.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_contexts import GivenContext
from feature_heads import DRAFTS, GAMMA, LAYERS, NAMES, NEW, PROMPTS, START, features_of, make_head, overfit
from pydantic import ValidationError
from tiny_models import argmax_text
from torch import Tensor

from crossdraft.framework import plugins
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ContractError, ModelError, NumericalError
from crossdraft.framework.lm.transformers_lm import TransformersLM
from crossdraft.framework.models.checkpoint import load_checkpoint


@pytest.fixture(scope="module")
def target(tiny_model: Callable) -> Any:
    return tiny_model("llama", seed=2, num_hidden_layers=4)


@pytest.fixture(scope="module")
def text(target: Any) -> list[int]:
    """Greedy output of the target after START; hardly any token repeats."""
    tokens = argmax_text(target, START, 25)
    assert len(set(tokens)) > 20
    return tokens


@pytest.fixture(scope="module")
def trained(target: Any, text: list[int], tmp_path_factory: Any) -> Callable[[str], str]:
    """``trained(name)``: the directory of a head that knows `text`; EAGLE-3's has a reduced vocabulary."""

    @cache
    def directory(name: str) -> str:
        torch.manual_seed(1)
        head = make_head(name, target, torch.tensor(sorted({*text, *range(0, 97, 3)})))
        overfit(name, head, target, text, steps=75)
        path = tmp_path_factory.mktemp(name)
        head.save(path)
        return str(path)

    return directory


@pytest.fixture(scope="module")
def make(heads_decoder: Callable, target: Any, trained: Callable) -> Callable[..., Any]:
    """``make(name, draft, verifier, batch size, ..)``: a decode loop with a trained head."""

    def build(name: str, draft: str | dict, verifier: str, batch_size: int, temperature: float = 0, **more: Any) -> Any:
        options = {"model": trained(name), **(DRAFTS[draft] if isinstance(draft, str) else draft)}
        if name == "eagle3":
            options["layers"] = LAYERS
        sampling = Sampling(temperature=temperature)
        more = {"max_new_tokens": NEW, **more}
        return heads_decoder(target, name, options, verifier, batch_size=batch_size, sampling=sampling, **more)

    return build


@pytest.fixture(scope="module")
def plain(heads_decoder: Callable, target: Any) -> dict[int, list[int]]:
    """The tokens of every prompt, decoded one by one without drafts."""
    loop = heads_decoder(target, "none", {}, "greedy", batch_size=1, max_new_tokens=NEW)
    return {r.index: r.tokens for r in loop.run(PROMPTS)}


# -- which feature goes with which token ------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, draft",
    [("eagle3", "chain"), ("eagle3", "branching"), ("eagle3", "dynamic"), ("eagle", "chain")],
)
def test_text_that_was_learnt_is_accepted_whole(make: Callable, text: list[int], name: str, draft: str) -> None:
    """Every draft token of every step: steps after the first live on features that were fed again."""
    (response,) = make(name, draft, "greedy", 1, max_new_tokens=24).run([START])
    assert response.tokens == text[len(START) : len(START) + 24]
    assert [r.emitted for r in response.steps] == [GAMMA + 1] * 6


@pytest.mark.parametrize("name", NAMES)
def test_slip_by_one_feature_is_seen(make: Callable, name: str) -> None:
    """The test above can fail: with the token's own feature in place of the one before it, less is accepted."""
    loop = make(name, "chain", "greedy", 1, max_new_tokens=24)
    fuse = loop.drafter.head.fuse
    loop.drafter.head.fuse = lambda hidden: fuse(hidden).roll(-1, dims=-2)
    (response,) = loop.run([START])
    assert len(response.steps) > 6


@pytest.mark.parametrize(
    "name, kind",
    [
        ("eagle3", "chain"),
        ("eagle3", "drawn"),
        ("eagle3", "choices"),
        ("eagle3", "dynamic"),
        ("eagle", "chain"),
        ("eagle", "dynamic"),
    ],
)
def test_draft_probs_match_fresh_head(make: Callable, target: Any, name: str, kind: str) -> None:
    """After steps of accepted and rejected drafts, from the target's features of a pass over the whole sequence.

    A stale or misplaced key, a feature of the head's own that stayed, or a feature of the wrong node shows up here.
    """
    sampled = kind in ("chain", "drawn")
    loop = make(name, kind, "specinfer" if kind != "chain" else "token", 3, temperature=1.0)
    head, ids = loop.drafter.head, loop.drafter.head.target_ids
    propose, checked = loop.drafter.propose, 0

    @torch.inference_mode()
    def logits_after(history: list[int], drafted: list[int]) -> Tensor:
        states = target(torch.tensor([history]), output_hidden_states=True).hidden_states
        features = features_of(name, head, states)[:-1]
        tokens = history[1:]
        out = head(torch.tensor([tokens]), features[None])
        for token in drafted:
            features, tokens = torch.cat([features, out.features[0, -1:]]), [*tokens, token]
            out = head(torch.tensor([tokens]), features[None])
        if ids is None:
            return out.logits[0, -1]
        return torch.full((97,), -torch.inf).scatter_(0, ids, out.logits[0, -1])

    def watched(sequences: Any, rng: Any) -> Draft:
        nonlocal checked
        draft = propose(sequences, rng)
        for row, history in enumerate(sequences.history):
            if len(history) == 1:
                assert not draft.valid[row].any()
                continue
            assert loop.drafter.lm.lengths[row] == len(history) - 1
            for node in range(draft.width):
                if not draft.valid[row, node]:
                    continue
                parent = int(draft.parents[row, node])
                path = [i for i in draft.path_to(torch.full((3,), parent))[row].tolist() if i >= 0]
                logits = logits_after(history, draft.tokens[row, path].tolist())
                earlier_siblings = [j for j in range(node) if draft.parents[row, j] == parent]
                checked += 1
                if sampled:
                    probs = logits.softmax(-1)
                    probs[draft.tokens[row, earlier_siblings]] = 0
                    torch.testing.assert_close(draft.q[row, node], probs / probs.sum(), atol=1e-4, rtol=1e-3)
                else:
                    better = int((logits > logits[draft.tokens[row, node]] + 1e-4).sum())
                    ranks = DRAFTS["choices"]["choices"]
                    assert (
                        better == (ranks[node][-1] if kind == "choices" else len(earlier_siblings)) or kind == "dynamic"
                    )
                    assert better < 3
        return draft

    loop.drafter.propose = watched
    for row, prompt in enumerate(PROMPTS):
        loop.start(row, prompt)
    for _ in range(3):
        loop.step()
    assert checked >= 3 * 2 * 3
    assert loop.drafter.passes == 3 * 3  # one pass to catch up and one for each level but the last


# -- outputs stay the same --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, draft, verifier, batch_size",
    [
        ("eagle3", "chain", "greedy-block", 3),
        ("eagle3", "choices", "traversal", 1),
        ("eagle3", "drawn", "specinfer", 3),
        ("eagle3", "dynamic", "greedy", 3),
        ("eagle", "chain", "block", 1),
    ],
)
def test_temperature_zero_is_plain_decoding(
    make: Callable, plain: dict[int, list[int]], name: str, draft: str, verifier: str, batch_size: int
) -> None:
    taus = set()
    for response in make(name, draft, verifier, batch_size).run(PROMPTS):
        assert response.tokens == plain[response.index]
        taus |= {r.tau for r in response.steps}
    assert {0, GAMMA if draft != "greedy" else 2} <= taus  # right now and then


# -- limits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draft", ["chain", "branching", "dynamic"])
def test_draft_stays_inside_context(make: Callable, target: Any, draft: str) -> None:
    prompts = [list(range(85)), list(range(7, 87))]
    for response in make("eagle3", draft, "greedy", 2, max_new_tokens=200).run(prompts):
        assert response.finish_reason == "length"
        assert len(prompts[response.index]) + len(response.tokens) == 96


def test_sequence_of_one_token_drafts_from_its_second_step_on(make: Callable) -> None:
    (response,) = make("eagle3", "chain", "greedy", 1).run([[5]])
    assert [r.nodes for r in response.steps[:3]] == [0, GAMMA, GAMMA]


def test_no_draft_costs_no_pass(make: Callable, plain: dict[int, list[int]]) -> None:
    loop = make("eagle3", {"gamma": 0}, "greedy", 3)
    assert {r.index: r.tokens for r in loop.run(PROMPTS)} == plain
    assert loop.drafter.passes == 0


def test_long_gap_without_drafts_is_fed_in_passes_that_fit(make: Callable, text: list[int]) -> None:
    """A row that lacks more pairs than fit behind the longest sequence."""
    draft = {"gamma": GAMMA, "policy": {"name": "batch-size", "lengths": [[1, GAMMA], [3, 0]]}}
    loop = make("eagle3", draft, "greedy", 3)
    for row, maximum in enumerate((18, 16, 16)):
        loop.start(row, START, row, row, max_new_tokens=maximum)
    for _ in range(16):
        loop.step()
    loop.start(1, [3] * (loop.sequences.max_length - GAMMA - 5), 3, 1, max_new_tokens=4)
    assert [r.steps[-1].tau for _ in range(2) for r in loop.step() if r.index == 0] == [1]


def test_slot_is_used_again(make: Callable, plain: dict[int, list[int]]) -> None:
    """Features and keys of the last sequence must not reach the next one, also where it was ended early."""
    stop = plain[1][2]
    loop = make("eagle3", "chain", "greedy", 1, eos=[stop])
    for index, response in ((r.index, r) for r in loop.run([*PROMPTS, *PROMPTS])):
        tokens = plain[index % 3]
        assert response.tokens == (tokens[: tokens.index(stop) + 1] if stop in tokens else tokens)


@pytest.mark.parametrize("name", NAMES)
def test_heads_follow_targets_dtype_but_positions_stay_exact(
    heads_decoder: Callable, tiny_model: Callable, trained: Callable, name: str
) -> None:
    low = tiny_model("llama", seed=2, num_hidden_layers=4, copy="bfloat16")
    for weight in low.parameters():  # as a model loaded in bfloat16: positions stay in float32
        weight.data = weight.data.bfloat16()
    options = {"model": trained(name)} | ({"layers": LAYERS} if name == "eagle3" else {})
    loop = heads_decoder(low, name, options, "greedy", batch_size=2, max_new_tokens=8)
    taus = [r.tau for response in loop.run([START, START[:2]]) for r in response.steps]
    assert max(taus) > 1
    head = loop.drafter.head
    assert {weight.dtype for weight in head.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in head.rotary_emb.buffers()} == {torch.float32}


@pytest.mark.parametrize("name", NAMES)
def test_heads_leave_target_of_mixed_precision_as_it_is(
    heads_decoder: Callable, tiny_model: Callable, trained: Callable, name: str
) -> None:
    mixed = tiny_model("llama", seed=2, num_hidden_layers=4, copy="mixed")
    next(iter(mixed.model.layers)).self_attn.q_proj.weight.data = mixed.lm_head.weight.data[:1].bfloat16()
    mixed.model.embed_tokens.weight.data = mixed.model.embed_tokens.weight.data.double()
    before = {key: weight.dtype for key, weight in mixed.named_parameters()}
    options = {"model": trained(name)} | ({"layers": LAYERS} if name == "eagle3" else {})
    loop = heads_decoder(mixed, name, options, "greedy", batch_size=2, max_new_tokens=8)
    assert {key: weight.dtype for key, weight in mixed.named_parameters()} == before
    head = loop.drafter.head
    assert {weight.dtype for weight in head.parameters() if weight is not mixed.lm_head.weight} == {torch.float64}


# -- errors -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"depth": 3}, "depth belongs to tree: dynamic, but the draft is a chain"),
        ({"tree": "static", "gamma": 3}, "gamma belongs to a chain .leave out tree., but the draft is tree: static"),
        ({"tree": "dynamic", "temperature": 1}, "temperature belongs to a chain .* or tree: static, but"),
        ({"tree": "static", "branching": [2], "choices": [[0]]}, "branching and choices both describe the tree"),
        ({"tree": "static", "branching": [2, 0]}, r"branching is \[2, 0\]; all numbers must be positive"),
        ({"tree": "static", "choices": [[1, 0]]}, r"choices hold \[1, 0\] but not its parent \[1\]"),
        ({"tree": "dynamic", "depth": 2, "top_k": 3, "nodes": 13}, "depth 2 and top_k 3 give 12 nodes, not 13"),
        ({"gamma": 5000}, "less than or equal to 1024"),
        ({"K": 2}, "Extra inputs are not permitted"),
    ],
)
def test_config_errors_are_sentences(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        plugins.get("drafters", "eagle").Config(model="m", **options)


def test_target_without_features_is_error(trained: Callable, target: Any) -> None:
    cls, slots = plugins.get("drafters", "eagle"), TransformersLM(target, 1, 64)
    with pytest.raises(
        ModelError, match=r"drafter 'eagle' reads the features of its target, .* is not a transformers model"
    ):
        cls(cls.Config(model=trained("eagle")), GivenContext(slots, Sampling(), 64))
    drafter = cls(cls.Config(model=trained("eagle")), GivenContext(slots, Sampling(), 64, target_model=target))
    with pytest.raises(
        ContractError, match=r"needs the target's hidden states of layers \(-1,\), but .* returned none"
    ):
        drafter.start(0, [1, 2, 3], None)


def test_nan_in_heads_is_error(heads_decoder: Callable, trained: Callable, target: Any, tmp_path: Path) -> None:
    def broken(name: str) -> Any:
        checkpoint = load_checkpoint(name)
        checkpoint.tensors["fc.bias"][3] = torch.nan
        return checkpoint

    loop = heads_decoder(target, "eagle", {"model": trained("eagle")}, "greedy", batch_size=2, load_heads=broken)
    # The first row has no feature yet and drafts nothing: its logits are ignored.
    sentence = "drafter 'eagle' produced NaN or infinite logits for prompt 1 at position 3; try dtype float32"
    with pytest.raises(NumericalError, match=sentence):
        list(loop.run([[3], [1, 2, 3]]))
