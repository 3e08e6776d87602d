"""Medusa heads: every layout they are published in, what they draft, and that they change nothing of what is said."""

import json
import pickle
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional

import crossdraft
from crossdraft.drafters._medusa_weights import MedusaHeads, save_heads
from crossdraft.drafters.medusa import TREES, Medusa, best_tree
from crossdraft.framework.checkpoint import Checkpoint
from crossdraft.framework.decoding.sampling import Sampling
from crossdraft.framework.draft import Draft
from crossdraft.framework.errors import CrossdraftError, ModelError, NumericalError, UsageError
from crossdraft.framework.rng import CounterRng

NEW = 12
#: The shortest prompt has no committed token before its root; prompts of different lengths end in different rounds.
PROMPTS = ([5], [7, 8, 9, 7, 8, 9, 7, 8], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 11, 12, 13])
H, V, HEADS = 32, 97, 3
#: Ids that heads with a reduced vocabulary know, in no order.
KNOWN = [90, 3, 41, 7, 8, 12, 60, 11, 0, 96, 55, 23]
TREE = [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]]

# -- layouts --------------------------------------------------------------------------------------------


class Weights:
    """Random heads as plain numbers: ``w[i][j] [H, H]``, ``b[i][j] [H]`` and ``p[i] [V, H]``, and what they compute."""

    def __init__(self, layers: int = 1, rows: int = V, bias: bool = True, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator) * 0.3

        self.w = [[random(H, H) for _ in range(layers)] for _ in range(HEADS)]
        self.b = [[random(H) if bias else torch.zeros(H) for _ in range(layers)] for _ in range(HEADS)]
        self.p = [random(rows, H) for _ in range(HEADS)]
        self.bias, self.ids = bias, list(range(rows))

    def logits(self, hidden: Tensor) -> Tensor:
        """``[H]`` -> ``[heads, V]``, -inf where a head does not know a token."""
        out = torch.full((HEADS, V), -torch.inf)
        for i in range(HEADS):
            x = hidden
            for w, b in zip(self.w[i], self.b[i], strict=True):
                x = x + functional.silu(w @ x + b)
            out[i, self.ids] = (self.p[i] @ x)[: len(self.ids)]
        return out

    def v01(self, projections: bool = True, prefix: str = "") -> dict[str, Tensor]:
        tensors = {}
        for i in range(HEADS):
            for j, (w, b) in enumerate(zip(self.w[i], self.b[i], strict=True)):
                tensors |= {f"{prefix}{i}.{j}.linear.weight": w, f"{prefix}{i}.{j}.linear.bias": b}
            if projections:
                tensors[f"{prefix}{i}.{len(self.w[i])}.weight"] = self.p[i]
        return tensors

    def vllm(self, prefix: str = "", one_projection: bool = False) -> dict[str, Tensor]:
        tensors = {}
        for i in range(HEADS):
            for j, (w, b) in enumerate(zip(self.w[i], self.b[i], strict=True)):
                tensors[f"{prefix}blocks.{i}.layers.{j}.weight"] = w
                if self.bias:
                    tensors[f"{prefix}blocks.{i}.layers.{j}.bias"] = b
            if i == 0 or not one_projection:
                tensors[f"{prefix}lm_heads.{i}.weight"] = self.p[i]
        return tensors


MEDUSA = {"medusa_num_heads": HEADS, "medusa_num_layers": 1}
VLLM = {"model_type": "medusa", "hidden_size": H, "vocab_size": V, "num_heads": HEADS, "num_hidden_layers": 1}


def layout(name: str, target: Any) -> tuple[Weights, dict[str, Tensor], dict[str, Any]]:
    """Weights, and the tensors and the config of a file that holds them."""
    if name == "v0.1":
        return (w := Weights()), w.v01(), MEDUSA
    if name == "v0.1, two blocks":
        return (w := Weights(layers=2)), w.v01(), {**MEDUSA, "medusa_num_layers": 2}
    if name == "v0.1, fewer ids than the target":
        return (w := Weights(rows=90)), w.v01(), MEDUSA
    if name == "version 2":
        w = Weights()
        w.p = [target.lm_head.weight.detach()] * HEADS
        return w, w.v01(projections=False), MEDUSA
    if name == "Medusa-2":
        whole = {key: tensor.clone() for key, tensor in target.state_dict().items()}
        config = {**target.config.to_dict(), "num_heads": 32, **MEDUSA}  # of which two say how many heads attend
        return (w := Weights()), {**whole, **w.v01(prefix="medusa_head.")}, config
    if name == "vLLM":
        return (w := Weights(bias=False)), w.vllm(), VLLM
    if name == "vLLM, two blocks with biases, behind a prefix":
        config = {**VLLM, "num_hidden_layers": 2, "medusa_fc_bias": True}
        return (w := Weights(layers=2)), w.vllm("medusa_heads."), config
    if name == "vLLM, one projection":
        w = Weights()
        w.p = w.p[:1] * HEADS
        return w, w.vllm(one_projection=True), {**VLLM, "original_lm_head": True}
    if name == "vLLM, scaled":
        w = Weights()
        tensors = {key: tensor.clone() for key, tensor in w.vllm().items()}
        w.p = [p * 0.5 for p in w.p]
        return w, tensors, {**VLLM, "logit_scale": 0.5}
    if name == "vLLM, token map":
        w = Weights(rows=len(KNOWN))
        w.ids = KNOWN
        return w, {**w.vllm(), "token_map": torch.tensor(KNOWN)}, {**VLLM, "truncated_vocab_size": len(KNOWN)}
    if name == "vLLM, token map beside whole projections":
        w = Weights()
        tensors = {**w.vllm(), "token_map": torch.tensor(KNOWN)}
        w.p, w.ids = [p[KNOWN] for p in w.p], KNOWN
        return w, tensors, {**VLLM, "truncated_vocab_size": len(KNOWN)}
    assert name == "vLLM, token map that is not used"
    w = Weights()
    return w, {**w.vllm(), "token_map": torch.tensor(KNOWN)}, {**VLLM, "truncated_vocab_size": V}


LAYOUTS = [
    "v0.1",
    "v0.1, two blocks",
    "v0.1, fewer ids than the target",
    "version 2",
    "Medusa-2",
    "vLLM",
    "vLLM, two blocks with biases, behind a prefix",
    "vLLM, one projection",
    "vLLM, scaled",
    "vLLM, token map",
    "vLLM, token map beside whole projections",
    "vLLM, token map that is not used",
]


def write(directory: Path, tensors: dict[str, Any], config: dict[str, Any], pickled: bool = False) -> str:
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    if pickled:
        torch.save(tensors, directory / "medusa_lm_head.pt")
    else:
        save_file({key: t.contiguous().clone() for key, t in tensors.items()}, directory / "model.safetensors")
    return str(directory)


def hidden_of(model: Any, tokens: Sequence[int]) -> Tensor:
    """``[len(tokens), H]``: what goes into the model's head."""
    with torch.inference_mode():
        return model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states[-1][0]


def propose(loop: Any) -> Draft:
    """The draft of the next round, which is not made."""
    sequences = loop.sequences
    return loop.drafter.propose(
        sequences, loop.rng.round(sequences.stream, [0] * sequences.batch_size, torch.device("cpu"))
    )


@pytest.mark.parametrize("name, pickled", [*product(LAYOUTS, [False]), ("v0.1", True), ("vLLM, token map", True)])
def test_every_layout_gives_the_logits_of_a_hand_computation(
    tiny_model: Callable, heads_decoder: Callable, tmp_path: Path, name: str, pickled: bool
) -> None:
    target = tiny_model("llama")
    weights, tensors, config = layout(name, target)
    heads = write(tmp_path, tensors, config, pickled)
    loop = heads_decoder(target, "medusa", {"model": heads}, "block", batch_size=1, sampling=Sampling(temperature=0.8))
    loop.begin(0, PROMPTS[1])
    expected = (weights.logits(hidden_of(target, PROMPTS[1])[-2]) / 0.8).softmax(-1)
    draft = propose(loop)
    assert draft.width == HEADS
    torch.testing.assert_close(draft.q[0], expected, atol=1e-5, rtol=1e-4)
    assert (draft.q[0][:, [i for i in range(V) if i not in weights.ids]] == 0).all()


@pytest.mark.parametrize("name", ["v0.1, fewer ids than the target", "vLLM, token map"])
def test_point_masses_are_ids_of_the_target(
    tiny_model: Callable, heads_decoder: Callable, tmp_path: Path, name: str
) -> None:
    target = tiny_model("llama")
    weights, tensors, config = layout(name, target)
    heads = write(tmp_path, tensors, config)
    best = weights.logits(hidden_of(target, PROMPTS[1])[-2]).argsort(-1, descending=True)
    for options, expected in (({}, best[:, 0]), ({"choices": [[2], [2, 0], [2, 1]]}, [best[0, 2], *best[1, :2]])):
        loop = heads_decoder(target, "medusa", {"model": heads, **options}, "greedy", batch_size=1)
        loop.begin(0, PROMPTS[1])
        draft = propose(loop)
        assert draft.q is None and draft.tokens[0].tolist() == [int(token) for token in expected]


def damaged() -> Iterator[Any]:
    """A layout, what happens to its tensors and config, and the sentence that says so."""

    def case(name: str, sentence: str, change: Callable[[dict, dict], Any], **options: Any) -> Any:
        return pytest.param(name, change, options, sentence, id=sentence)

    yield case("v0.1", r"missing 1.0.linear.bias \[32\]", lambda t, c: t.pop("1.0.linear.bias"))
    yield case(
        "v0.1",
        r"missing 1.0.linear.weight \[32, 32\]; unexpected 1.0.liner.weight \[32, 32\]",
        lambda t, c: t.update({"1.0.liner.weight": t.pop("1.0.linear.weight")}),
    )
    yield case("v0.1", r"missing 2.1.weight \[97, 32\]", lambda t, c: t.pop("2.1.weight"))
    yield case(
        "v0.1",
        r"of another shape: 1.1.weight is \[97, 31\], not \[97, 32\]",
        lambda t, c: t.update({"1.1.weight": t["1.1.weight"][:, :31]}),
    )
    yield case(
        "v0.1",
        "they read features of size 48, but those of the target have size 32; take the heads that were made for this",
        lambda t, c: t.update({key: torch.zeros(48, 48) for key in t if "linear.weight" in key}),
    )
    yield case(
        "v0.1",
        "their logits have 98 entries, but the target's vocabulary has 97",
        lambda t, c: t.update({key: torch.zeros(98, H) for key in t if "linear" not in key}),
    )
    yield case(
        "v0.1", "0.0.linear.bias holds numbers that are not finite", lambda t, c: t["0.0.linear.bias"].fill_(torch.nan)
    )
    yield case(
        "v0.1",
        r"says 2 heads \(medusa_num_heads\), but the tensors hold 3; if the tensors are right, say heads: 3 in the",
        lambda t, c: c.update(medusa_num_heads=2),
    )
    yield case(
        "v0.1", r"says 1 head \(medusa_num_heads\), but the tensors hold 3", lambda t, c: c.update(medusa_num_heads=1)
    )
    yield case(
        "v0.1",
        r"says 2 blocks \(medusa_num_layers\), but the tensors hold 1",
        lambda t, c: c.update(medusa_num_layers=2),
    )
    yield case("v0.1", "asks for heads: 4, but the tensors hold 3", lambda t, c: None, heads=4)
    yield case(
        "v0.1",
        "no layout of Medusa heads has these keys: fc.weight, norm.weight",
        lambda t, c: (t.clear(), t.update({"fc.weight": torch.ones(2), "norm.weight": torch.ones(2)})),
    )
    yield case("version 2", r"missing 0.0.linear.bias \[32\]", lambda t, c: t.pop("0.0.linear.bias"))
    yield case("version 2", r"unexpected 0.2.weight \[2\]", lambda t, c: t.update({"0.2.weight": torch.ones(2)}))
    yield case("Medusa-2", r"missing 2.0.linear.weight \[32, 32\]", lambda t, c: t.pop("medusa_head.2.0.linear.weight"))
    yield case("vLLM", r"says 4 heads \(num_heads\), but the tensors hold 3", lambda t, c: c.update(num_heads=4))
    yield case("vLLM", r"says 2 blocks \(num_hidden_layers\), but the", lambda t, c: c.update(num_hidden_layers=2))
    yield case(
        "vLLM",
        r"missing 0.0.linear.bias \[32\], 1.*; blocks.{i}.layers.{j} and lm_heads.{i} are",
        lambda t, c: c.update(medusa_fc_bias=True),
    )
    yield case("vLLM, one projection", r"missing 1.1.weight \[97, 32\]", lambda t, c: c.pop("original_lm_head"))
    yield case(
        "vLLM, token map", "says that they know 12 tokens, but no token_map says which", lambda t, c: t.pop("token_map")
    )
    yield case(
        "vLLM, token map",
        "token_map holds ids from 0 to 97, but they go from 0 to 96",
        lambda t, c: t["token_map"].__setitem__(3, 97),
    )
    yield case(
        "vLLM, token map",
        "token_map holds ids from -1 to 96, but they go from 0 to 96",
        lambda t, c: t["token_map"].__setitem__(3, -1),
    )
    yield case("vLLM, token map", "token_map names an id twice", lambda t, c: t["token_map"].__setitem__(3, 3))
    yield case(
        "vLLM, token map",
        r"token_map \[13\] does not fit projections of 12 rows",
        lambda t, c: t.update(token_map=torch.arange(13)),
    )


@pytest.mark.parametrize("name, change, options, sentence", list(damaged()))
def test_what_does_not_fit_is_refused(
    tiny_model: Callable,
    heads_decoder: Callable,
    tmp_path: Path,
    name: str,
    change: Callable[[dict, dict], Any],
    options: dict[str, Any],
    sentence: str,
) -> None:
    target = tiny_model("llama")
    _, tensors, config = layout(name, target)
    tensors, config = {key: t.clone() for key, t in tensors.items()}, dict(config)
    change(tensors, config)
    with pytest.raises(ModelError, match=f"^the heads '{tmp_path}' do not load: .*{sentence}"):
        heads_decoder(target, "medusa", {"model": write(tmp_path, tensors, config), **options}, "block", batch_size=1)


class Payload:
    """What a pickle may run when it is read."""

    def __reduce__(self) -> Any:
        return (pytest.fail, ("the pickle was run",))


def test_a_pickle_of_objects_is_refused(tiny_model: Callable, heads_decoder: Callable, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    torch.save({**Weights().v01(), "x": Payload()}, tmp_path / "medusa_lm_head.pt", pickle_module=pickle)
    with pytest.raises(ModelError, match="is a pickle of more than tensors"):
        heads_decoder(tiny_model("llama"), "medusa", {"model": str(tmp_path)}, "block", batch_size=1)


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_the_user_says_how_many_heads_a_miscounting_config_has(
    tiny_model: Callable, heads_decoder: Callable, tmp_path: Path, heads: int
) -> None:
    """As in the first uploads, whose config says 2 and whose file holds 5."""
    options = {"model": write(tmp_path, Weights().v01(), {**MEDUSA, "medusa_num_heads": 7}), "heads": heads}
    loop = heads_decoder(tiny_model("llama"), "medusa", options, "greedy", batch_size=1)
    loop.begin(0, PROMPTS[1])
    assert propose(loop).width == heads


# -- heads that were trained ----------------------------------------------------------------------------


def train(target: Any, sequences: Sequence[Sequence[int]], heads: int, skip: int = 0, **options: Any) -> MedusaHeads:
    """Heads that know what comes after every position of ``sequences``, except each ``skip``-th one."""
    torch.manual_seed(0)
    module = MedusaHeads(H, heads, lm_head=target.get_output_embeddings(), **options)
    hidden, wanted = [], []
    for tokens in sequences:
        features = hidden_of(target, tokens).clone()  # out of inference mode
        for t in range(len(tokens) - 1 - heads):
            if not skip or t % skip:
                hidden.append(features[t])
                wanted.append(tokens[t + 2 : t + 2 + heads])
    x, y = torch.stack(hidden), torch.tensor(wanted).t()
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
    """Only if head i at position t is asked for token t + 2 + i, in the first round and in every later one."""
    target, text = tiny_model("llama"), [*PROMPTS[1], *plain[1]]
    save_heads(tmp_path, train(target, [text], gamma), {})
    loop = heads_decoder(
        target, "medusa", {"model": str(tmp_path)}, "greedy", batch_size=1, max_new_tokens=3 * (gamma + 1)
    )
    (response,) = loop.run([PROMPTS[1]])
    assert response.tokens == plain[1][: 3 * (gamma + 1)]
    assert [r.tau for r in response.rounds] == [gamma, gamma, gamma]
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
        *product(["chain", "path"], ["greedy", "token", "block", "greedy-block"], [3]),
        *product(["choices", "best"], ["greedy", "sample-match", "traversal", "specinfer"], [3]),
        *product(["short chain", "branching", "best node", "gaps"], ["greedy"], [3]),
        *product(["chain", "choices", "gaps"], ["greedy"], [1]),
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
        assert sum(r.emitted for r in response.rounds) == NEW
        # Without a token before its root a sequence has no feature yet.
        assert (response.rounds[0].nodes == 0) == (len(PROMPTS[response.index]) == 1)


def test_through_the_generate_of_transformers(tiny_model: Callable, plain: list[list[int]], trained: str) -> None:
    """Which builds the target's slots, and the heads for it, from what the drafter asks for."""
    ids = torch.tensor([PROMPTS[1]])
    drafter = {"name": "medusa", "model": trained, "choices": TREE}
    out = tiny_model("llama").generate(
        ids, max_new_tokens=NEW, do_sample=False, custom_generate=crossdraft.custom_generate, drafter=drafter
    )
    assert out[0, ids.shape[1] :].tolist() == plain[1][:NEW]


@pytest.mark.parametrize("label", ["chain", "choices"])
def test_the_heads_are_right_now_and_then(
    tiny_model: Callable, heads_decoder: Callable, trained: str, label: str
) -> None:
    """Otherwise the tests here would see only acceptance, or only rejection."""
    options = {"model": trained, **{**CHAINS, **TREES_TRIED}[label]}
    loop = heads_decoder(tiny_model("llama"), "medusa", options, "greedy", batch_size=3, max_new_tokens=NEW)
    assert {r.tau for response in loop.run(PROMPTS) for r in response.rounds} == {0, 1, 2, 3}


@pytest.mark.parametrize("sampled", [True, False], ids=["chain", "tree"])
def test_every_draft_is_what_a_fresh_model_says(
    tiny_model: Callable, heads_decoder: Callable, trained: str, sampled: bool
) -> None:
    """After rounds of accepted and rejected branches, and in slots that changed hands; 3 prompts in 2 slots."""
    target, sampling = tiny_model("llama"), Sampling(temperature=1 if sampled else 0, top_k=20)
    options = {"model": trained} if sampled else {"model": trained, "choices": TREE}
    loop = heads_decoder(
        target, "medusa", options, "block" if sampled else "greedy", batch_size=2, sampling=sampling, max_new_tokens=NEW
    )
    heads, made, checked = loop.drafter.heads, loop.drafter.propose, set()

    @cache
    def laws(tokens: tuple[int, ...]) -> Tensor:
        return heads(hidden_of(tiny_model("llama", copy="fresh"), tokens)[-2])

    def watched(sequences: Any, rng: Any) -> Draft:
        draft = made(sequences, rng)
        for row, history in enumerate(sequences.history):
            if len(history) < 2 or not sequences.limit[row]:
                assert not draft.valid[row].any()
                continue
            depth = min(HEADS, sequences.limit[row])
            logits = laws(tuple(history))[:depth]
            checked.add(tuple(history[:3]))
            if sampled:
                assert draft.count[row] == depth
                torch.testing.assert_close(draft.q[row, :depth], sampling.law(logits), atol=1e-4, rtol=1e-3)
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


def test_the_features_are_what_the_head_reads(
    family: str, tiny_model: Callable, heads_decoder: Callable, tmp_path: Path
) -> None:
    """New heads without a projection say what the target said one position earlier, in every architecture."""
    target = tiny_model(family)
    save_heads(tmp_path, MedusaHeads(H, 1, lm_head=target.get_output_embeddings()), {})
    sampling = Sampling(temperature=1)
    loop = heads_decoder(target, "medusa", {"model": str(tmp_path)}, "token", batch_size=2, sampling=sampling)
    fresh = tiny_model(family, copy="fresh")
    for row in range(2):
        loop.begin(row, PROMPTS[1 + row], stream=row)
    for _ in range(3):
        draft = propose(loop)
        for row, history in enumerate(loop.sequences.history):
            with torch.inference_mode():
                law = fresh(torch.tensor([history])).logits[0, -2].softmax(-1)
            torch.testing.assert_close(draft.q[row, 0], law, atol=1e-4, rtol=1e-3)
        loop.round()


MANY = tuple([2 + i, 9, 9, 2 + i, 9][: 1 + i % 5] + [4 + i] * (i % 4) for i in range(5))


@pytest.mark.parametrize(
    "options, verifier",
    [
        ({}, "block"),
        ({"gamma": 2, "temperature": 0}, "token"),
        ({"choices": TREE}, "sample-match"),
        ({"nodes": 7}, "traversal"),
    ],
)
def test_samples_do_not_depend_on_the_batch_size(
    tiny_model: Callable, heads_decoder: Callable, trained: str, options: dict[str, Any], verifier: str
) -> None:
    def sampled(batch_size: int) -> dict[int, list[int]]:
        loop = heads_decoder(
            tiny_model("llama"),
            "medusa",
            {"model": trained, **options},
            verifier,
            batch_size=batch_size,
            sampling=Sampling(temperature=1),
            max_new_tokens=8,
            rng=CounterRng(11),
        )
        return {r.index: r.tokens for r in loop.run(MANY)}

    alone = sampled(1)
    assert sampled(4) == alone
    assert len({tuple(tokens) for tokens in alone.values()}) == len(MANY)


def test_a_draft_stays_inside_the_context(tiny_model: Callable, heads_decoder: Callable, tmp_path: Path) -> None:
    small = tiny_model("gpt2", context=20)
    save_heads(tmp_path, MedusaHeads(H, 3, lm_head=small.get_output_embeddings()), {})
    for shape in ({}, {"choices": TREE}):
        loop = heads_decoder(
            small, "medusa", {"model": str(tmp_path), **shape}, "greedy", batch_size=2, max_new_tokens=64
        )
        for response in loop.run(PROMPTS):
            assert response.finish == "context"
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
        ({}, "block", None),
        ({}, "token", [2, 0, 3]),
        ({"temperature": 0}, "greedy-block", None),
        *(({"branching": [2, 2]}, rule, None) for rule in ("sample-match", "specinfer", "traversal")),
        *(({"choices": [[0], [2], [2, 1]]}, rule, None) for rule in ("sample-match", "traversal")),
        ({"branching": [3, 1]}, "specinfer", [2, 0, 3]),
    ],
)
def test_the_output_has_the_law_of_the_target(
    enumerate_model: Callable, exact_model: Any, options: dict[str, Any], verifier: str, ids: list[int] | None
) -> None:
    found = enumerate_model(
        exact_model,
        "medusa",
        {"model": "random", **options},
        verifier,
        prompt=[1, 3, 0],
        depth=2,
        load_heads=exact_heads(exact_model, ids),
    )
    assert found.tv <= 1e-9
    assert all(0.2 < tau < 1.9 for tau in found.expected_tau)


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_warped_laws_and_a_prompt_of_one_token(enumerate_model: Callable, exact_model: Any, verifier: str) -> None:
    found = enumerate_model(
        exact_model,
        "medusa",
        {"model": "random"},
        verifier,
        prompt=[2],
        depth=2,
        sampling=Sampling(temperature=0.7, top_k=3, top_p=0.9),
        load_heads=exact_heads(exact_model),
    )
    assert found.tv <= 1e-9
    assert found.expected_tau[0] == 0 < found.expected_tau[1]


def test_a_law_that_was_not_drawn_from_fails(
    enumerate_model: Callable, exact_model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the heads' laws in the wrong order only an enumeration that is one knows."""
    propose = Medusa.propose

    def swapped(self: Medusa, sequences: Any, rng: Any) -> Draft:
        draft = propose(self, sequences, rng)
        assert draft.q is not None
        draft.q = draft.q.flip(1)
        return draft

    monkeypatch.setattr(Medusa, "propose", swapped)
    heads = exact_heads(exact_model)
    found = enumerate_model(
        exact_model, "medusa", {"model": "x"}, "token", prompt=[1, 3, 0], depth=2, rounds=1, load_heads=heads
    )
    assert found.tv > 0.01


# -- trees ----------------------------------------------------------------------------------------------


def test_the_published_tree() -> None:
    tree = TREES["mc_sim_7b_63"]
    assert len(set(tree)) == len(tree) == 63
    assert [sum(len(path) == depth for path in tree) for depth in (1, 2, 3, 4)] == [10, 28, 23, 2]
    assert {(1, 6), (2, 2), (3, 1), (9, 0), (0, 0, 9), (0, 1, 2), (0, 2, 1), (0, 7, 0), (1, 0, 1), (2, 0, 0)} <= {*tree}
    assert not {(1, 7), (2, 3), (3, 2), (4, 1), (0, 8, 0), (0, 1, 3), (1, 1, 0), (0, 0, 1, 0)} & {*tree}


@pytest.mark.parametrize("nodes", range(1, 15))
def test_the_best_tree_has_the_most_accepted_tokens(nodes: int) -> None:
    """Expected accepted tokens, the sum of the paths' probabilities: of all trees that size none has more."""
    accuracies = [[0.5, 0.1, 0.3], [0.6, 0.3], [0.25, 0.5]]

    def value(path: Sequence[int]) -> float:
        out = 1.0
        for depth, rank in enumerate(path):
            out *= accuracies[depth][rank]
        return out

    every = [path for depth in (1, 2, 3) for path in product(*(range(len(a)) for a in accuracies[:depth]))]
    found = best_tree(accuracies, nodes)
    assert len(found) == len(set(found)) == nodes
    assert all(not path[:-1] or path[:-1] in found for path in found)
    # A parent is never worth less than its child, so the most valuable paths are a tree, and no tree has more.
    most = sum(sorted(map(value, every), reverse=True)[:nodes])
    assert sum(map(value, found)) == pytest.approx(most)


def test_the_best_tree_leaves_out_what_is_never_right() -> None:
    assert best_tree([[0.5, 0.0], [0.4]], 10) == ((0,), (0, 0))
    assert best_tree([[0.0], [0.4]], 10) == ()
    assert best_tree([[0.5, 0.5], [1.0]], 2) == ((0,), (1,))  # of equals the shorter comes first


def test_a_tree_of_the_published_size(tiny_model: Callable, heads_decoder: Callable, tmp_path: Path) -> None:
    target = tiny_model("llama")
    save_heads(tmp_path, MedusaHeads(H, 5, lm_head=target.get_output_embeddings()), {})
    options = {"model": str(tmp_path), "choices": "mc_sim_7b_63"}
    loop = heads_decoder(target, "medusa", options, "sample-match", batch_size=1, sampling=Sampling(temperature=1))
    loop.begin(0, PROMPTS[1])
    draft = propose(loop)
    assert draft.width == 63 and draft.valid.all() and draft.depth.max() == 4
    for node in range(63):  # siblings are different tokens
        siblings = draft.tokens[0, draft.parents[0] == draft.parents[0, node]]
        assert len(siblings.unique()) == len(siblings)


# -- configuration --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, sentence",
    [
        ({"gamma": -1}, "greater than or equal to 0"),
        ({"gamma": 2, "choices": [[0]]}, "gamma and choices are different shapes; give one of them"),
        ({"branching": [2], "nodes": 3}, "branching and nodes are different shapes"),
        ({"branching": [2, 0]}, r"branching must hold positive numbers, got \[2, 0\]"),
        ({"branching": [64, 64]}, "the tree has 4160 nodes; the most is 4096"),
        ({"nodes": 4097}, "the tree has 4097 nodes; the most is 4096"),
        ({"nodes": 0}, "greater than or equal to 1"),
        ({"heads": 0}, "greater than or equal to 1"),
        ({"choices": [[0], [1, 0]]}, r"choices hold \[1, 0\] but not its parent \[1\]"),
        ({"choices": "mc_sim"}, "mc_sim_7b_63"),
        ({"choices": TREE, "temperature": 1}, "temperature is for chains"),
        ({"siblings": "top-k"}, "Extra inputs are not permitted"),
    ],
)
def test_config_errors_are_sentences(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Medusa.Config(model="m", **options)


@pytest.mark.parametrize(
    "options, config, error, sentence",
    [
        ({"gamma": 4}, {}, UsageError, "is to draft 4 tokens deep, but '.*' has 3 heads, one for each token; shorten"),
        ({"branching": [1, 1, 1, 1]}, {}, UsageError, "is to draft 4 tokens deep"),
        ({"heads": 2, "gamma": 3}, {}, UsageError, "is to draft 3 tokens deep, but '.*' has 2 heads"),
        ({"choices": [[97]]}, {}, UsageError, "is to draft rank 97, but the heads '.*' know only 97 tokens"),
        ({"nodes": 4}, {}, ModelError, "nodes: N needs medusa_accuracies in their config"),
        (
            {"nodes": 4},
            {"medusa_accuracies": [0.5]},
            ModelError,
            "medusa_accuracies must be a list per head of numbers",
        ),
        ({"nodes": 4}, {"medusa_accuracies": [[1.5]]}, ModelError, "must be a list per head of numbers from 0 to 1"),
    ],
)
def test_a_shape_that_the_heads_cannot_fill_is_refused(
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


def test_what_it_drafts_is_known_before_anything_is_loaded() -> None:
    def traits(temperature: float = 1, **options: Any) -> tuple:
        found = Medusa.traits(Medusa.Config(model="nowhere", **options), Sampling(temperature=temperature))
        assert found.hidden_layers == (-1,) and not found.replayable
        return found.drawn, found.point_mass, found.nodes

    assert traits() == ("chain", False, 16)
    assert traits(gamma=3) == ("chain", False, 3)
    assert traits(temperature=0, gamma=3) == ("chain", True, 3)
    assert traits(choices=TREE) == ("deterministic", True, 7)
    assert traits(choices="mc_sim_7b_63") == ("deterministic", True, 63)
    assert traits(branching=[1, 1]) == ("chain", True, 2)
    assert traits(nodes=9) == ("deterministic", True, 9)


@pytest.mark.parametrize("options", [{"gamma": 0}, {"choices": []}, {"branching": []}])
def test_nothing_to_draft_is_plain_decoding(
    tiny_model: Callable, heads_decoder: Callable, plain: list[list[int]], trained: str, options: dict[str, Any]
) -> None:
    loop = heads_decoder(
        tiny_model("llama"), "medusa", {"model": trained, **options}, "greedy", batch_size=3, max_new_tokens=NEW
    )
    for response in loop.run(PROMPTS):
        assert response.tokens == plain[response.index][:NEW]
        assert len(response.rounds) == NEW


# -- the module, and what is written --------------------------------------------------------------------


def test_new_heads_are_the_targets_head(tiny_model: Callable) -> None:
    head = tiny_model("llama").get_output_embeddings()
    heads, x = MedusaHeads(H, 2, layers=2, lm_head=head), torch.randn(5, H)
    torch.testing.assert_close(heads(x), head(x).expand(2, -1, -1))
    assert heads(x, 1).shape == (1, 5, V)
    assert not any(parameter is head.weight for parameter in heads.parameters())
    with pytest.raises(ValueError, match="either the target's lm_head or a vocab_size"):
        MedusaHeads(H, 2)


@pytest.mark.parametrize("own", [{}, {"vocab_size": V}, {"vocab_size": V, "one_projection": True}])
def test_what_is_saved_is_what_is_read(
    tiny_model: Callable, heads_decoder: Callable, tmp_path: Path, own: dict[str, Any]
) -> None:
    target = tiny_model("llama")
    heads = MedusaHeads(H, 2, layers=2, lm_head=None if own else target.get_output_embeddings(), **own)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    save_heads(tmp_path, heads, {"base_model_name_or_path": "target", "medusa_num_heads": 9})
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert config == {
        "base_model_name_or_path": "target",
        "medusa_num_heads": 2,
        "medusa_num_layers": 2,
        "hidden_size": H,
    }
    loop = heads_decoder(target, "medusa", {"model": str(tmp_path)}, "greedy", batch_size=1)
    read, written = loop.drafter.heads.state_dict(), heads.state_dict()
    assert read.keys() == written.keys()
    assert all(torch.equal(read[key], tensor) for key, tensor in written.items())


def test_heads_that_overflow_are_named(tiny_model: Callable, heads_decoder: Callable, tmp_path: Path) -> None:
    tensors = {key: torch.full_like(tensor, 1e30) for key, tensor in Weights().v01().items()}
    loop = heads_decoder(
        tiny_model("llama"),
        "medusa",
        {"model": write(tmp_path, tensors, MEDUSA)},
        "token",
        batch_size=1,
        sampling=Sampling(temperature=1),
    )
    loop.begin(0, PROMPTS[1])
    with pytest.raises(NumericalError, match="produced NaN logits in slot 0; try dtype float32 or check the weights"):
        loop.round()
