"""Medusa heads: drafts of trained heads, and unchanged output."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_server.custom_generate import custom_generate
from crossdraft_trainers.medusa_files import save_heads
from medusa_heads import HEADS, NEW, PROMPTS, TREE, H, hidden_of, propose
from torch import Tensor
from torch.nn import functional

from crossdraft.drafters.heads.medusa.drafter import Medusa
from crossdraft.drafters.heads.medusa.weights import MedusaHeads
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import CrossdraftError, ModelError, UsageError

# -- heads that were trained ----------------------------------------------------------------------------


def train(target: Any, sequences: Sequence[Sequence[int]], heads: int, skip: int = 0, **options: Any) -> MedusaHeads:
    """Heads that know what comes after every position of ``sequences``, except each ``skip``-th one."""
    torch.manual_seed(0)
    module = MedusaHeads(H, heads, lm_head=target.get_output_embeddings(), **options)
    hidden, expected = [], []
    for tokens in sequences:
        features = hidden_of(target, tokens).clone()  # out of inference mode
        for t in range(len(tokens) - 1 - heads):
            if not skip or t % skip:
                hidden.append(features[t])
                expected.append(tokens[t + 2 : t + 2 + heads])
    x, y = torch.stack(hidden), torch.tensor(expected).t()
    optimiser = torch.optim.Adam(module.parameters(), lr=0.02)
    for _ in range(150):
        loss = functional.cross_entropy(module(x).flatten(0, 1), y.flatten())
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return module


@pytest.fixture(scope="module")
def plain(heads_decoder: Callable, tiny_model: Callable) -> list[list[int]]:
    """The greedy continuation of every prompt, decoded one by one without drafts."""
    loop = heads_decoder(tiny_model("llama"), "none", {}, "greedy", batch_size=1, max_new_tokens=NEW + 8)
    return [r.tokens for r in sorted(loop.run(PROMPTS), key=lambda r: r.index)]


@pytest.fixture(scope="module")
def trained(tiny_model: Callable, plain: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> str:
    """A directory of heads for the target that are right now and then."""
    target, directory = tiny_model("llama"), tmp_path_factory.mktemp("trained")
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    accuracies = [[0.6, 0.2, 0.1], [0.5, 0.2], [0.3, 0.1]]
    save_heads(directory, train(target, texts, HEADS, skip=3), {"medusa_accuracies": accuracies})
    return str(directory)


@pytest.mark.parametrize("gamma", [1, 4])
def test_overfit_heads_accept_everything(
    tiny_model: Callable, heads_decoder: Callable, plain: list[list[int]], tmp_path: Path, gamma: int
) -> None:
    """Head i at position t predicts token t + 2 + i, in the first step and in every later one."""
    target, text = tiny_model("llama"), [*PROMPTS[1], *plain[1]]
    save_heads(tmp_path, train(target, [text], gamma), {})
    loop = heads_decoder(
        target, "medusa", {"model": str(tmp_path)}, "greedy", batch_size=1, max_new_tokens=3 * (gamma + 1)
    )
    (response,) = loop.run([PROMPTS[1]])
    assert response.tokens == plain[1][: 3 * (gamma + 1)]
    assert [r.tau for r in response.steps] == [gamma, gamma, gamma]
    assert loop.drafter.passes == 0


CHAINS = {"chain": {}, "short chain": {"gamma": 2}, "path": {"choices": [[1], [1, 0]]}}
TREES_TRIED = {
    "choices": {"choices": TREE},
    "branching": {"branching": [3, 2, 1]},
    "best": {"nodes": 7},
    "best node": {"nodes": 1},
    "gaps": {"choices": [[0], [3], [3, 2]]},
}


@pytest.mark.parametrize(
    "label, verifier, batch_size",
    [
        ("chain", "block", 3),
        ("path", "greedy-block", 3),
        ("choices", "traversal", 3),
        ("best", "specinfer", 1),
        ("gaps", "greedy", 3),
    ],
)
def test_temperature_zero_is_plain_decoding(
    tiny_model: Callable,
    heads_decoder: Callable,
    plain: list[list[int]],
    trained: str,
    label: str,
    verifier: str,
    batch_size: int,
) -> None:
    options = {"model": trained, **{**CHAINS, **TREES_TRIED}[label]}
    loop = heads_decoder(tiny_model("llama"), "medusa", options, verifier, batch_size=batch_size, max_new_tokens=NEW)
    for response in loop.run(PROMPTS):
        assert response.tokens == plain[response.index][:NEW]
        assert sum(r.emitted for r in response.steps) == NEW
        # Without a token before its root a sequence has no feature yet.
        assert (response.steps[0].nodes == 0) == (len(PROMPTS[response.index]) == 1)


def test_through_generate_of_transformers(tiny_model: Callable, plain: list[list[int]], trained: str) -> None:
    """Builder of the target's slots and heads from the drafter's request."""
    ids = torch.tensor([PROMPTS[1]])
    drafter = {"name": "medusa", "model": trained, "choices": TREE}
    out = tiny_model("llama").generate(
        ids, max_new_tokens=NEW, do_sample=False, custom_generate=custom_generate, drafter=drafter
    )
    assert out[0, ids.shape[1] :].tolist() == plain[1][:NEW]


@pytest.mark.parametrize("label", ["chain", "choices"])
def test_heads_are_right_now_and_then(tiny_model: Callable, heads_decoder: Callable, trained: str, label: str) -> None:
    """Otherwise the tests here would see only acceptance, or only rejection."""
    options = {"model": trained, **{**CHAINS, **TREES_TRIED}[label]}
    loop = heads_decoder(tiny_model("llama"), "medusa", options, "greedy", batch_size=3, max_new_tokens=NEW)
    assert {r.tau for response in loop.run(PROMPTS) for r in response.steps} == {0, 1, 2, 3}


@pytest.mark.parametrize("sampled", [True, False], ids=["chain", "tree"])
def test_drafts_match_fresh_model(tiny_model: Callable, heads_decoder: Callable, trained: str, sampled: bool) -> None:
    """After steps of accepted and rejected branches, and in slots that changed hands; 3 prompts in 2 slots."""
    target, sampling = tiny_model("llama"), Sampling(temperature=1 if sampled else 0, top_k=20)
    options = {"model": trained} if sampled else {"model": trained, "choices": TREE}
    loop = heads_decoder(
        target, "medusa", options, "block" if sampled else "greedy", batch_size=2, sampling=sampling, max_new_tokens=NEW
    )
    heads, propose, checked = loop.drafter.heads, loop.drafter.propose, set()

    @cache
    def distributions(tokens: tuple[int, ...]) -> Tensor:
        return heads(hidden_of(tiny_model("llama", copy="fresh"), tokens)[-2])

    def watched(sequences: Any, rng: Any) -> Draft:
        draft = propose(sequences, rng)
        for row, history in enumerate(sequences.history):
            if len(history) < 2 or not sequences.limit[row]:
                assert not draft.valid[row].any()
                continue
            depth = min(HEADS, sequences.limit[row])
            logits = distributions(tuple(history))[:depth]
            checked.add(tuple(history[:3]))
            if sampled:
                assert draft.count[row] == depth
                torch.testing.assert_close(draft.q[row, :depth], sampling.probs(logits), atol=1e-4, rtol=1e-3)
                continue
            best = logits.argsort(-1, descending=True)
            nodes = [path for path in TREE if len(path) <= depth]
            assert draft.count[row] == len(nodes)
            for node, path in enumerate(nodes):
                assert draft.tokens[row, node] == best[len(path) - 1, path[-1]]
                assert draft.parents[row, node] == (nodes.index(path[:-1]) if path[:-1] else -1)
        return draft

    loop.drafter.propose = watched
    assert len(list(loop.run(PROMPTS))) == len(PROMPTS)
    assert len(checked) >= len(PROMPTS)


def test_features_are_head_inputs(family: str, tiny_model: Callable, heads_decoder: Callable, tmp_path: Path) -> None:
    """New heads without a projection repeat the target's previous prediction, for every architecture."""
    target = tiny_model(family)
    save_heads(tmp_path, MedusaHeads(H, 1, lm_head=target.get_output_embeddings()), {})
    sampling = Sampling(temperature=1)
    loop = heads_decoder(target, "medusa", {"model": str(tmp_path)}, "token", batch_size=2, sampling=sampling)
    fresh = tiny_model(family, copy="fresh")
    for row in range(2):
        loop.start(row, PROMPTS[1 + row], stream=row)
    for _ in range(3):
        draft = propose(loop)
        for row, history in enumerate(loop.sequences.history):
            with torch.inference_mode():
                distribution = fresh(torch.tensor([history])).logits[0, -2].softmax(-1)
            torch.testing.assert_close(draft.q[row, 0], distribution, atol=1e-4, rtol=1e-3)
        loop.step()


def test_draft_stays_inside_context(tiny_model: Callable, heads_decoder: Callable, tmp_path: Path) -> None:
    small = tiny_model("gpt2", context=20)
    save_heads(tmp_path, MedusaHeads(H, 3, lm_head=small.get_output_embeddings()), {})
    for shape in ({}, {"choices": TREE}):
        loop = heads_decoder(
            small, "medusa", {"model": str(tmp_path), **shape}, "greedy", batch_size=2, max_new_tokens=64
        )
        for response in loop.run(PROMPTS):
            assert response.finish_reason == "length"
            assert len(PROMPTS[response.index]) + len(response.tokens) == 20


# -- the certificate ------------------------------------------------------------------------------------


def exact_heads(model: Any, ids: Sequence[int] | None = None) -> Callable[[str], Checkpoint]:
    """Two random heads for a target with features of size 8, which know all 4 tokens or only ``ids``."""
    generator = torch.Generator().manual_seed(3)
    rows = len(ids) if ids is not None else 4
    tensors: dict[str, Tensor] = {}
    for i in range(2):
        tensors[f"blocks.{i}.layers.0.weight"] = torch.randn(8, 8, generator=generator, dtype=torch.float64)
        tensors[f"blocks.{i}.layers.0.bias"] = torch.randn(8, generator=generator, dtype=torch.float64)
        tensors[f"lm_heads.{i}.weight"] = torch.randn(rows, 8, generator=generator, dtype=torch.float64) * 0.4
    if ids is not None:
        tensors["token_map"] = torch.tensor(ids)
    return lambda name: Checkpoint(name, Path("here"), {}, tensors, "here", "")


@pytest.mark.parametrize(
    "options, verifier, ids",
    [
        pytest.param({}, "block", None, marks=pytest.mark.slow),
        ({}, "token", [2, 0, 3]),
        ({"temperature": 0}, "greedy-block", None),
        *(({"branching": [2, 2]}, rule, None) for rule in ("sample-match", "specinfer", "traversal")),
        *(({"choices": [[0], [2], [2, 1]]}, rule, None) for rule in ("sample-match", "traversal")),
        ({"branching": [3, 1]}, "specinfer", [2, 0, 3]),
    ],
)
def test_output_follows_target_distribution(
    enumerate_model: Callable, exact_model: Any, options: dict[str, Any], verifier: str, ids: list[int] | None
) -> None:
    certificate = enumerate_model(
        exact_model,
        "medusa",
        {"model": "random", **options},
        verifier,
        prompt=[1, 3, 0],
        depth=2,
        load_heads=exact_heads(exact_model, ids),
    )
    assert certificate.tv <= 1e-9
    assert all(0.2 < tau < 1.9 for tau in certificate.expected_tau)


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_warped_distributions_and_prompt_of_one_token(
    enumerate_model: Callable, exact_model: Any, verifier: str
) -> None:
    certificate = enumerate_model(
        exact_model,
        "medusa",
        {"model": "random"},
        verifier,
        prompt=[2],
        depth=2,
        sampling=Sampling(temperature=0.7, top_k=3, top_p=0.9),
        load_heads=exact_heads(exact_model),
    )
    assert certificate.tv <= 1e-9
    assert certificate.expected_tau[0] == 0 < certificate.expected_tau[1]


def test_unsampled_distribution_fails_certificate(
    enumerate_model: Callable, exact_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only a real enumeration detects head distributions in the wrong order."""
    propose = Medusa.propose

    def swapped(self: Medusa, sequences: Any, rng: Any) -> Draft:
        draft = propose(self, sequences, rng)
        assert draft.q is not None
        draft.q = draft.q.flip(1)
        return draft

    monkeypatch.setattr(Medusa, "propose", swapped)
    heads = exact_heads(exact_model)
    certificate = enumerate_model(
        exact_model, "medusa", {"model": "x"}, "token", prompt=[1, 3, 0], depth=2, steps=1, load_heads=heads
    )
    assert certificate.tv > 0.01


# -- configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, config, error, sentence",
    [
        ({"gamma": 4}, {}, UsageError, "the draft is 4 tokens deep, but '.*' has 3 heads, one per token; shorten"),
        ({"branching": [1, 1, 1, 1]}, {}, UsageError, "the draft is 4 tokens deep"),
        ({"heads": 2, "gamma": 3}, {}, UsageError, "the draft is 3 tokens deep, but '.*' has 2 heads"),
        ({"choices": [[97]]}, {}, UsageError, "the tree has rank 97, but the heads '.*' have only 97 tokens"),
        ({"nodes": 4}, {}, ModelError, "their config lacks medusa_accuracies"),
        (
            {"nodes": 4},
            {"medusa_accuracies": [0.5]},
            ModelError,
            "medusa_accuracies must be a list per head of numbers",
        ),
        ({"nodes": 4}, {"medusa_accuracies": [[1.5]]}, ModelError, "must be a list per head of numbers from 0 to 1"),
    ],
)
def test_shape_that_heads_cannot_fill_is_refused(
    tiny_model: Callable,
    heads_decoder: Callable,
    tmp_path: Path,
    options: dict[str, Any],
    config: dict[str, Any],
    error: type[CrossdraftError],
    sentence: str,
) -> None:
    target = tiny_model("llama")
    save_heads(tmp_path, MedusaHeads(H, HEADS, lm_head=target.get_output_embeddings()), config)
    with pytest.raises(error, match=sentence):
        heads_decoder(target, "medusa", {"model": str(tmp_path), **options}, "greedy", batch_size=1)


@pytest.mark.parametrize("options", [{"gamma": 0}, {"choices": []}, {"branching": []}])
def test_empty_drafts_are_plain_decoding(
    tiny_model: Callable, heads_decoder: Callable, plain: list[list[int]], trained: str, options: dict[str, Any]
) -> None:
    loop = heads_decoder(
        tiny_model("llama"), "medusa", {"model": trained, **options}, "greedy", batch_size=3, max_new_tokens=NEW
    )
    for response in loop.run(PROMPTS):
        assert response.tokens == plain[response.index][:NEW]
        assert len(response.steps) == NEW
