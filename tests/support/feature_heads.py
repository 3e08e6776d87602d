"""Heads over features of a tiny target, trained in a second or two on one text."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

from crossdraft.drafters.heads.eagle import EagleHead
from crossdraft.drafters.heads.eagle3 import Eagle3Head
from crossdraft.drafters.heads.eagle_weights import make_config

GAMMA, NEW = 3, 12
#: Hidden states of a target with four layers that the EAGLE-3 heads here read.
LAYERS = (2, 0, 3)
SHAPE = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=1)
START = [7, 8, 9, 7]
#: The shortest prompt has no feature before its root; prompts of different lengths end in different steps.
PROMPTS = ([5], START, [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 11, 12, 13])
NAMES = ("eagle3", "eagle")
DRAFTS: dict[str, dict[str, Any]] = {
    "chain": {"gamma": GAMMA},
    "branching": {"tree": "static", "branching": [2, 2, 1]},
    "choices": {"tree": "static", "choices": [[0], [2], [0, 0], [2, 1], [0, 0, 0]]},
    "drawn": {"tree": "static", "branching": [3, 1, 2], "siblings": "without-replacement", "temperature": 1},
    "greedy": {"tree": "static", "branching": [2, 2], "siblings": "greedy", "temperature": 1},
    "dynamic": {"tree": "dynamic", "depth": 3, "top_k": 3, "nodes": 8},
}


def make_head(name: str, target: Any, ids: Tensor | None = None, shape: Any = None) -> Any:
    embedding, head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
    if name == "mtp":
        from crossdraft_drafters.heads.mtp import MtpHead  # of a companion

        return MtpHead(target)
    config = make_config(**(SHAPE if shape is None else shape))
    if name == "eagle":
        return EagleHead(config, embedding, head)
    return Eagle3Head(config, embedding, len(LAYERS) * embedding.shape[1], target_ids=ids)


def features_of(name: str, head: Any, states: Any) -> Tensor:
    """``[T, H]``: fused features of one sequence, from a target's hidden states."""
    layers = LAYERS if name == "eagle3" else (-1,)
    return head.fuse(torch.stack([states[i][0] for i in layers], 1))


def overfit(name: str, head: Any, target: Any, text: list[int], steps: int) -> None:
    """Train on one text, rolled out as it drafts: after the first step the features are the head's own.

    Row t of step s holds the pair of token t + 1 + s with what the head made of row t in step s - 1; it sees the first
    step's rows up to its own, and its own row alone of the later ones.
    """
    with torch.no_grad():
        states = target(torch.tensor([text]), output_hidden_states=True).hidden_states
    n = len(text) - 2
    ids = torch.tensor(text)
    known = torch.arange(len(head.embed_tokens.weight)) if head.target_ids is None else head.target_ids
    label = torch.full((len(head.embed_tokens.weight),), -100).scatter_(0, known, torch.arange(len(known)))
    causal, diagonal = torch.ones(n, n).tril().bool(), torch.eye(n).bool()
    optimiser = torch.optim.Adam([w for w in head.parameters() if w.requires_grad], lr=6e-3)
    for _ in range(steps):
        features = features_of(name, head, states)[None, :n]
        cache, loss = DynamicCache(), torch.zeros(())
        for s in range(GAMMA):
            padded = functional.pad(ids, (0, s))
            allowed = torch.cat([causal, *[diagonal] * s], 1)
            out = head(
                padded[None, 1 + s : 1 + s + n],
                features,
                torch.where(allowed, 0.0, -1e30)[None, None],
                torch.arange(n)[None] + s,
                cache,
            )
            features = out.features
            expected = functional.pad(label[ids], (0, s), value=-100)[2 + s : 2 + s + n]
            loss = loss + functional.cross_entropy(out.logits[0], expected, ignore_index=-100)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def taus_of(loop: Any, steps: int) -> set[int]:
    """Numbers of accepted tokens over steps and rows of `PROMPTS`."""
    for row, prompt in enumerate(PROMPTS):
        loop.start(row, prompt)
    lengths, taus = [len(prompt) for prompt in PROMPTS], set()
    for _ in range(steps):
        with torch.inference_mode():
            loop.step()
        now = [len(history) for history in loop.sequences.history]
        taus |= {after - before - 1 for after, before in zip(now, lengths, strict=True)}
        lengths = now
    return taus


def check_pairs(
    drafter: Any, tokens: list[int], hidden: Tensor, logits: Tensor, features: Tensor, tolerance: float = 1e-3
) -> None:
    """A head's ``logits [11, V]`` and ``features [11, H]`` of eleven pairs, at once and through its cache."""
    fused = drafter.head.fuse(hidden)
    out = drafter.head(torch.tensor([tokens]), fused[None])
    torch.testing.assert_close(out.logits[0], logits, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(out.features[0], features, atol=tolerance, rtol=tolerance)
    # The same through the cache: prefill, then a ragged step, in a slot whose neighbour is shorter.
    drafter.lm.start(0, tokens[:9], fused[:8])
    drafter.lm.start(1, tokens[:2], fused[:1])
    padded = torch.tensor([tokens[8:], [tokens[1], 0, 0]])
    last = drafter.lm.commit(padded, torch.stack([fused[8:], fused[1:4]]), [3, 1])
    torch.testing.assert_close(last, logits[[-1, 1]], atol=tolerance, rtol=tolerance)
