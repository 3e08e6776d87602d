"""Published heads in plain tensor operations, written from the publishers' and the engines' code.

EAGLE and EAGLE-3 as in the authors' ``cnets1.py`` and ``cnets.py``; P-EAGLE as in speculators; DFlash as in z-lab's
``dflash.py``, causal blocks as in vLLM's ``qwen3_dflash.py``; DSpark as in DeepSpec; rotary embeddings as in vLLM's
``rotary_embedding``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

H, HEADS, KV, D = 32, 4, 2, 8


@dataclass
class Meaning:
    """The meaning of a config, besides the tensors.

    Attributes:
        frequencies: of the rotated pairs of channels, from the base and the number r of rotated channels.
        rotated: r; ``in_turn``: channel 0 is paired with 1, not with r / 2.
        amplitude: factor of sines and cosines.
        window: tokens that a position attends to, itself included.
        attention: window, or None, and causality of each layer of a block; empty = the whole text, and ``causal``.
        normed: EAGLE-3's head reads the normed output; ``feeds_normed``: it is fed back normed.
        residual_normed: the residual of EAGLE-3's first layer is normed.
    """

    theta: float = 10000.0
    rotated: int = D
    in_turn: bool = False
    amplitude: float = 1.0
    frequencies: Callable[[float, int], Tensor] | None = None
    act: Callable[[Tensor], Tensor] = functional.silu
    eps: float = 1e-6
    window: int = 10**6
    causal: bool = False
    attention: tuple[tuple[int | None, bool], ...] = ()
    from_anchor: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    tied: bool = False
    normed: bool = True
    feeds_normed: bool = False
    residual_normed: bool = False
    mask: int = 96
    block: int = 4
    more: dict[str, Any] = field(default_factory=dict)


def plain(theta: float, rotated: int) -> Tensor:
    return theta ** (-torch.arange(0, rotated, 2) / rotated)


def linear(factor: float) -> Callable[[float, int], Tensor]:
    return lambda theta, rotated: plain(theta, rotated) / factor


def llama3(factor: float, low: float, high: float, old: int) -> Callable[[float, int], Tensor]:
    def frequencies(theta: float, rotated: int) -> Tensor:
        out = []
        for f in plain(theta, rotated).tolist():
            length = 2 * math.pi / f
            if length < old / high:
                out.append(f)
            elif length > old / low:
                out.append(f / factor)
            else:
                smooth = (old / length - low) / (high - low)
                out.append((1 - smooth) * f / factor + smooth * f)
        return torch.tensor(out)

    return frequencies


def yarn(factor: float, old: int, fast: float = 32, slow: float = 1, truncate: bool = True) -> Callable[..., Tensor]:
    def frequencies(theta: float, rotated: int) -> Tensor:
        def channel(turns: float) -> float:
            return rotated * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = channel(fast), channel(slow)
        if truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, rotated - 1)
        ramp = ((torch.arange(rotated // 2) - low) / (max(high - low, 0.001))).clamp(0, 1)
        f = plain(theta, rotated)
        return f / factor * ramp + f * (1 - ramp)

    return frequencies


def yarn_amplitude(factor: float, mscale: float = 1.0) -> float:
    return 0.1 * mscale * math.log(factor) + 1


class Plain:
    """A head by its tensors, under the names of EAGLE-1's authors."""

    def __init__(self, tensors: dict[str, Tensor], target: Any, meaning: Meaning):
        self.t, self.m = tensors, meaning
        embedding, output = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        tables = {"embed_tokens.weight": embedding, "lm_head.weight": output} | tensors
        self.embedding: Tensor = tables["embed_tokens.weight"]
        self.head: Tensor = self.embedding if meaning.tied else tables["lm_head.weight"]
        self.layers = 1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("layers."))

    def linear(self, name: str, x: Tensor) -> Tensor:
        out = x @ self.t[f"{name}.weight"].T
        return out + self.t[f"{name}.bias"] if f"{name}.bias" in self.t else out

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.m.eps).sqrt() * self.t[f"{name}.weight"]

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        """``x [T, heads, D]`` by position."""
        r = self.m.rotated
        angles = positions[:, None, None] * (self.m.frequencies or plain)(self.m.theta, r)
        cos, sin = angles.cos() * self.m.amplitude, angles.sin() * self.m.amplitude
        turned, rest = x[..., :r], x[..., r:]
        if self.m.in_turn:
            a, b = turned[..., 0::2], turned[..., 1::2]
            return torch.cat([torch.stack([a * cos - b * sin, b * cos + a * sin], -1).flatten(-2), rest], -1)
        a, b = turned[..., : r // 2], turned[..., r // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def heads(self, i: int, kind: str, x: Tensor) -> Tensor:
        out = self.linear(f"layers.{i}.self_attn.{kind}_proj", x).unflatten(-1, (-1, D))
        name = f"layers.{i}.self_attn.{kind}_norm"
        return self.norm(name, out) if f"{name}.weight" in self.t else out

    def attention(self, i: int, x: Tensor, kv: Tensor, seen: Tensor) -> Tensor:
        """``x [Q, ..]`` at the last positions of ``kv [T, ..]``; ``seen [Q, T]``."""
        positions = torch.arange(len(kv))
        q = self.turned(self.heads(i, "q", x), positions[-len(x) :])
        k = self.turned(self.heads(i, "k", kv), positions).repeat_interleave(HEADS // KV, 1)
        v = self.heads(i, "v", kv).repeat_interleave(HEADS // KV, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(D)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).flatten(1)
        return self.linear(f"layers.{i}.self_attn.o_proj", mixed)

    def mlp(self, i: int, x: Tensor) -> Tensor:
        gate, up = (self.linear(f"layers.{i}.mlp.{name}_proj", x) for name in ("gate", "up"))
        return self.linear(f"layers.{i}.mlp.down_proj", self.m.act(gate) * up)

    def layer(self, i: int, x: Tensor, reads: Tensor) -> Tensor:
        """A causal layer with the residual ``x``, whose attention reads ``reads``."""
        seen = torch.ones(len(x), len(x)).tril().triu(1 - self.m.window).bool()
        x = x + self.attention(i, reads, reads, seen)
        return x + self.mlp(i, self.norm(f"layers.{i}.post_attention_layernorm", x))

    def logits(self, x: Tensor) -> Tensor:
        return x @ self.head.T * self.m.logit_scale

    def fused(self, hidden: Tensor) -> Tensor:
        """``hidden [.., L, Ht]`` -> features ``[.., H]``."""
        if "fc_norm.0.weight" in self.t:
            hidden = torch.stack([self.norm(f"fc_norm.{i}", h) for i, h in enumerate(hidden.unbind(-2))], -2)
        wide = hidden.flatten(-2)
        wide = self.norm("input_norm", wide) if "input_norm.weight" in self.t else wide
        return self.linear("fc", wide) if "fc.weight" in self.t else wide

    def eagle(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        x = self.linear("fc", torch.cat([self.embedding[list(tokens)], features], -1))
        for i in range(self.layers):
            name = f"layers.{i}.input_layernorm"
            x = self.layer(i, x, self.norm(name, x) if f"{name}.weight" in self.t else x)
        return self.logits(x), x

    def eagle3(self, tokens: Sequence[int], features: Tensor) -> tuple[Tensor, Tensor]:
        embeds, normed = self.embedding[list(tokens)], self.norm("layers.0.hidden_norm", features)
        pair = torch.cat([self.norm("layers.0.input_layernorm", embeds), normed], -1)
        x = self.layer(0, normed if self.m.residual_normed else features, pair)
        for i in range(1, self.layers):
            x = self.layer(i, x, self.norm(f"layers.{i}.input_layernorm", x))
        normed = self.norm("norm", x)
        return self.logits(normed if self.m.normed else x), normed if self.m.feeds_normed else x

    def chain(self, kind: str, hidden: Tensor, text: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Logits ``[len(drafted), Vd]``: token by token, from the head's own features."""
        step = self.eagle if kind == "eagle" else self.eagle3
        features = hidden[:, 0] if kind == "eagle" else self.fused(hidden)
        tokens, out = list(text[1:]), []
        for token in drafted:
            logits, feedback = step(tokens, features)
            out.append(logits[-1])
            features, tokens = torch.cat([features, feedback[-1:]]), [*tokens, token]
        return torch.stack(out)

    def parallel(self, hidden: Tensor, text: Sequence[int], count: int) -> Tensor:
        """P-EAGLE: logits ``[count, Vd]``."""
        wide = self.t["mask_hidden"].view(1, *hidden.shape[1:]).expand(count - 1, -1, -1)
        tokens = [*text[1:], *[self.m.mask] * (count - 1)]
        return self.eagle3(tokens, self.fused(torch.cat([hidden, wide])))[0][-count:]

    def block(self, hidden: Tensor, root: int) -> Tensor:
        """DFlash: states ``[block, H]``."""
        text = self.norm("hidden_norm", self.fused(hidden))
        x = self.embedding[[root] + [self.m.mask] * (self.m.block - 1)] * self.m.embedding_scale
        if "mask_embedding" in self.t:
            x[1:] = self.t["mask_embedding"] * self.m.embedding_scale
        for i, (window, causal) in enumerate(self.m.attention or [(None, self.m.causal)] * self.layers):
            behind = len(text) + torch.arange(len(x))[:, None] - torch.arange(len(text) + len(x))
            seen = behind < (window or 10**6)
            if causal:
                seen &= behind >= 0
            normed = self.norm(f"layers.{i}.input_layernorm", x)
            x = x + self.attention(i, normed, torch.cat([text, normed]), seen)
            x = x + self.mlp(i, self.norm(f"layers.{i}.post_attention_layernorm", x))
        return self.norm("norm", x)

    def blocks(self, kind: str, hidden: Tensor, text: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Logits ``[len(drafted), Vd]`` of DFlash, or of DSpark's vanilla Markov head after the drafted tokens."""
        states = self.block(hidden, text[-1])
        logits = self.logits(states if self.m.from_anchor else states[1:])[: len(drafted)]
        if kind == "dspark":
            before = self.t["markov_head.markov_w1.weight"][[text[-1], *drafted[:-1]]]
            logits = logits + before @ self.t["markov_head.markov_w2.weight"].T
        return logits

    def drafts(self, kind: str, hidden: Tensor, text: Sequence[int], drafted: Sequence[int]) -> Tensor:
        """Distributions ``[len(drafted), V]`` that the tokens ``drafted`` after ``text`` were drawn from.

        ``hidden [len(text) - 1, L, Ht]`` are the target's states of all tokens of the text but the last.
        """
        if kind in ("eagle", "eagle3"):
            logits = self.chain(kind, hidden, text, drafted)
        elif kind == "p-eagle":
            logits = self.parallel(hidden, text, len(drafted))
        else:
            logits = self.blocks(kind, hidden, text, drafted)
        ids = torch.arange(logits.shape[1])
        if "d2t" in self.t:
            ids = ids + self.t["d2t"]
        out = torch.zeros(len(logits), max(len(self.embedding), int(ids.max()) + 1))
        return out.index_copy(1, ids, logits.softmax(-1))
