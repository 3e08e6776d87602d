"""Several modules of multi-token prediction: module k drafts token k, as transformers' own drafting does.

`plain` computes each token of a draft from the whole text, with transformers' own model of one layer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from mtp_tensors import decoder_layer, qwen, renamed
from torch import Tensor

from crossdraft.framework.contracts.models import Checkpoint
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError

H, V, MODULES = 32, 97, 3
PROMPTS = ([5], [7, 8], [7, 8, 9, 7], [11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 11, 12, 13])
MIMO = {
    "mtp.layers.0.": "model.mtp_layers.0.",
    "mtp.fc.": "model.mtp_layers.0.input_proj.",
    "mtp.pre_fc_norm_embedding.": "model.mtp_layers.0.token_layernorm.",
    "mtp.pre_fc_norm_hidden.": "model.mtp_layers.0.hidden_layernorm.",
    "mtp.norm.": "model.mtp_layers.0.final_layernorm.",
}


@pytest.fixture(scope="module")
def target(tiny_model: Callable) -> Any:
    return tiny_model("llama", copy="modules", seed=2)


def modules_of(target: Any, own: bool) -> list[dict[str, Tensor]]:
    """Three modules by Qwen's names, ``mtp.layers.0.*`` in each; ``own``: norms and projections are not common."""
    out: list[dict[str, Tensor]] = []
    for k in range(MODULES):
        first = qwen(target)
        torch.manual_seed(20 + k)
        layer = {f"mtp.layers.0.{key}": tensor for key, tensor in decoder_layer(target).items()}
        more = {key: torch.randn_like(x) * 0.4 for key, x in first.items() if "layers" not in key} if own else {}
        out.append({**first, **layer, **more})
    return out


def published(modules: list[dict[str, Tensor]], layout: str) -> dict[str, Tensor]:
    if layout == "Qwen":
        layers = [{key.replace("layers.0", f"layers.{k}"): t for key, t in m.items()} for k, m in enumerate(modules)]
        return {key: tensor for named in layers for key, tensor in named.items()}
    names = {old: new.replace("layers.0", "layers.2") for old, new in MIMO.items()}
    if layout == "DeepSeek":
        names = {
            "mtp.layers.0.": "model.layers.2.",
            "mtp.fc.": "model.layers.2.eh_proj.",
            "mtp.pre_fc_norm_embedding.": "model.layers.2.enorm.",
            "mtp.pre_fc_norm_hidden.": "model.layers.2.hnorm.",
            "mtp.norm.": "model.layers.2.shared_head.norm.",
        }
    first = 2 if layout == "DeepSeek" else 0
    out = {}
    for k, module in enumerate(modules):
        out |= {key.replace("layers.2.", f"layers.{first + k}."): t for key, t in renamed(module, names).items()}
    return out


class Module:
    """One module, by its tensors under Qwen's names."""

    def __init__(
        self, target: Any, tensors: dict[str, Tensor], hidden_first: bool = False, layer_type: str | None = None
    ):
        types = {"layer_types": layer_type and [layer_type], "mlp_layer_types": layer_type and ["dense"]}
        config = type(target.config)(**{**target.config.to_dict(), "num_hidden_layers": 1, **types})
        config.pad_token_id = None
        self.model, self.target, self.hidden_first = type(target.model)(config).eval(), target, hidden_first
        self.window = config.sliding_window if layer_type == "sliding_attention" else None
        self.load(tensors)

    def load(self, tensors: dict[str, Tensor]) -> None:
        self.t = tensors
        inside = {k.removeprefix("mtp."): t for k, t in tensors.items() if k.startswith(("mtp.layers.", "mtp.norm."))}
        self.model.load_state_dict(inside, strict=False)

    def norm(self, x: Tensor, name: str) -> Tensor:
        eps = self.target.config.rms_norm_eps
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * self.t[f"mtp.pre_fc_norm_{name}.weight"]

    def pairs(self, states: Tensor, tokens: list[int]) -> Tensor:
        embeds = self.target.get_input_embeddings().weight[tokens]
        pair = [self.norm(embeds, "embedding"), self.norm(states, "hidden")]
        return torch.cat(pair[::-1] if self.hidden_first else pair, -1) @ self.t["mtp.fc.weight"].T

    def __call__(self, pairs: Tensor, positions: list[int]) -> Tensor:
        seen = torch.ones(len(pairs), len(pairs)).tril().triu(1 - (self.window or len(pairs)))
        mask: Any = torch.where(seen.bool(), 0.0, torch.finfo(torch.float32).min)[None, None]
        if getattr(self.model.config, "layer_types", None):
            mask = {"full_attention": mask, "sliding_attention": mask}
        position_ids = torch.tensor([positions])
        return self.model(inputs_embeds=pairs[None], attention_mask=mask, position_ids=position_ids).last_hidden_state[
            0
        ]


def plain(target: Any, modules: list[Module], text: list[int], drafted: list[int]) -> Tensor:
    """Distributions ``[len(drafted), V]`` of the tokens ``drafted`` after ``text``."""
    count, out = len(text) - 1, []
    states = target.model(torch.tensor([text])).last_hidden_state[0, :-1]
    pairs, positions = {}, {}
    for depth in range(len(drafted)):
        k = depth % len(modules)
        if depth < len(modules):
            pairs[k] = modules[k].pairs(states, [*text, *drafted[:depth]][depth + 1 :])
            positions[k] = list(range(depth, depth + count))
        else:
            row = modules[k].pairs(states[-1:], drafted[depth - 1 : depth])
            pairs[k], positions[k] = torch.cat([pairs[k], row]), [*positions[k], count - 1 + depth]
        states = modules[k](pairs[k], positions[k])
        out.append(states[-1] @ target.get_output_embeddings().weight.T)
    return torch.stack(out).softmax(-1)


def recorded(loop: Any) -> list[tuple[list[int], list[int], Tensor]]:
    """Text, drafted tokens and q of every row of every step that drafts."""
    seen: list[tuple[list[int], list[int], Tensor]] = []
    propose = loop.drafter.propose

    def record(sequences: Any, rng: Any) -> Any:
        draft = propose(sequences, rng)
        for row, history in enumerate(sequences.history):
            width = min(draft.tokens.shape[1], sequences.limit[row])
            if len(history) > 1 and width:
                seen.append((list(history), draft.tokens[row, :width].tolist(), draft.q[row, :width].clone()))
        return draft

    loop.drafter.propose = record
    return seen


def checkpoint_of(tensors: dict[str, Tensor], config: dict[str, Any] | None = None) -> Callable[[str], Checkpoint]:
    return lambda name: Checkpoint(name, Path("somewhere"), config or {}, dict(tensors), "somewhere", "")


def furthest(target: Any, modules: list[Module], seen: list[tuple[list[int], list[int], Tensor]]) -> float:
    """Largest total variation distance."""
    distances = [(plain(target, modules, text, tokens) - q).abs().sum(-1).max() / 2 for text, tokens, q in seen]
    return float(max(distances))


@pytest.mark.parametrize("layout, gamma", [("DeepSeek", 3), ("Qwen", 2), ("MiMo", 3), ("DeepSeek", 8)])
@torch.inference_mode()
def test_module_k_drafts_token_k(target: Any, heads_decoder: Callable, layout: str, gamma: int) -> None:
    """Over ragged steps of several texts, and in turn if a draft is longer than the number of modules."""
    tensors = modules_of(target, own=layout != "Qwen")
    options, heads = {"model": "m", "gamma": gamma}, checkpoint_of(published(tensors, layout))
    more = {"batch_size": 3, "sampling": Sampling(), "max_new_tokens": 14, "load_heads": heads}
    loop = heads_decoder(target, "mtp", options, "token", **more)
    seen = recorded(loop)
    responses = list(loop.run(PROMPTS))
    assert {step.tau for response in responses for step in response.steps} >= {0, 1, 2}
    modules = [Module(target, module, hidden_first=layout == "MiMo") for module in tensors]
    assert furthest(target, modules[:gamma], seen) < 1e-5
    assert furthest(target, modules[:1], seen) > 1e-2


@torch.inference_mode()
def test_rows_that_waited_are_fed_in_parts(target: Any, heads_decoder: Callable) -> None:
    """Drafts of one token leave rows to the later modules."""
    tensors = modules_of(target, own=True)
    heads = checkpoint_of(published(tensors, "DeepSeek"))
    more = {"batch_size": 2, "sampling": Sampling(), "max_new_tokens": 40, "load_heads": heads}
    loop = heads_decoder(target, "mtp", {"model": "m", "gamma": 3}, "token", **more)
    seen = recorded(loop)
    lengths, calls = loop.drafter.policy.draft_lengths, iter(range(100))

    def short_at_first(limit: Any, occupied: int) -> list[int]:
        longest = 1 if next(calls) < 12 else 3
        return [min(n, longest) for n in lengths(limit, occupied)]

    loop.drafter.policy.draft_lengths = short_at_first
    list(loop.run(PROMPTS[1:3]))
    assert max(len(tokens) for _, tokens, _ in seen) == 3
    assert furthest(target, [Module(target, module) for module in tensors], seen) < 1e-5


@torch.inference_mode()
def test_first_module_drafts_every_token_if_wanted(target: Any, heads_decoder: Callable) -> None:
    tensors = modules_of(target, own=True)
    heads = checkpoint_of(published(tensors, "DeepSeek"))
    more = {"batch_size": 2, "sampling": Sampling(), "max_new_tokens": 8, "load_heads": heads}
    loop = heads_decoder(target, "mtp", {"model": "m", "gamma": 3, "modules": 1}, "token", **more)
    seen = recorded(loop)
    list(loop.run(PROMPTS[1:3]))
    assert furthest(target, [Module(target, tensors[0])], seen) < 1e-5


def test_trees_of_several_modules_are_refused(target: Any, heads_decoder: Callable) -> None:
    heads = checkpoint_of(published(modules_of(target, own=True), "DeepSeek"))
    with pytest.raises(
        ModelError, match="they have 3 modules, which draft a chain; leave out tree, or write modules: 1"
    ):
        heads_decoder(target, "mtp", {"model": "m", "tree": "dynamic"}, "greedy", batch_size=1, load_heads=heads)
    heads_decoder(
        target, "mtp", {"model": "m", "tree": "dynamic", "modules": 1}, "greedy", batch_size=1, load_heads=heads
    )


@pytest.mark.parametrize("prefix, config, hidden_first", [
    ("model.", {}, True),
    ("", {"model_type": "mimo"}, True),
    ("", {"speculators_model_type": "mtp"}, False),
])  # fmt: skip
@torch.inference_mode()
def test_order_of_the_pair(
    target: Any, heads_decoder: Callable, prefix: str, config: dict[str, Any], hidden_first: bool
) -> None:
    """MiMo's modules read the hidden state first, under the names that speculators gives those of others."""
    names = {old: new.replace("model.", prefix) for old, new in MIMO.items()}
    heads = checkpoint_of(renamed(qwen(target), names), config)
    more = {"batch_size": 2, "sampling": Sampling(), "max_new_tokens": 8, "load_heads": heads}
    loop = heads_decoder(target, "mtp", {"model": "m", "gamma": 2}, "token", **more)
    seen = recorded(loop)
    list(loop.run(PROMPTS[1:3]))
    assert furthest(target, [Module(target, qwen(target), hidden_first)], seen) < 1e-5
    assert furthest(target, [Module(target, qwen(target), not hidden_first)], seen) > 1e-2


#: Targets by family, and the attention of their modules by the publisher's code, as vLLM has it.
_LAYERS = {"sliding_window": 3, "layer_types": ["sliding_attention", "full_attention"]}
FAMILIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "exaone4": (_LAYERS, ["sliding_attention", "full_attention"]),
    "exaone_moe": (
        {**_LAYERS, "mtp_layer_types": ["sliding_attention"], "mlp_layer_types": ["dense", "sparse"]},
        ["sliding_attention"],
    ),
}
EXPERTS = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, num_shared_experts=1, n_group=1)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_attention_of_modules(family: str, heads_decoder: Callable) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(3)
    settings, types = FAMILIES[family]
    sizes = dict(vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    more = dict(num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2, topk_group=1)
    config = AutoConfig.for_model(family, **sizes, **more, **EXPERTS, **settings)
    target = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    modules = [Module(target, {}, layer_type=kind) for kind in types]
    for module in modules:
        inside = {
            f"mtp.{k}": 1 + torch.randn_like(x) * 0.4 for k, x in module.model.state_dict().items() if "embed" not in k
        }
        norms = {f"mtp.pre_fc_norm_{name}.weight": torch.randn(H) for name in ("embedding", "hidden")}
        common = modules[0].t or {**inside, **norms, "mtp.fc.weight": torch.randn(H, 2 * H) * 0.4}
        module.load({**common, **{k: x for k, x in inside.items() if "layers" in k}})
    heads = checkpoint_of(published([module.t for module in modules], "Qwen"))
    own = {"batch_size": 2, "sampling": Sampling(), "max_new_tokens": 12, "load_heads": heads}
    loop = heads_decoder(target, "mtp", {"model": "m", "gamma": len(types)}, "token", **own)
    seen = recorded(loop)
    list(loop.run(PROMPTS[2:]))
    assert furthest(target, modules, seen) < 1e-5
    others = [Module(target, module.t, layer_type="full_attention") for module in modules]
    assert furthest(target, others, seen) > 1e-3


def test_modules_of_inkling_are_named(target: Any, heads_decoder: Callable) -> None:
    tensors = {"model.mtp.layers.0.input_proj.weight": torch.zeros(H, 2 * H)}
    with pytest.raises(ModelError, match=r"model\.mtp\.\* is Inkling's, which is not supported"):
        heads_decoder(target, "mtp", {"model": "m"}, "greedy", batch_size=1, load_heads=checkpoint_of(tensors))
