"""On the real model, in float32: every pair has the target's output, at any batch size and in any slot order.

Slow (see below) and needs SmolLM2 and the plug-in pack; drafters of packages that are not installed are left out:

    pip install -e plugins/crossdraft-smollm2 && pytest -m "slow and network" tests/test_smollm2.py -s

Heads without training for SmolLM2 have random weights: their drafts are rejected, and texts are unchanged.
"""

from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from head_checkpoints import write_heads

from crossdraft.framework.api.generate import pair_decoder
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.models.load import load_model
from crossdraft.framework.plugins import entries, manager
from crossdraft.framework.recipe.prompts import load_prompts

pytestmark = [pytest.mark.slow, pytest.mark.network]

NEW = 12
NEAR_TIE = 1e-4
SMALL = {"model": "smollm2-draft-model"}
FEATURES = {"gamma": 3, "layers": [7, 15, 24]}
DRAFTERS = {
    "none": "none",
    "prompt-lookup": {"name": "prompt-lookup", "gamma": 6},
    "token-recycling": {"name": "token-recycling"},
    "suffix": {"name": "suffix", "factor": 2},
    "suffix-tree": {"name": "suffix", "factor": 2, "tree": True},
    "ngram-cache": {"name": "ngram-cache"},
    "rest": {"name": "rest"},
    "combine": {"name": "combine", "drafters": ["prompt-lookup", {"name": "draft-model", **SMALL, "gamma": 3}]},
    "combine-merged": {
        "name": "combine",
        "mode": "merge",
        "nodes": 9,
        "drafters": ["prompt-lookup", {"name": "draft-model", **SMALL, "gamma": 3, "temperature": 0}],
    },
    "draft-model": {"name": "draft-model", **SMALL, "gamma": 4},
    "online": {"name": "online", **SMALL, "gamma": 3, "every": 2},
    "draft-model-iid": {"name": "draft-model-iid", **SMALL, "gamma": 3, "K": 2},
    "draft-model-tree": {"name": "draft-model-tree", **SMALL, "branching": [2, 2, 1]},
    "draft-model-dynamic-tree": {"name": "draft-model-dynamic-tree", **SMALL, "depth": 3, "top_k": 3, "nodes": 8},
    "sequoia": {"name": "draft-model-tree", **SMALL, "growth": "sequoia", "nodes": 9},
    "opt-tree": {"name": "draft-model-tree", **SMALL, "growth": "opt-tree", "nodes": 9, "depth": 5},
    "confidence": {"name": "draft-model", **SMALL, "gamma": 6, "policy": "confidence"},
    "heuristic": {"name": "draft-model", **SMALL, "gamma": 4, "policy": "heuristic"},
    "learnt-threshold": {"name": "draft-model", **SMALL, "gamma": 6, "policy": "learnt-threshold"},
    "universal": {"name": "universal", **SMALL, "gamma": 4},
    "universal-text": {"name": "universal", **SMALL, "gamma": 4, "mode": "slem"},
    "medusa": {"name": "medusa", "model": "smollm2-medusa"},
    "eagle3": {"name": "eagle3", "model": "smollm2-eagle3", "gamma": 5},
    "eagle": {"name": "eagle", "gamma": 3},
    "mtp": {"name": "mtp", "gamma": 2},
    "dflash": {"name": "dflash", **FEATURES},
    "dspark": {"name": "dspark", **FEATURES},
    "p-eagle": {"name": "p-eagle", **FEATURES},
    "mlp-speculator": {"name": "mlp-speculator"},
    "early-exit": {"name": "early-exit", "exit_layer": 24, "gamma": 3},
    "layer-skip": {"name": "layer-skip", "skip_attention": [10, 14, 18], "skip_mlp": [11, 18], "gamma": 3},
    "pass": {"name": "pass", "gamma": 4},
    "jacobi": {"name": "jacobi", "gamma": 4},
    "lookahead": {"name": "lookahead", "window": 4, "ngram": 3, "guesses": 3},
}
#: Directories with random heads, which `target` writes.
WRITTEN = ("eagle", "mtp", "dflash", "dspark", "p-eagle", "mlp-speculator", "pass")
#: Third parties' drafters.
PACKED = {"suffix", "suffix-tree", "ngram-cache", "rest", "combine", "combine-merged"}
#: Trees of point masses are verified by other rules.
TREES = {
    "token-recycling",
    "suffix-tree",
    "rest",
    "combine-merged",
    "draft-model-dynamic-tree",
    "opt-tree",
    "lookahead",
}
OTHERS = {
    **dict.fromkeys(TREES, ("greedy", "sample-match")),
    "draft-model-iid": ("greedy", "specinfer", "spectr"),
    "draft-model-tree": ("greedy", "traversal"),
    "sequoia": ("greedy", "traversal", "sample-match"),
}
PAIRS = [(d, v) for d in DRAFTERS for v in OTHERS.get(d, ("greedy", "token", "block"))]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    pytest.importorskip("crossdraft_smollm2")
    loaded = load_model("smollm2-135m-instruct", dtype="float32", device="cpu")
    root = tmp_path_factory.mktemp("heads")
    write_heads(root, loaded.model, target_ids=torch.arange(0, 49152, 3))
    if find_spec("crossdraft_drafters"):
        from further_heads import write_further_heads

        write_further_heads(root, loaded.model, mask_token=0)
    for name in WRITTEN:
        DRAFTERS[name]["model"] = str(root / name)
    return loaded


@pytest.fixture(scope="module")
def datastore(target, tmp_path_factory):
    """Datastore of REST: the texts of the prompts."""
    rest = pytest.importorskip("crossdraft_rest.datastore")
    texts = [target.tokenizer.encode(p.turns[0]) for p in load_prompts("builtin")]
    DRAFTERS["rest"]["datastore"] = str(tmp_path_factory.mktemp("rest") / "store")
    rest.build(texts, Path(DRAFTERS["rest"]["datastore"]), tokenizer=rest.tokenizer_sha256(target.tokenizer))


@pytest.fixture(scope="module", autouse=True)
def packages():
    """The packages of drafters that are installed, which the other tests leave out."""
    names = {_package(drafter) for drafter in PACKED}
    results = [import_module(name) for name in names if find_spec(name)]
    for plugin in results:
        manager().register(plugin)
    yield
    for plugin in results:
        manager().unregister(plugin)


def _package(drafter):
    return f"crossdraft_{DRAFTERS[drafter]['name'].replace('-', '_')}"


@pytest.fixture
def known(request, drafter):
    """The drafter is here: its package is installed, and it has what it needs."""
    if (name := dict(DRAFTERS[drafter])["name"] if drafter != "none" else drafter) not in entries("drafters"):
        pytest.skip(f"no installed package provides {name}")
    if drafter == "rest":
        request.getfixturevalue("datastore")


@pytest.fixture(scope="module")
def prompts(target):
    return [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": p.turns[0]}], add_generation_prompt=True, return_dict=False
        )
        for p in load_prompts("builtin")[::5]
    ]


@pytest.fixture(scope="module")
def reference(prompts):
    """Transformers' own greedy output, from a copy that nothing of ours has touched."""
    model = load_model("smollm2-135m-instruct", dtype="float32", device="cpu")
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = model.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=NEW,
            eos_token_id=list(model.eos_token_ids),
        )
        outputs.append(out[0, len(prompt) :].tolist())
    return outputs


def decode(target, prompts, drafter, verifier, batch_size, temperature=0.0, order=None):
    decoder = pair_decoder(
        target,
        DRAFTERS[drafter],
        verifier,
        max(map(len, prompts)) + NEW,
        sampling=Sampling(temperature=temperature),
        batch_size=batch_size,
        max_new_tokens=NEW,
        seed=7,
    )
    order = list(range(len(prompts))) if order is None else order
    outputs = [[] for _ in prompts]
    for response in decoder.run([prompts[i] for i in order], streams=order):
        outputs[order[response.index]] = response.tokens
    return outputs


def differences(target, prompts, ours, theirs):
    """Sentences for outputs that differ; raises where the two best logits are not a near tie."""
    ties = []
    for number, (prompt, a, b) in enumerate(zip(prompts, ours, theirs, strict=True)):
        if a == b:
            continue
        at = next(i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
        with torch.inference_mode():
            logits = target.model(torch.tensor([prompt + a[:at]])).logits[0, -1]
        best = logits.topk(2).values
        gap = float(best[0] - best[1])
        assert gap <= NEAR_TIE, f"prompt {number}, token {at}: {a[at]} instead of {b[at]}, logits {gap:.2e} apart"
        ties.append(f"prompt {number}, token {at}: near tie, logits {gap:.1e} apart")
    return ties


def report(label, ties):
    print(f"\n{label}: " + ("identical" if not ties else "; ".join(ties)))


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize(("drafter", "verifier"), PAIRS, ids=lambda x: x)
def test_temperature_zero_is_transformers_greedy(target, prompts, reference, drafter, verifier):
    ours = decode(target, prompts, drafter, verifier, batch_size=8)
    report(f"{drafter} x {verifier}, B = 8", differences(target, prompts, ours, reference))


@pytest.mark.usefixtures("known")
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_output_is_independent_of_batch_size_and_slot_order(target, prompts, reference, drafter, batch_size):
    order = list(range(len(prompts)))[::-1]
    ours = decode(target, prompts, drafter, "greedy", batch_size, order=order)
    report(f"{drafter}, B = {batch_size}, reversed", differences(target, prompts, ours, reference))


@pytest.mark.parametrize(
    ("drafter", "verifier"), [("none", "token"), ("draft-model", "token"), ("draft-model", "block")]
)
def test_same_seed_gives_same_samples_at_any_batch_size(target, prompts, drafter, verifier):
    one = decode(target, prompts, drafter, verifier, 1, temperature=1.0)
    eight = decode(target, prompts, drafter, verifier, 8, temperature=1.0, order=list(range(len(prompts)))[::-1])
    assert one == eight


def test_every_drafter_is_here():
    ours = {name for name, entry in entries("drafters").items() if entry.provider.startswith("crossdraft")}
    assert ours <= {item if isinstance(item, str) else item["name"] for item in DRAFTERS.values()}
