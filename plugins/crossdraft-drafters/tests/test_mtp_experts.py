"""The module of multi-token prediction of a model like DeepSeek-V3, read out of a checkpoint of many shards."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from crossdraft_drafters.heads.mtp import Mtp
from draft_contexts import GivenContext
from feature_heads import check_pairs
from safetensors.torch import save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import ModelError
from crossdraft.framework.lm.transformers_lm import TransformersLM

H, V, EXPERTS, FF, LAYERS = 32, 97, 4, 24, 3
PREFIX = f"model.layers.{LAYERS}."


@pytest.fixture(scope="module")
def target() -> Any:
    """Its first layer has no experts, the others have."""
    config = DeepseekV3Config(
        vocab_size=V, hidden_size=H, intermediate_size=40, moe_intermediate_size=FF, num_hidden_layers=LAYERS,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=EXPERTS,
        num_experts_per_tok=2, n_group=2, topk_group=1, first_k_dense_replace=1, q_lora_rank=16, kv_lora_rank=16,
        qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=8, max_position_embeddings=96, initializer_range=0.2,
        bos_token_id=None, eos_token_id=None, pad_token_id=None, tie_word_embeddings=False,
    )  # fmt: skip
    torch.manual_seed(3)
    return DeepseekV3ForCausalLM(config).float().eval()


def apart(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as they are published."""
    out = {}
    for key, tensor in state.items():
        if key.endswith("experts.gate_up_proj"):
            for i, both in enumerate(tensor):
                out[key.replace("gate_up_proj", f"{i}.gate_proj.weight")] = both[:FF].clone()
                out[key.replace("gate_up_proj", f"{i}.up_proj.weight")] = both[FF:].clone()
        elif key.endswith("experts.down_proj"):
            for i, down in enumerate(tensor):
                out[key.replace("down_proj", f"{i}.down_proj.weight")] = down.clone()
        else:
            out[key] = tensor
    return out


@pytest.fixture(scope="module")
def module(target: Any) -> dict[str, Tensor]:
    """The module's tensors as DeepSeek names them, with copies of the target's embedding and head."""
    torch.manual_seed(4)
    last = target.model.layers[-1].state_dict()
    out = {key: torch.randn(tensor.shape) * 0.3 for key, tensor in apart(last).items()}
    out |= {f"{name}.weight": 1 + 0.3 * torch.randn(H) for name in ("enorm", "hnorm", "shared_head.norm")}
    out["eh_proj.weight"] = torch.randn(H, 2 * H) * 0.3
    out["embed_tokens.weight"] = target.get_input_embeddings().weight.detach().clone()
    out["shared_head.head.weight"] = target.get_output_embeddings().weight.detach().clone()
    return {PREFIX + key: tensor for key, tensor in out.items()}


def sharded(directory: Path, target: Any, module: dict[str, Tensor], **config: Any) -> Path:
    """Two shards of the target, one of its last layer and the module's beginning, one of the module's end."""
    directory.mkdir(exist_ok=True)
    model = list(apart(target.state_dict()).items())
    inside = list(module.items())
    shards = [model[:20], model[20:30], model[30:] + inside[:9], inside[9:]]
    places = {}
    for i, tensors in enumerate(shards):
        name = f"model-{i + 1:05}-of-00004.safetensors"
        save_file({key: tensor.detach().contiguous() for key, tensor in tensors}, directory / name)
        places |= dict.fromkeys(dict(tensors), name)
    index = {"metadata": {"total_size": 1}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    (directory / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", **config}), encoding="utf-8")
    return directory


def built(target: Any, directory: Path) -> Mtp:
    slots = TransformersLM(target, 2, 64)
    context = GivenContext(slots, Sampling(temperature=0), 64, target_model=target)
    return Mtp(Mtp.Config(model=str(directory)), context)


def computed(target: Any, module: dict[str, Tensor], tokens: list[int], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Logits and features of the module, its experts and their choice written out, attention transformers' own."""
    t = {key.removeprefix(PREFIX): tensor for key, tensor in module.items()}
    own, config = target.model.layers[-1], target.config

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt() * t[f"{name}.weight"]

    def swiglu(x: Tensor, name: str) -> Tensor:
        gate, up, down = (t[f"mlp.{name}.{kind}_proj.weight"] for kind in ("gate", "up", "down"))
        return down @ (torch.nn.functional.silu(gate @ x) * (up @ x))

    attention = type(own.self_attn)(config, 0)
    inside = {key.removeprefix("self_attn."): x for key, x in t.items() if key.startswith("self_attn.")}
    attention.load_state_dict(inside)
    x = torch.cat([norm(t["embed_tokens.weight"][tokens], "enorm"), norm(hidden, "hnorm")], -1) @ t["eh_proj.weight"].T
    place = torch.arange(len(tokens))[None]
    rotary = target.model.rotary_emb(x[None], place)
    mask = torch.full((len(tokens), len(tokens)), -1e30).triu(1)[None, None]
    x = x + attention(norm(x, "input_layernorm")[None], position_embeddings=rotary, attention_mask=mask)[0][0]
    out = []
    for row, y in zip(x, norm(x, "post_attention_layernorm"), strict=True):
        score = torch.sigmoid(t["mlp.gate.weight"] @ y)
        choice = score + t["mlp.gate.e_score_correction_bias"]
        groups = choice.view(2, -1)
        best = int(groups.topk(2).values.sum(1).argmax())
        chosen = [best * 2 + int(i) for i in groups[best].topk(2).indices]
        share = {e: score[e] / sum(score[i] for i in chosen) * config.routed_scaling_factor for e in chosen}
        routed = sum(share[e] * swiglu(y, f"experts.{e}") for e in chosen)
        out.append(row + routed + swiglu(y, "shared_experts"))
    features = norm(torch.stack(out), "shared_head.norm")
    return features @ t["shared_head.head.weight"].T, features


class Counted:
    """`safetensors.safe_open`, which notes the files that it opens and the tensors that are read."""

    def __init__(self) -> None:
        self.files: set[str] = set()
        self.read: list[str] = []
        self.open = safetensors.safe_open

    def __call__(self, file: Any, framework: str) -> Any:
        self.files.add(Path(file).name)
        opened, read = self.open(file, framework), self.read

        class Handle:
            keys = opened.keys

            def get_tensor(self, name: str) -> Tensor:
                read.append(name)
                return opened.get_tensor(name)

        return Handle()


@torch.inference_mode()
def test_only_mtp_module_is_read(target: Any, module: dict[str, Tensor], tmp_path: Path, monkeypatch: Any) -> None:
    directory, counted = sharded(tmp_path / "whole", target, module), Counted()
    monkeypatch.setattr(safetensors, "safe_open", counted)
    drafter = built(target, directory)
    assert sorted(counted.read) == sorted(module)  # each once
    assert counted.files == {"model-00003-of-00004.safetensors", "model-00004-of-00004.safetensors"}
    tokens, hidden = [5, 90, 2, 2, 61, 7, 33, 8, 1, 9, 10], torch.randn(11, 1, H)
    logits, features = computed(target, module, tokens, hidden[:, 0])
    check_pairs(drafter, tokens, hidden, logits, features)


def test_temperature_zero_is_plain_decoding(
    heads_decoder: Callable, target: Any, module: dict[str, Tensor], tmp_path: Path
) -> None:
    prompts = [[5], [7, 8, 9, 7], list(range(11, 24))]
    plain = {
        r.index: r.tokens
        for r in heads_decoder(target, "none", {}, "greedy", batch_size=1, max_new_tokens=6).run(prompts)
    }
    own = {"model": str(sharded(tmp_path / "whole", target, module)), "gamma": 2}
    loop = heads_decoder(target, "mtp", own, "greedy", batch_size=3, max_new_tokens=6)
    assert {r.index: r.tokens for r in loop.run(prompts)} == plain


def float8(module: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The module in float8 with blocks of 16 x 8, and what that means."""
    stored, intended = {}, {}
    for key, tensor in module.items():
        if tensor.dim() != 2 or "embed" in key or "head.head" in key or "eh_proj" in key or "mlp.gate.weight" in key:
            stored[key] = intended[key] = tensor
            continue
        rows, columns = -(-tensor.shape[0] // 16), -(-tensor.shape[1] // 8)
        scale = 0.5 + torch.rand(rows, columns)
        stored[key], stored[key + "_scale_inv"] = tensor.to(torch.float8_e4m3fn), scale
        intended[key] = stored[key].float()
        for i in range(rows):
            for j in range(columns):
                intended[key][16 * i : 16 * i + 16, 8 * j : 8 * j + 8] *= scale[i, j]
    return stored, intended


@torch.inference_mode()
def test_float8_is_unscaled(target: Any, module: dict[str, Tensor], tmp_path: Path) -> None:
    stored, intended = float8(module)
    settings = {"quantization_config": {"weight_block_size": [16, 8]}}
    drafter = built(target, sharded(tmp_path / "float8", target, stored, **settings))
    tokens, hidden = [5, 90, 2, 2, 61], torch.randn(5, 1, H)
    logits, _ = computed(target, intended, tokens, hidden[:, 0])
    out = drafter.head(torch.tensor([tokens]), drafter.head.fuse(hidden)[None])
    torch.testing.assert_close(out.logits[0], logits, atol=1e-3, rtol=1e-3)


def less(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda module: {key: tensor for key, tensor in module.items() if key != PREFIX + name}


def more(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda module: {**module, PREFIX + name: tensor}


@pytest.mark.parametrize(
    "change, sentence",
    [
        (less("mlp.experts.2.up_proj.weight"), "missing layer.mlp.experts.2.up_proj.weight, and 0 more"),
        (
            more("mlp.experts.4.up_proj.weight", torch.zeros(FF, H)),
            "of 4 experts, unexpected layer.mlp.experts.4.up_proj",
        ),
        (
            more("mlp.experts.1.down_proj.weight", torch.zeros(FF, H)),
            r"experts.1.down_proj.weight is \[24, 32\], not \[32, 24\], the shape of the target's",
        ),
        (less("mlp.gate.e_score_correction_bias"), "missing layer.mlp.gate.e_score_correction_bias"),
        (
            more("eh_proj.weight", torch.zeros(H, 2 * H).to(torch.float8_e4m3fn)),
            "eh_proj.weight is torch.float8_e4m3fn, but eh_proj.weight_scale_inv is missing",
        ),
        (
            more("eh_proj.weight_scale_inv", torch.ones(1, 1)),
            "eh_proj.weight_scale_inv has no float8 weight eh_proj.weight",
        ),
        (
            lambda module: {
                **module,
                PREFIX + "eh_proj.weight": torch.zeros(H, 2 * H).to(torch.float8_e4m3fn),
                PREFIX + "eh_proj.weight_scale_inv": torch.ones(2, 2),
            },
            r"eh_proj.weight_scale_inv is \[2, 2\], but eh_proj.weight has \[1, 1\] blocks of \[128, 128\]",
        ),
    ],
)
def test_modules_that_do_not_fit_are_refused(
    target: Any, module: dict[str, Tensor], tmp_path: Path, change: Callable, sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        built(target, sharded(tmp_path / "odd", target, change(module)))


def test_shard_without_indexed_tensors_is_refused(target: Any, module: dict[str, Tensor], tmp_path: Path) -> None:
    directory = sharded(tmp_path / "whole", target, module)
    save_file({"x": torch.zeros(1)}, directory / "model-00004-of-00004.safetensors")
    with pytest.raises(ModelError, match=r"model-00004-of-00004.safetensors is damaged, or "):
        built(target, directory)
