"""FlexAttention over a ragged cache against explicit masks, which are the reference.

It runs on CUDA. Here PyTorch traces and guards what it would compile there, and runs the traced operations. Which
blocks a kernel would skip, and whether skipping them keeps the output, is tested separately.
"""

import copy
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import pytest
import torch
from crossdraft_layers import flex_attention
from fake_cuda_graphs import ReplayingLM
from oracle_trees import NEW, PROMPTS
from torch.nn.functional import scaled_dot_product_attention

from crossdraft.framework import plugins
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm import architectures, cuda_graphs, prompt_prefill
from crossdraft.framework.lm.transformers_lm import TransformersLM

pytestmark = pytest.mark.thorough

TREE = [-1, 0, 0, 1, 2]


@pytest.fixture
def traced(monkeypatch: Any) -> Iterator[list[int]]:
    """FlexAttention runs here; of every function that is compiled, how often it was."""
    counts: list[int] = []

    def trace(step: Callable) -> Callable:
        index = len(counts)
        counts.append(0)

        def backend(graph: Any, inputs: Any) -> Any:
            counts[index] += 1
            return graph

        own = FunctionType(step.__code__.replace(), step.__globals__, closure=step.__closure__)
        compiled = torch.compile(own, fullgraph=True, backend=backend)
        return lambda tensors: compiled(*tensors)

    monkeypatch.setattr(architectures, "FLEX_DEVICES", ("cpu", "cuda"))
    monkeypatch.setattr(flex_attention, "jit_compile", trace)
    flex_attention._compiled.cache_clear()
    yield counts
    flex_attention._compiled.cache_clear()


def outputs(model: Any) -> torch.Tensor:
    """Logits after prompts that share a pass or come in pieces: a chain, a tree in two levels, and what follows."""
    lm = TransformersLM(model, 3, 64)
    lm.prefill({0: PROMPTS[2], 1: PROMPTS[1]})
    for row, prompt in enumerate((PROMPTS[2], PROMPTS[1], [5, 6])):
        lm.start(row, [*prompt, 4])
    results = [lm.forward(torch.tensor([[4, 7, 8]] * 3))[0]]
    lm.commit([2, 3, 1])
    tokens, parents = torch.tensor([[4, 9, 10, 11, 12]] * 3), torch.tensor([TREE] * 3)
    results += [lm.forward(tokens[:, :3], parents[:, :3])[0], lm.forward(tokens[:, 3:], parents[:, 3:])[0]]
    lm.commit([3, 2, 1], torch.tensor([[0, 2, 4], [0, 2, -1], [0, -1, -1]]))
    return torch.cat([*results, lm.forward(torch.tensor([[3]] * 3))[0]], 1)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_chains_and_trees_equal_explicit_masks(
    tiny_model: Callable, monkeypatch: Any, traced: list[int], family: str
) -> None:
    """Heads that share keys, windows, rows of different length."""
    monkeypatch.setattr(prompt_prefill, "PREFILL_CHUNK", 7)
    flex = tiny_model(family, attn_implementation=flex_attention.FLEX)
    expected = outputs(tiny_model(family))
    torch.testing.assert_close(outputs(flex), expected, atol=2e-5, rtol=1e-5)
    assert traced, "nothing went through FlexAttention"

    def mistaken(allowed: torch.Tensor) -> Any:
        return flex_attention.block_mask(allowed | allowed.roll(1, 2))

    monkeypatch.setattr(flex_attention.FlexAttention, "mask", staticmethod(mistaken))  # everybody sees one slot more
    assert (outputs(flex) - expected).abs().max() > 0.1


@pytest.mark.parametrize(
    "drafter, options", [("draft-model", {"gamma": 3}), ("draft-model-tree", {"branching": (2, 2, 1)})]
)
def test_same_tokens_as_with_masks(
    tiny_model: Callable, decoder: Callable, traced: list[int], drafter: str, options: dict
) -> None:
    """Passes are replayed, as graphs replay them: a mask that a recording held on to would be that of another pass."""

    def run(**changes: Any) -> dict[int, list[int]]:
        loop = decoder(
            tiny_model("llama", **changes),
            plugins.get("drafters", drafter),
            {"model": "noisy", **options},
            plugins.get("verifiers", "greedy"),
            batch_size=2,
            drafting=tiny_model("llama", noise=0.05),
            max_new_tokens=NEW,
            lm=ReplayingLM,
        )
        return {r.index: r.tokens for r in loop.run(PROMPTS)}

    assert run(attn_implementation=flex_attention.FLEX) == run()
    assert traced


def masks(rows: int, width: int, reach: int) -> torch.Tensor:
    """Rows of different length, the first of which has a window; each query sees itself."""
    slot, at = torch.arange(reach), reach - width + torch.arange(width)[:, None]
    short = torch.arange(rows)[:, None, None] * (reach // rows)  # that many slots fewer
    allowed = slot <= (at - short).clamp(min=0)
    allowed[0] &= at - slot < reach // 2
    return allowed


@pytest.mark.parametrize("width, reach", [(1, 100), (5, 128), (5, 700), (300, 650)])
def test_invisible_blocks_are_not_read(width: int, reach: int) -> None:
    allowed = masks(3, width, reach)
    mask = flex_attention.block_mask(allowed)
    numbers = [mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices]
    some, which, whole, which_whole = (tensor[:, 0].tolist() for tensor in numbers if tensor is not None)
    for row in range(3):
        for block in range(-(-width // flex_attention.BLOCK)):
            queries = allowed[row, block * flex_attention.BLOCK : (block + 1) * flex_attention.BLOCK]
            parts = {k: part for k, part in enumerate(queries.split(flex_attention.BLOCK, 1)) if part.any()}
            read = which[row][block][: some[row][block]] + which_whole[row][block][: whole[row][block]]
            assert sorted(read) == list(parts), "read are exactly the blocks in which somebody sees something"
            assert all(parts[k].all() for k in which_whole[row][block][: whole[row][block]])
    if reach == 700:  # the last row has 234 slots, the first a window over the last 350
        assert [a[0] + b[0] for a, b in zip(some, whole, strict=True)] == [4, 4, 2]
    assert mask.mask_mod(*(torch.tensor(n) for n in (1, 0, width - 1, 7))) == allowed[1, -1, 7]


def test_one_function_is_compiled_few_times(traced: list[int]) -> None:
    """Whatever lengths come: prompts, pieces, chains, levels of trees. PyTorch would give up at eight."""
    torch.manual_seed(0)
    query, buffer = torch.randn(4, 500, 6, 8).transpose(1, 2), torch.randn(2, 4, 2, 640, 8)
    shapes = [(2, 5, 256), (2, 5, 512), (2, 1, 512), (2, 1, 256), (2, 9, 512), (2, 60, 640), (2, 3, 256), (2, 9, 640)]
    shapes += [(1, n, n) for n in (33, 200, 17, 500, 9)] + [(1, 300, 500), (1, 41, 500), (1, 1, 300)]
    shapes += [(rows, n, n) for rows, n in ((2, 33), (3, 50), (4, 20), (4, 300), (2, 150), (3, 40))]
    for i, (rows, width, reach) in enumerate([*shapes, *shapes[:1]]):
        cap = 2.0 if i == len(shapes) else None  # scores are capped once
        q, (k, v), allowed = query[:rows, :, :width], buffer[:, :rows, :, :reach], masks(rows, width, reach)
        ours, weights = flex_attention.ragged_flex(
            torch.nn.Module(), q, k, v, flex_attention.block_mask(allowed), 0.4, cap
        )
        assert weights is None and ours.is_contiguous()
        scores = q @ k.repeat_interleave(3, 1).mT * 0.4
        scores = scores if cap is None else cap * torch.tanh(scores / cap)
        probs = scores.masked_fill(~allowed[:, None], -torch.inf).softmax(-1)
        torch.testing.assert_close(ours, (probs @ v.repeat_interleave(3, 1)).transpose(1, 2), atol=1e-5, rtol=1e-5)
    assert max(traced) <= 4 and len(traced) <= 10, traced


def test_unsupported_models_are_refused(tiny_model: Callable, traced: list[int], monkeypatch: Any) -> None:
    model = copy.copy(tiny_model("llama", attn_implementation=flex_attention.FLEX))
    model._hf_hook = object()
    with pytest.raises(
        ModelError, match="LlamaForCausalLM was loaded with flex_attention, whose masks lie on one device"
    ):
        TransformersLM(model, 1, 16)
    del model._hf_hook
    key = torch.zeros(1, 2, 4, 8)
    mask, flex = (
        flex_attention.block_mask(torch.ones(1, 4, 4, dtype=torch.bool)),
        {"s_aux": torch.zeros(2), "position_bias": None},
    )
    with pytest.raises(ModelError, match=r"^Module uses s_aux in its attention, which .* another attn_implementation"):
        flex_attention.ragged_flex(torch.nn.Module(), key, key, key, mask, **flex)

    def fails(graph: Any, inputs: Any) -> Any:
        raise ValueError("no compiler")

    monkeypatch.setattr(flex_attention, "jit_compile", lambda run: lambda t: torch.compile(run, backend=fails)(*t))
    flex_attention._compiled.cache_clear()
    with pytest.raises(ModelError, match=r"could not compile flex_attention \(.*no compiler.*\); load"):
        flex_attention.ragged_flex(torch.nn.Module(), key, key, key, mask)
    monkeypatch.setattr(architectures, "FLEX_DEVICES", ("cuda",))
    with pytest.raises(ModelError, match=r"compiles code on a CPU again .*; leave attn_implementation out"):
        TransformersLM(model, 1, 16)


@pytest.mark.slow
def test_compiled_kernel_equals_explicit_masks(monkeypatch: Any) -> None:
    """PyTorch's own code for a CPU, which reads the listed blocks alone; needs a C++ compiler."""
    flex_attention._compiled.cache_clear()
    torch.manual_seed(0)
    query, buffer, allowed = torch.randn(3, 5, 6, 16).transpose(1, 2), torch.randn(2, 3, 2, 640, 16), masks(3, 5, 500)
    key, value = buffer[..., :500, :]
    expected = scaled_dot_product_attention(query, key, value, allowed[:, None], scale=0.4, enable_gqa=True)
    ours, _ = flex_attention.ragged_flex(torch.nn.Module(), query, key, value, flex_attention.block_mask(allowed), 0.4)
    torch.testing.assert_close(ours, expected.transpose(1, 2), atol=1e-5, rtol=1e-5)
    key[2, :, 256:] = torch.nan  # its row has 170 slots
    repeat, _ = flex_attention.ragged_flex(
        torch.nn.Module(), query, key, value, flex_attention.block_mask(allowed), 0.4
    )
    torch.testing.assert_close(repeat, ours)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("family", ["llama", "mistral-sliding", "gemma3"])
@pytest.mark.parametrize("drafter", ["none", "draft-model", "draft-model-tree", "draft-model-dynamic-tree"])
def test_on_cuda(
    tiny_model: Callable,
    decoder: Callable,
    caplog: Any,
    fresh_warnings: None,
    family: str,
    drafter: str,
) -> None:
    """The same tokens as with masks, and passes are recorded."""

    def run(**changes: Any) -> tuple[dict[int, list[int]], Any]:
        loop = decoder(
            copy.deepcopy(tiny_model(family, head_dim=16, **changes)).cuda(),
            plugins.get("drafters", drafter),
            {} if drafter == "none" else {"model": "noisy"},
            plugins.get("verifiers", "greedy"),
            batch_size=2,
            drafting=copy.deepcopy(tiny_model(family, noise=0.05)).cuda(),
            max_new_tokens=NEW,
        )
        return {r.index: r.tokens for r in loop.run(PROMPTS * 2)}, loop

    (flex, loop), (expected, _) = run(attn_implementation=flex_attention.FLEX), run()
    assert flex == expected
    assert len(loop.target.graphs) > 0
    assert not [r for r in caplog.records if r.name == cuda_graphs.__name__]
