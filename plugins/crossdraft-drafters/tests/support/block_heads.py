"""Checkpoints of block drafters as they are published, small, and what they compute, position by position."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache

#: Sizes of the heads; the target's hidden size and vocabulary, which they share.
H, FF, HEADS, KV, D, V, EPS, THETA = 32, 48, 4, 2, 8, 97, 1e-6, 10000.0
#: Hidden states of a target with four layers that the heads here read, and what their configs call them.
LAYERS, OUTPUTS = (1, 2, 3), [0, 1, 2]
BLOCK, MASK, RANK = 4, 96, 5
CONFIG: dict[str, Any] = dict(
    model_type="qwen3",
    hidden_size=H,
    intermediate_size=FF,
    num_attention_heads=HEADS,
    num_key_value_heads=KV,
    head_dim=D,
    rms_norm_eps=EPS,
    rope_theta=THETA,
    num_hidden_layers=2,
    num_target_layers=4,
    vocab_size=V,
    layer_types=["full_attention"] * 2,
    tie_word_embeddings=False,
)
DFLASH = {**CONFIG, "block_size": BLOCK, "dflash_config": {"target_layer_ids": OUTPUTS, "mask_token_id": MASK}}
#: Taps and group size of DFlash 2's convolutions, and candidates of its selector.
TAPS, GROUP, TOP_K = 2, 8, 60
DFLASH2 = {
    **CONFIG,
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": {
        **DFLASH["dflash_config"],
        "block_size": BLOCK,
        "conv_kernel_size": TAPS,
        "conv_group_size": GROUP,
        "selector_rank": RANK,
        "selector_top_k": TOP_K,
    },
}
DSPARK = {
    **CONFIG,
    "architectures": ["Qwen3DSparkModel"],
    "block_size": BLOCK,
    "target_layer_ids": OUTPUTS,
    "mask_token_id": MASK,
    "num_anchors": 8,
    "markov_rank": RANK,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
P_EAGLE = {
    "speculators_model_type": "peagle",
    "speculators_config": {"algorithm": "peagle"},
    "transformer_layer_config": {**CONFIG, "model_type": "llama"},
    "draft_vocab_size": V,
    "mask_token_id": MASK,
    "eagle_aux_hidden_state_layer_ids": list(LAYERS),
    "norm_before_residual": True,
}


def random(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.3


def layer(i: int, width: int = H, qk_norm: bool = True) -> dict[str, Tensor]:
    out = {"self_attn.q_proj": random(HEADS * D, width), "self_attn.o_proj": random(H, HEADS * D)}
    out |= {f"self_attn.{name}_proj": random(KV * D, width) for name in "kv"}
    if qk_norm:
        out |= {f"self_attn.{name}_norm": 1 + random(D) for name in "qk"}
    out |= {"mlp.gate_proj": random(FF, H), "mlp.up_proj": random(FF, H), "mlp.down_proj": random(H, FF)}
    out |= {"input_layernorm": 1 + random(H), "post_attention_layernorm": 1 + random(H)}
    return {f"layers.{i}.{key}.weight": tensor for key, tensor in out.items()}


def dflash() -> dict[str, Tensor]:
    """The authors' tensors: neither an embedding nor a head."""
    torch.manual_seed(3)
    norms = {f"{name}.weight": 1 + random(H) for name in ("norm", "hidden_norm")}
    return {**layer(0), **layer(1), **norms, "fc.weight": random(H, 3 * H)}


def dflash2() -> dict[str, Tensor]:
    """DFlash's tensors, convolutions around every sublayer, and the selector of candidates."""
    out = dflash()
    for i in range(2):
        for name in ("attention_conv", "mlp_conv"):
            out[f"layers.{i}.{name}.base_kernel"] = random(2, TAPS, H) + torch.tensor([1.0, 0.0])[:, None]
            out[f"layers.{i}.{name}.kernel_projection.weight"] = random(2 * TAPS * H // GROUP, H)
    out |= {f"candidate_selector.{name}_codebook": 3 * random(V, RANK) for name in ("predecessor", "successor")}
    return {**out, "candidate_selector.hidden_projection.weight": random(RANK, H)}


def dspark(kind: str = "vanilla") -> dict[str, Tensor]:
    """DeepSpec's tensors beside the backbone; embedding and head are left out here as there (they are the target's)."""
    out = dflash()
    out |= {"markov_head.markov_w1.weight": random(V, RANK), "markov_head.markov_w2.weight": 3 * random(V, RANK)}
    more = {"gated": ("gate_proj", RANK, H + RANK), "rnn": ("joint_proj", 3 * RANK, 2 * RANK + H)}
    if kind in more:
        name, rows, width = more[kind]
        out |= {f"markov_head.{name}.weight": random(rows, width), f"markov_head.{name}.bias": random(rows)}
    return {**out, "confidence_head.proj.weight": random(1, H + RANK), "confidence_head.proj.bias": random(1)}


def p_eagle() -> dict[str, Tensor]:
    torch.manual_seed(4)
    out = {
        **layer(0, 2 * H, False),
        **layer(1, H, False),
        "fc.weight": random(H, 3 * H),
        "mask_hidden": random(1, 1, 3 * H),
    }
    return {**out, "norm.weight": 1 + random(H), "layers.0.hidden_norm.weight": 1 + random(H)}


#: Config and tensors by drafter.
FILES: dict[str, tuple[dict[str, Any], Any]] = {
    "dflash": (DFLASH, dflash),
    "dspark": (DSPARK, dspark),
    "p-eagle": (P_EAGLE, p_eagle),
}


def written(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    directory.mkdir(exist_ok=True)
    save_file(
        {key: tensor.detach().clone().contiguous() for key, tensor in tensors.items()}, directory / "model.safetensors"
    )
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(directory)


def kept(head: Any) -> dict[str, Tensor]:
    """The tensors of a head that a file of it holds."""
    return {k: t for k, t in head.state_dict().items() if k not in ("embed_tokens.weight", "lm_head.weight")}


def overfit(name: str, head: Any, states: Tensor, text: list[int], steps: int) -> None:
    """Train on one text, a row for each place a step may start at; ``states [T, L, Ht]`` are the target's."""
    anchors = list(range(2, len(text) - BLOCK))
    last, ids = max(anchors), torch.tensor(text)
    tokens, first = torch.full((len(anchors), last + BLOCK), MASK), torch.tensor(anchors)
    for row, n in enumerate(anchors):
        if name == "p-eagle":
            tokens[row, :n] = ids[1 : n + 1]
        else:
            tokens[row, n] = ids[n]
    drafts = torch.arange(BLOCK if name != "dflash" else BLOCK - 1)
    before, expected = ids[first[:, None] + drafts], ids[first[:, None] + drafts + 1]
    place = torch.arange(last + BLOCK).expand_as(tokens)
    mask = torch.full((last + BLOCK, last + BLOCK), -1e30).triu(1).expand(len(anchors), 1, -1, -1)
    optimiser = torch.optim.Adam([w for w in head.parameters() if w.requires_grad], lr=6e-3)
    for _ in range(steps):
        features = functional.pad(head.fuse(states[:last]), (0, 0, 0, BLOCK)).expand(len(anchors), -1, -1)
        if name == "p-eagle":
            features = torch.where((place < first[:, None])[..., None], features, head.mask_feature())
            logits = head(tokens, features, logits_to_keep=first[:, None] - 1 + drafts).logits
        else:
            out = head(tokens, features, place, DynamicCache(), mask, first)
            logits = out.logits
            if name == "dspark":
                output = [head.markov_head(before[:, i], out.states[:, i], None)[0] for i in range(BLOCK)]
                logits = logits + torch.stack(output, 1)
        optimiser.zero_grad()
        functional.cross_entropy(logits.flatten(0, 1), expected.flatten()).backward()
        optimiser.step()


# -- what they compute, from the published formulas -------------------------------------------------------


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean() + EPS).sqrt() * weight


def rotated(x: Tensor, position: int) -> Tensor:
    angle = position * THETA ** (-torch.arange(0, D, 2, dtype=x.dtype) / D)
    a, b = x[: D // 2], x[D // 2 :]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])


class Plain:
    """One layer after the other, one position after the other; nothing is kept."""

    def __init__(self, tensors: dict[str, Tensor], target: Any):
        self.t = tensors
        self.embedding, self.head = target.get_input_embeddings().weight, target.get_output_embeddings().weight
        self.layers = 1 + max(int(key.split(".")[1]) for key in tensors if key.startswith("layers."))

    def keys(self, i: int, x: Tensor, position: int) -> tuple[list[Tensor], list[Tensor]]:
        """Keys and values of each shared head."""
        results = []
        for kind in "kv":
            heads = list((self.t[f"layers.{i}.self_attn.{kind}_proj.weight"] @ x).split(D))
            scale = self.t.get(f"layers.{i}.self_attn.k_norm.weight")
            if kind == "k":
                heads = [rotated(h if scale is None else norm(h, scale), position) for h in heads]
            results.append(heads)
        return results[0], results[1]

    def attended(self, i: int, x: Tensor, position: int, seen: Sequence[tuple[list[Tensor], list[Tensor]]]) -> Tensor:
        out = []
        for h, q in enumerate((self.t[f"layers.{i}.self_attn.q_proj.weight"] @ x).split(D)):
            scale = self.t.get(f"layers.{i}.self_attn.q_norm.weight")
            q = rotated(q if scale is None else norm(q, scale), position)
            shared = h // (HEADS // KV)
            weights = torch.stack([q @ keys[shared] / math.sqrt(D) for keys, _ in seen]).softmax(0)
            out.append(sum(w * values[shared] for w, (_, values) in zip(weights, seen, strict=True)))
        return self.t[f"layers.{i}.self_attn.o_proj.weight"] @ torch.cat(out)

    def mlp(self, i: int, x: Tensor) -> Tensor:
        return x + self.feed_forward(i, norm(x, self.t[f"layers.{i}.post_attention_layernorm.weight"]))

    def feed_forward(self, i: int, y: Tensor) -> Tensor:
        gate, up, down = (self.t[f"layers.{i}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        return down @ (functional.silu(gate @ y) * (up @ y))

    def convolved(self, name: str, side: int, inputs: list[Tensor], x: list[Tensor]) -> list[Tensor]:
        """``x`` of a block after one side of a convolution whose kernels depend on ``inputs``; ``x`` without it."""
        if f"{name}.base_kernel" not in self.t:
            return x
        out = []
        for j, y in enumerate(inputs):
            kernel = (self.t[f"{name}.kernel_projection.weight"] @ y).view(2, TAPS, H // GROUP)[side]
            channels = [
                sum(
                    (self.t[f"{name}.base_kernel"][side, tap, c] + kernel[tap, c // GROUP]) * x[j - tap][c]
                    for tap in range(min(TAPS, j + 1))
                )
                for c in range(H)
            ]
            out.append(torch.stack(channels))
        return out

    def block(self, hidden: Tensor, root: int) -> list[Tensor]:
        """DFlash: ``hidden [T, L, Ht]`` of the text before ``root`` -> the last states of a block's positions."""
        n = len(hidden)
        text = [norm(self.t["fc.weight"] @ h.flatten(), self.t["hidden_norm.weight"]) for h in hidden]
        x = [self.embedding[token] for token in [root] + [MASK] * (BLOCK - 1)]
        for i in range(self.layers):
            normed = [norm(y, self.t[f"layers.{i}.input_layernorm.weight"]) for y in x]
            name = f"layers.{i}.attention_conv"
            mixed = self.convolved(name, 0, normed, normed)
            visited = [self.keys(i, y, position) for position, y in enumerate([*text, *mixed])]
            attended = [self.attended(i, y, n + j, visited) for j, y in enumerate(mixed)]
            x = [a + b for a, b in zip(x, self.convolved(name, 1, normed, attended), strict=True)]
            normed = [norm(y, self.t[f"layers.{i}.post_attention_layernorm.weight"]) for y in x]
            name = f"layers.{i}.mlp_conv"
            fed = [self.feed_forward(i, y) for y in self.convolved(name, 0, normed, normed)]
            x = [a + b for a, b in zip(x, self.convolved(name, 1, normed, fed), strict=True)]
        return [norm(y, self.t["norm.weight"]) for y in x]

    def pairs(self, hidden: Tensor, tokens: list[int], drafts: int) -> list[Tensor]:
        """P-EAGLE: ``hidden [T, L, Ht]`` before each of T ``tokens`` -> logits of that many drafts."""
        masks = drafts - 1
        features = [self.t["fc.weight"] @ h for h in [*hidden.flatten(1), *[self.t["mask_hidden"].flatten()] * masks]]
        x = []
        for token, feature in zip([*tokens, *[MASK] * masks], features, strict=True):
            e = norm(self.embedding[token], self.t["layers.0.input_layernorm.weight"])
            x.append((e, norm(feature, self.t["layers.0.hidden_norm.weight"])))
        reads, out = [torch.cat(pair) for pair in x], [pair[1] for pair in x]  # the normed feature is the residual
        for i in range(self.layers):
            if i:
                reads = [norm(y, self.t[f"layers.{i}.input_layernorm.weight"]) for y in out]
            visited = [self.keys(i, y, position) for position, y in enumerate(reads)]
            out = [self.mlp(i, y + self.attended(i, reads[j], j, visited[: j + 1])) for j, y in enumerate(out)]
        return [self.head @ norm(y, self.t["norm.weight"]) for y in out[-drafts:]]

    def logits(self, name: str, hidden: Tensor, history: list[int], drafted: list[int]) -> list[Tensor]:
        """Those that the tokens ``drafted`` after ``history`` were drawn from; ``hidden`` of all but the last."""
        if name == "p-eagle":
            return self.pairs(hidden, history[1:], len(drafted))
        states = self.block(hidden, history[-1])
        if name == "dflash" and "candidate_selector.hidden_projection.weight" not in self.t:
            return [self.head @ y for y in states[1:]][: len(drafted)]
        if name == "dflash":
            return [
                self.selected(state, before)
                for state, before in zip(states[1:], [history[-1], *drafted[:-1]], strict=False)
            ]
        out, memory = [], torch.zeros(RANK)
        for state, token in zip(states, [history[-1], *drafted[:-1]], strict=False):
            before = self.t["markov_head.markov_w1.weight"][token]
            if "markov_head.gate_proj.weight" in self.t:
                gate = self.t["markov_head.gate_proj.weight"] @ torch.cat([state, before])
                before = before / (1 + (-gate - self.t["markov_head.gate_proj.bias"]).exp())
            elif "markov_head.joint_proj.weight" in self.t:
                joint = self.t["markov_head.joint_proj.weight"] @ torch.cat([memory, before, state])
                keep, new, output = (joint + self.t["markov_head.joint_proj.bias"]).split(RANK)
                keep = 1 / (1 + (-keep).exp())
                memory, before = keep * memory + (1 - keep) * new.tanh(), output.tanh()
            out.append(self.head @ state + self.t["markov_head.markov_w2.weight"] @ before)
        return out

    def selected(self, state: Tensor, before: int) -> Tensor:
        """Logits of the most probable tokens of a position after the token ``before``, -inf for the others."""
        logits, out = self.head @ state, torch.full((V,), -torch.inf)
        gate = self.t["candidate_selector.hidden_projection.weight"] @ state
        context = self.t["candidate_selector.predecessor_codebook"][before] * gate
        for token in logits.argsort(descending=True)[:TOP_K].tolist():
            out[token] = logits[token] + context @ self.t["candidate_selector.successor_codebook"][token]
        return out

    def expected(self, hidden: Tensor, history: list[int], drafted: list[int]) -> list[float]:
        """Confidence of DSpark's head in each of ``drafted``, and in one more if the block has it."""
        states = self.block(hidden, history[-1])
        weight, bias = self.t["confidence_head.proj.weight"][0], self.t["confidence_head.proj.bias"]
        reads = zip(states, [history[-1], *drafted], strict=False)
        output = [
            weight @ torch.cat([state, self.t["markov_head.markov_w1.weight"][token]]) + bias for state, token in reads
        ]
        return [float(1 / (1 + (-x).exp())) for x in output]
