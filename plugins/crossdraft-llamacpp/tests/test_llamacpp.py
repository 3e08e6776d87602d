"""Token trees in llama.cpp's cache: every node outputs what its own path outputs, and greedy output is llama.cpp's own.

Needs llama-cpp-python and gguf; the models are made here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llama_cpp")
pytest.importorskip("gguf")

from crossdraft_drafters.self_speculation.pass_weights import save_embeddings
from crossdraft_llamacpp.lm import CHUNK, LlamaLM
from tiny_gguf import SPECIAL, VOCAB, WORDS, Plain, save_gguf

import crossdraft
from crossdraft.framework.bench.matrix import load_recipe
from crossdraft.framework.bench.run import run

CLOSE = 0.02  # keys and values are float16, and sums are made in another order in a wider batch


pytestmark = pytest.mark.usefixtures("installed")


@pytest.fixture(scope="module")
def files(tmp_path_factory: Any) -> dict[str, str]:
    root = tmp_path_factory.mktemp("gguf")
    return {
        "target": str(save_gguf(root / "target.gguf")),
        "small": str(save_gguf(root / "small.gguf", seed=1, width=32)),
        "bare": str(save_gguf(root / "bare.gguf", vocabulary=False)),
        "nan": str(save_gguf(root / "nan.gguf", nan=40)),
    }


@pytest.fixture(scope="module")
def target(files: dict[str, str]) -> crossdraft.LoadedModel:
    return crossdraft.load_model(files["target"])


PROMPTS = [
    [1, 70, 80, 90],
    [1, 259, 260, 261, 259, 260],
    [1, 100],
    [1, 5, 6, 7, 5, 6, 7, 5],
    [1, 33, 44, 33, 44, 33],
    [1],
]


def test_tree_nodes_match_their_paths(target: crossdraft.LoadedModel) -> None:
    """Random trees in several calls, over slots of unequal length, of which a random path is kept; steps of that."""
    draw = np.random.default_rng(0)
    lm = LlamaLM(target.model, 3, 96)
    texts = {row: list(PROMPTS[row]) for row in (0, 2)}  # slot 1 stays free
    for row, prompt in texts.items():
        lm.start(row, prompt)
    with Plain(target.model, 96) as plain:
        for _ in range(4):
            tokens, parents = np.zeros((3, 0), int), np.zeros((3, 0), int)
            output = []
            for width in (1, 4, 5):
                first = tokens.shape[1]
                more = draw.integers(3, VOCAB, (3, width))
                above = np.array(
                    [[draw.integers(max(first + i - 4, 0), max(first + i, 1)) for i in range(width)] for _ in range(3)]
                )
                if not first:
                    above[:] = -1
                    for row, text in texts.items():
                        more[row, 0] = text[-1]
                tokens, parents = np.hstack([tokens, more]), np.hstack([parents, above])
                logits, hidden = lm.forward(torch.from_numpy(more), torch.from_numpy(above))
                assert hidden is None and logits.shape == (3, width, VOCAB)
                assert not logits[1].any()
                output.append(logits)
            result = torch.cat(output, 1)
            paths: dict[int, list[int]] = {}
            for row, text in texts.items():
                found_paths = []
                for node in range(tokens.shape[1]):
                    way = [node]
                    while parents[row, way[0]] >= 0:
                        way.insert(0, parents[row, way[0]])
                    expected = plain.logits(text[:-1] + [int(tokens[row, i]) for i in way])
                    assert np.abs(result[row, node].numpy() - expected).max() < CLOSE
                    found_paths.append(way)
                paths[row] = found_paths[draw.integers(len(found_paths))]
            counts = [len(paths.get(row, [])) for row in range(3)]
            path = torch.full((3, max(counts)), -1)
            for row, way in paths.items():
                path[row, : len(way)] = torch.tensor(way)
                texts[row] += [int(tokens[row, i]) for i in way[1:]] + [int(draw.integers(3, VOCAB))]
            lm.commit(counts, path)
            assert lm.lengths == [len(texts[0]) - 1, 0, len(texts[2]) - 1]


def test_tree_wider_than_one_call(target: crossdraft.LoadedModel) -> None:
    """Nodes that do not fit into one call of llama.cpp: parents and children in different ones."""
    lm = LlamaLM(target.model, 2, 400)
    for row in range(2):
        lm.start(row, PROMPTS[row])
    width = CHUNK // 2 + 60
    tokens = torch.arange(2 * width).reshape(2, width) % (VOCAB - 3) + 3
    tokens[:, 0] = torch.tensor([PROMPTS[0][-1], PROMPTS[1][-1]])
    parents = torch.arange(-1, width - 1).repeat(2, 1)
    parents[:, width // 2] = 3  # two branches, the second one through all that follows
    logits, _ = lm.forward(tokens, parents)
    with Plain(target.model, 400) as plain:
        for row in range(2):
            branch = [*range(4), *range(width // 2, width)]
            for way in (range(width // 2), branch):
                expected = plain.logits(PROMPTS[row][:-1] + tokens[row, list(way)].tolist())
                assert np.abs(logits[row, way[-1]].numpy() - expected).max() < CLOSE


def test_wrong_trees_and_too_many_branches_are_refused(target: crossdraft.LoadedModel) -> None:
    lm = LlamaLM(target.model, 1, 600)
    lm.start(0, PROMPTS[0])
    with pytest.raises(crossdraft.ModelError, match="node 1 of a tree has parent 1"):
        lm.forward(torch.tensor([[3, 4]]), torch.tensor([[-1, 1]]))
    lm.commit([0])
    with pytest.raises(crossdraft.ModelError, match="at most 256 sequences"):
        lm.forward(torch.full((1, 300), 5), torch.full((1, 300), -1))
    lm.commit([0])  # whatever was raised, the slot is as before
    with Plain(target.model, 64) as plain:
        logits = lm.forward(torch.tensor([[90]]))[0]
        assert np.abs(logits[0, 0].numpy() - plain.logits(PROMPTS[0])).max() < CLOSE
    with pytest.raises(crossdraft.ModelError, match="exceed max_length 600"):
        lm.forward(torch.full((1, 600), 5))
    with pytest.raises(crossdraft.ModelError, match="at most 256 sequences, not 257"):
        LlamaLM(target.model, 257, 8)


DRAFTERS: dict[str, Any] = {
    "none": "none",
    "chain": {"name": "prompt-lookup", "gamma": 4},
    "draft-model": {"name": "draft-model", "model": "small", "gamma": 3},
    "itself": {"name": "draft-model", "model": "target", "gamma": 3},
    "iid": {"name": "draft-model-iid", "model": "small", "K": 2, "gamma": 3},
    "tree": {"name": "draft-model-tree", "model": "target", "branching": [3, 2, 1]},
    "dynamic-tree": {"name": "draft-model-dynamic-tree", "model": "small"},
    "recycling": "token-recycling",
    "lookahead": {"name": "lookahead", "window": 3, "ngram": 3, "guesses": 2},
    "jacobi": {"name": "jacobi", "gamma": 3},
}


def named(drafter: Any, files: dict[str, str]) -> Any:
    return drafter | {"model": files[drafter["model"]]} if isinstance(drafter, dict) and "model" in drafter else drafter


@pytest.fixture(scope="module")
def own(target: crossdraft.LoadedModel) -> list[tuple[list[int], list[np.ndarray]]]:
    with Plain(target.model, 96) as plain:
        return [plain.greedy(prompt, 24, target.eos_token_ids) for prompt in PROMPTS]


@pytest.mark.parametrize("batch_size", [1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_output_is_llama_cpps_own(
    target: crossdraft.LoadedModel, files: dict[str, str], own: Any, drafter: str, batch_size: int
) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_new_tokens": 24, "batch_size": batch_size}
    responses = crossdraft.generate(target, PROMPTS, drafter=named(DRAFTERS[drafter], files), **options)
    for response, (output, distributions) in zip(responses, own, strict=True):
        for at, (ours, theirs) in enumerate(zip(response.tokens, output, strict=False)):
            if ours != theirs:  # a near tie, behind which the texts differ
                assert distributions[at][theirs] - distributions[at][ours] < CLOSE
                break
        else:
            assert response.tokens == output
    if drafter == "itself" and batch_size == 1:
        assert sum(round.tau for response in responses for round in response.steps) > 60


def test_samples_have_target_distribution(target: crossdraft.LoadedModel, files: dict[str, str]) -> None:
    """Two tokens, 600 times, with trees drawn without replacement, against the exact joint distribution."""
    prompt, draws = PROMPTS[0], 600
    sampling = crossdraft.Sampling(temperature=1.0, top_k=2)
    with Plain(target.model, 96) as plain:
        first = sampling.probs(torch.from_numpy(plain.logits(prompt))[None])[0]
        joint = {}
        for a in first.nonzero().flatten().tolist():
            second = sampling.probs(torch.from_numpy(plain.logits([*prompt, a]))[None])[0]
            joint |= {(a, b): float(first[a] * second[b]) for b in second.nonzero().flatten().tolist()}
    drafter = {"name": "draft-model-tree", "model": files["small"], "branching": [2, 2]}
    responses = crossdraft.generate(
        target, [prompt] * draws, drafter=drafter, top_k=2, max_new_tokens=2, batch_size=16, ignore_eos=True
    )
    counts = {pair: sum(tuple(r.tokens) == pair for r in responses) for pair in joint}
    assert sum(counts.values()) == draws
    statistic = sum((counts[pair] - draws * p) ** 2 / (draws * p) for pair, p in joint.items())
    assert statistic < 16.27  # chi-square with 3 degrees of freedom, one in a thousand


def test_gguf_and_transformers_models_draft_for_each_other(
    target: crossdraft.LoadedModel, files: dict[str, str]
) -> None:
    from crossdraft.framework.api.build import load_draft_model

    drafting = load_draft_model(files["small"], target)
    assert drafting.backend == "llama.cpp" and drafting.tokenizer.get_vocab() == target.tokenizer.get_vocab()


def test_not_a_number_stays_in_its_row(files: dict[str, str], own: Any) -> None:
    """The slot of a sequence with NaN is used again, and its neighbours go on as they would have."""
    target = crossdraft.load_model(files["nan"])
    prompts = [PROMPTS[0], [1, 70, 40, 71], PROMPTS[1], PROMPTS[2]]
    with pytest.raises(crossdraft.NumericalError) as caught:
        crossdraft.generate(target, prompts, drafter="none", temperature=0, max_new_tokens=12, batch_size=2)
    with Plain(target.model, 96) as plain:
        for response in caught.value.responses:
            if response.index == 1:
                assert response.finish_reason == "error"
            else:
                output, _ = plain.greedy(prompts[response.index], 12, target.eos_token_ids)
                assert response.tokens == output


def test_unsupported_features_raise(target: crossdraft.LoadedModel, files: dict[str, str], tmp_path: Path) -> None:
    prompt = [PROMPTS[0]]
    upcoming = tmp_path / "ahead"
    save_embeddings(upcoming, torch.zeros(2, 32), target="tiny", sha256=target.sha256)
    for drafter, why in (
        ({"name": "eagle3", "model": "nowhere"}, "not a transformers model"),
        ({"name": "medusa", "model": "nowhere"}, "not a transformers model"),
        ({"name": "early-exit", "exit_layer": 1, "gamma": 2}, "all layers of a model"),
        ({"name": "layer-skip", "skip_mlp": [1], "gamma": 2}, "all layers of a model"),
        ({"name": "pass", "model": str(upcoming)}, "llama.cpp is fed tokens"),
    ):
        with pytest.raises(crossdraft.ModelError, match=why):
            crossdraft.generate(target, prompt, drafter=drafter, temperature=0)
    with pytest.raises(crossdraft.ModelError, match="does not return hidden states"):
        LlamaLM(target.model, 1, 16).hidden_layers = (-1,)
    with pytest.raises(crossdraft.UsageError, match="leave dtype"):
        crossdraft.load_model(files["target"], dtype="float32")
    with pytest.raises(crossdraft.UsageError, match="on the CPU here"):
        crossdraft.load_model(files["target"], device="cuda")
    whole = Path(files["target"]).read_bytes()
    for name, content, why in (
        ("text.gguf", b"not a model", "does not begin as a GGUF"),
        ("short.gguf", whole[: len(whole) // 2], "cannot load .*short.gguf"),
        ("part-00001-of-00002.gguf", whole, "one part of a model"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(crossdraft.ModelError, match=why):
            crossdraft.load_model(str(tmp_path / name))


def test_tokenizer_of_file(target: crossdraft.LoadedModel, files: dict[str, str]) -> None:
    tokenizer = target.tokenizer
    a, cat = (len(SPECIAL) + 256 + WORDS.index(word) for word in ("▁a", "▁cat"))
    assert tokenizer.get_vocab()["▁cat"] == cat and tokenizer.convert_ids_to_tokens([1, cat]) == ["<s>", "▁cat"]
    assert tokenizer("a cat", add_special_tokens=False)["input_ids"] == [a, cat]
    assert tokenizer("a cat</s>")["input_ids"] == [1, a, cat, 2]
    assert tokenizer.decode([1, a, cat, 2], skip_special_tokens=True) == "a cat"
    assert (
        tokenizer.decode([3 + 0xE2, 3 + 0x82]) == "\ufffd" and tokenizer.decode([3 + 0xE2, 3 + 0x82, 3 + 0xAC]) == "€"
    )
    assert tokenizer("x" * 1000, add_special_tokens=False)["input_ids"][-3:] == [3 + ord("x")] * 3
    output = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a"}], tokenize=False, add_generation_prompt=True
    )
    assert output == "a</s> the"
    assert target.eos_token_ids == (2,)
    separate = crossdraft.load_tokenizer(files["target"])
    assert separate.tokenizer.get_vocab() == tokenizer.get_vocab() and separate.eos_token_ids == (2,)
    bare = crossdraft.load_model(files["bare"])
    assert bare.tokenizer is None
    with pytest.raises(crossdraft.UsageError, match="has no tokenizer"):
        crossdraft.generate(bare, ["a text"])
    assert crossdraft.generate(bare, [[5, 6]], drafter="none", temperature=0, max_new_tokens=3)[0].tokens


def test_recipe(tmp_path: Path, files: dict[str, str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"the {x} sat on"}) + "\n" for x in ("cat", "mat", "a", "b")))
    drafters = ["prompt-lookup", {"name": "draft-model", "model": files["small"], "gamma": 2}]
    data = {"target": files["target"], "prompts": str(prompts), "max_new_tokens": 8, "drafters": drafters}
    data |= {"batch_size": 2, "verifiers": ["token"], "sampling": {"temperature": 0}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(data))
    outcome = run(load_recipe(str(tmp_path / "recipe.yaml")), tmp_path / "runs", log=None)
    assert not outcome.failed
    assert [r.metrics.same_as_baseline for r in outcome.results if r.metrics] == [1.0] * 3
