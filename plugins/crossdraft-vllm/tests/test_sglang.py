"""The hooks of SGLang, on stand-ins with the shapes of its kernels and of its n-gram worker."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from crossdraft_vllm import sglang_plugin as plugin
from scipy.stats import chisquare

from crossdraft import find_drafter, make_verifier

ROWS = 40_000
P = torch.tensor([[0.5, 0.3, 0.15, 0.05], [0.1, 0.2, 0.3, 0.4], [0.4, 0.1, 0.4, 0.1]])
Q = torch.tensor([[0.25, 0.25, 0.4, 0.1], [0.4, 0.3, 0.2, 0.1]])


def kernel_arguments(candidates: torch.Tensor, target_probs: torch.Tensor, draft_probs: torch.Tensor) -> dict:
    """Arguments of a kernel for chains: dtypes and shapes as SGLang's ``eagle_sample`` allocates them."""
    b, slots = candidates.shape
    index = torch.arange(b * slots).view(b, slots)
    following = torch.cat([torch.arange(1, slots), torch.tensor([-1])]).repeat(b, 1)
    return {
        "predicts": torch.zeros(b * slots, dtype=torch.int32),
        "accept_index": torch.full((b, slots), -1, dtype=torch.int32),
        "accept_token_num": torch.empty(b, dtype=torch.int32),
        "candidates": candidates,
        "retrive_index": index,
        "retrive_next_token": following,
        "retrive_next_sibling": torch.full((b, slots), -1),
        "uniform_samples": torch.rand(b, slots),
        "uniform_samples_for_final_sampling": torch.rand(b),
        "target_probs": target_probs,
        "draft_probs": draft_probs,
        "threshold_single": 1.0,
        "threshold_acc": 1.0,
        "deterministic": True,
    }


def refuse(*args, **kwargs):
    raise AssertionError("the kernel was called")


@pytest.mark.parametrize("verifier", ["block", "token"])
def test_row_that_is_known(verifier):
    """A target that is certain of its tokens accepts two of three drafted ones in the first row, none in the other."""
    certain = torch.eye(4)
    target = certain[torch.tensor([[1, 2, 0, 3], [2, 0, 1, 3]])]
    step = kernel_arguments(torch.tensor([[3, 1, 2, 3], [3, 1, 0, 1]]), target, torch.zeros_like(target))
    plugin.verification_hook(make_verifier(verifier))(refuse, **step)
    assert step["accept_token_num"].tolist() == [2, 0]
    assert step["accept_index"].tolist() == [[0, 1, 2, -1], [4, -1, -1, -1]]
    assert step["predicts"].tolist() == [1, 2, 0, 0, 2, 0, 0, 0]


@pytest.mark.parametrize("sampled", [False, True])
@pytest.mark.parametrize("verifier", ["block", "token"])
def test_distribution_is_that_of_target(verifier, sampled):
    torch.manual_seed(3)
    drafts = [torch.multinomial(q, ROWS, replacement=True) for q in Q] if sampled else [torch.full((ROWS,), 2)] * 2
    candidates = torch.stack([torch.zeros(ROWS, dtype=torch.long), *drafts], 1)
    target = P.expand(ROWS, 3, 4).contiguous()
    step = kernel_arguments(candidates, target, Q.repeat(ROWS, 1, 1) if sampled else torch.zeros_like(target))
    plugin.verification_hook(make_verifier(verifier))(refuse, **step)
    rest = torch.stack([torch.multinomial(p, ROWS, replacement=True) for p in P], 1)
    emitted = torch.arange(3) <= step["accept_token_num"][:, None]
    assert torch.equal(step["accept_index"] >= 0, emitted)
    whole = torch.where(emitted, step["predicts"].view(ROWS, 3), rest)
    counts = torch.bincount(whole @ torch.tensor([16, 4, 1]), minlength=64)
    expected = torch.einsum("i,j,k->ijk", *(p.double() / p.double().sum() for p in P)).flatten()
    assert chisquare(counts, expected * ROWS).pvalue > 1e-3


def test_trees_stay_with_the_kernel():
    target = torch.rand(1, 3, 4)
    step = kernel_arguments(torch.tensor([[0, 1, 2]]), target, torch.zeros_like(target))
    step["retrive_next_sibling"] = torch.tensor([[-1, 2, -1]])
    calls = []
    plugin.verification_hook(make_verifier("block"))(lambda **kwargs: calls.append(kwargs), **step)
    assert calls[0] is not step and calls[0]["candidates"] is step["candidates"]


def make_worker() -> SimpleNamespace:
    config = SimpleNamespace(context_len=64, vocab_size=50, model_path="m")
    return SimpleNamespace(draft_token_num=4, max_batch_size=3, model_runner=SimpleNamespace(model_config=config))


def own_drafts(worker, batch):
    """As the n-gram corpus returns them: the root first, then a tree; and flat masks."""
    roots = [(request.output_ids or request.origin_input_ids)[-1] for request in batch.reqs]
    return np.array([[root, 7, 7, 7] for root in roots]).reshape(-1), np.zeros(16 * len(roots), dtype=bool)


def request(rid: str, prompt: list[int], output: list[int]) -> SimpleNamespace:
    return SimpleNamespace(rid=rid, origin_input_ids=prompt, output_ids=output)


def test_chains_replace_the_drafts_of_the_worker():
    prepare = plugin.drafting_hook(find_drafter({"name": "prompt-lookup", "gamma": 3}))
    worker, a, b = make_worker(), request("a", [1, 2, 3, 4, 1], [2]), request("b", [5, 6], [5])
    drafts, masks = prepare(own_drafts, worker, SimpleNamespace(reqs=[a, b]))
    assert drafts.reshape(2, 4).tolist() == [[2, 3, 4, 1], [5, 6, 5, 0]]
    assert masks.dtype == bool and masks.reshape(2, 4, 4).tolist() == [np.tril(np.ones((4, 4), bool)).tolist()] * 2
    a.output_ids += [3, 4, 9]
    b.output_ids += [6]
    drafts, _ = prepare(own_drafts, worker, SimpleNamespace(reqs=[b, a]))
    assert drafts.reshape(2, 4).tolist() == [[6, 5, 6, 0], [9, 0, 0, 0]]


def test_text_behind_the_worker_keeps_its_draft():
    prepare = plugin.drafting_hook(find_drafter("prompt-lookup"))

    def empty_batch(worker, batch):
        return np.array([8, 7, 7, 7]), np.zeros(16, dtype=bool)

    drafts, _ = prepare(empty_batch, make_worker(), SimpleNamespace(reqs=[request("a", [1, 2, 3, 1], [2])]))
    assert drafts.tolist() == [8, 7, 7, 7]


@pytest.fixture
def registered(monkeypatch):
    """A stand-in of SGLang's modules; the list of registered hooks."""
    hooks: list[tuple] = []
    registry = SimpleNamespace(register=lambda target, hook, kind: hooks.append((target, kind)))
    modules = {
        "sglang.srt.plugins.hook_registry": {"HookRegistry": registry, "HookType": SimpleNamespace(AROUND="around")},
        "sglang.kernels.ops.speculative.sampling": {"tree_speculative_sampling_target_only": kernel},
        "sglang.kernels.ops.speculative.reject_sampling": {"chain_speculative_sampling_triton": kernel},
        "sglang.srt.speculative.ngram_worker": {"NGRAMWorker": Worker},
    }
    for path, content in modules.items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            if name not in sys.modules:
                monkeypatch.setitem(sys.modules, name, ModuleType(name))
        for key, value in content.items():
            monkeypatch.setattr(sys.modules[path], key, value, raising=False)
    return hooks


def kernel(
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    uniform_samples,
    uniform_samples_for_final_sampling,
    target_probs,
    draft_probs,
    threshold_single=1.0,
    threshold_acc=1.0,
    deterministic=True,
): ...


class Worker:
    def _prepare_draft_tokens(self, batch): ...


def test_hooks_are_registered(registered, monkeypatch):
    monkeypatch.setenv("CROSSDRAFT_SGLANG", '{"drafter": "prompt-lookup", "verifier": "block"}')
    plugin.register()
    assert registered == [(path, "around") for path in (*plugin.KERNELS, plugin.WORKER)]


def test_default_registers_no_hook(registered, monkeypatch):
    monkeypatch.delenv("CROSSDRAFT_SGLANG", raising=False)
    plugin.register()
    assert not registered


def test_another_sglang_is_refused(registered, monkeypatch):
    monkeypatch.setenv("CROSSDRAFT_SGLANG", '{"verifier": "block"}')
    monkeypatch.setattr(
        sys.modules["sglang.kernels.ops.speculative.sampling"], plugin.KERNELS[0].split(".")[-1], refuse
    )
    with pytest.raises(SystemExit, match="has the parameters args, kwargs"):
        plugin.register()


def test_wrong_settings_end_the_process(registered, monkeypatch):
    monkeypatch.setenv("CROSSDRAFT_SGLANG", '{"verifier": "blok"}')
    with pytest.raises(SystemExit, match=r"CROSSDRAFT_SGLANG: .*blok"):
        plugin.register()
