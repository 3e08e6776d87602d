"""Roofline: shapes compared with parameters of real modules, times with sums by hand."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from crossdraft_advisor.roofline.accelerators import Accelerator, accelerator, accelerators
from crossdraft_advisor.roofline.roofline import (
    ALL_REDUCE_LATENCY,
    Roofline,
    Shape,
    read_shape,
)
from tiny_models import save_model

from crossdraft.framework.cli import main as cli
from crossdraft.framework.errors import ModelError, UnknownNameError, UsageError

DEVICE = Accelerator("toy", bandwidth=1e9, flops=1e12, memory=1e9, link=1e8, source="made up")


def multiplied(model: Any) -> int:
    """Parameters in products of a pass: all matrices except input embeddings, plus the output head."""
    looked_up = {id(m.weight) for m in model.modules() if isinstance(m, torch.nn.Embedding)}
    head = model.get_output_embeddings().weight
    inner = sum(p.numel() for p in model.parameters() if p.dim() > 1 and id(p) not in looked_up and p is not head)
    return inner + head.numel()


def test_parameters_are_those_of_real_module(family: str, tiny_model: Any) -> None:
    model = tiny_model(family)
    assert Shape.from_config(model.config).parameters == multiplied(model)


def test_head_with_reduced_vocabulary() -> None:
    """EAGLE-3 has a smaller output head, of ``draft_vocab_size`` rows."""
    config = dict(model_type="llama", hidden_size=32, num_hidden_layers=1, num_attention_heads=4, vocab_size=97)
    whole, trimmed = Shape.from_config(config), Shape.from_config(config | {"draft_vocab_size": 11})
    assert whole.parameters - trimmed.parameters == 32 * (97 - 11)


#: Dimensions that any type of model accepts.
SMALL = dict(hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
             intermediate_size=48, vocab_size=97, moe_intermediate_size=24, num_experts=4, num_local_experts=4,
             n_routed_experts=4, num_experts_per_tok=2, pad_token_id=0)  # fmt: skip
MLA = dict(kv_lora_rank=8, q_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=8, v_head_dim=8, first_k_dense_replace=1)


@pytest.mark.parametrize(
    ("kind", "options", "experts", "caches", "states"),
    [
        ("mixtral", {}, (4, 2, 4), [(4, 64, 64, 2, 0)], 0),
        # of four layers two have experts
        ("qwen2_moe", {"decoder_sparse_step": 2}, (4, 2, 2), [(4, 64, 64, 2, 0)], 0),
        ("qwen3_moe", {"mlp_only_layers": [0]}, (4, 2, 3), [(4, 64, 64, 2, 0)], 0),
        ("gpt_oss", {"sliding_window": 5}, (4, 2, 4), [(2, 64, 64, 2, 5), (2, 64, 64, 2, 0)], 0),
        ("glm4_moe", {"first_k_dense_replace": 1}, (4, 2, 3), [(4, 64, 64, 2, 0)], 0),
        ("minimax_m2", {}, (4, 2, 4), [(4, 64, 64, 2, 0)], 0),
        ("deepseek_v3", {**MLA, "n_group": 1, "topk_group": 1}, (4, 2, 3), [(4, 8 + 4, 4 * (8 + 2), 1, 0)], 0),
        (
            "glm_moe_dsa", {**MLA, "index_topk": 5, "index_head_dim": 6, "index_n_heads": 2, "n_group": 1,
             "topk_group": 1},
            (4, 2, 3), [(4, 6, 6, 1, 0), (4, 8 + 4, 4 * (8 + 2), 1, 5)], 0,
        ),
        (
            "qwen3_next",
            {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
             "linear_value_head_dim": 8, "shared_expert_intermediate_size": 24},
            (4, 2, 4), [(1, 64, 64, 2, 0)], 3 * 4 * 8 * 8,
        ),
        (
            "gemma4_text",
            {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 5, "global_head_dim": 32,
             "hidden_size_per_layer_input": 0},
            (0, 0, 0), [(2, 64, 64, 2, 5), (2, 128, 128, 2, 0)], 0,
        ),
    ],
)  # fmt: skip
def test_experts_caches_and_states(
    kind: str, options: dict[str, Any], experts: tuple[int, ...], caches: list[Any], states: int
) -> None:
    shape = Shape.from_config({"model_type": kind, **SMALL, **options})
    assert (shape.experts, shape.active, shape.moe_layers) == experts
    assert [tuple(cache) for cache in shape.caches] == caches
    assert shape.states == states


@pytest.mark.parametrize("kind", ["qwen3_vl", "mistral3", "glm4v"])
def test_text_models_inside_of_others(kind: str) -> None:
    """The text model alone is priced: larger images cost a pass over text nothing."""
    type_of_text = {"qwen3_vl": "qwen3_vl_text", "mistral3": "mistral", "glm4v": "glm4v_text"}[kind]
    text = {**SMALL, "model_type": type_of_text, "head_dim": 8}
    shape = Shape.from_config({"model_type": kind, "text_config": text, "vision_config": {"num_hidden_layers": 1}})
    attention, mlp = 2 * (32 * 32 + 32 * 16), 3 * 32 * 48
    assert shape.parameters == 4 * (attention + mlp) + 32 * 97


@pytest.mark.parametrize(
    ("kind", "total", "active", "cache"),
    [  # parameters in billions as published, and elements of a token in the cache
        ("deepseek_v3", 671, 37, 61 * 576),
        ("gpt_oss", 117, 5.1, 36 * 2 * 8 * 64),
        ("qwen3_moe", 30.5, 3.3, 48 * 2 * 4 * 128),
    ],
)
def test_published_sizes(kind: str, total: float, active: float, cache: int) -> None:
    config = {"qwen3_moe": {"num_hidden_layers": 48, "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936,
                            "moe_intermediate_size": 768, "head_dim": 128}}.get(kind, {})  # fmt: skip
    shape = Shape.from_config({"model_type": kind, **config})
    assert (shape.parameters + shape.embedding) / 1e9 == pytest.approx(total, rel=0.01)
    idle = shape.expert.weights * (shape.experts - shape.active) * shape.moe_layers
    assert (shape.parameters - idle) / 1e9 == pytest.approx(active, rel=0.08)
    assert sum(c.layers * c.values for c in shape.caches) == cache


def test_weights_that_are_stored_in_another_way_are_named() -> None:
    config = {**SMALL, "model_type": "llama", "quantization_config": {"quant_method": "fp8"}}
    shape = Shape.from_config(config, "small")
    caveat = "weights of small, stored as fp8, count as 16 bits each; set --weight-bytes"
    assert Roofline(shape, DEVICE).caveat == caveat and caveat in Roofline(shape, DEVICE).description(9)
    assert not Roofline(shape, DEVICE, weight_bytes=1).caveat


def test_narrow_embedding_is_projected(tiny_model: Any) -> None:
    model = tiny_model("opt", word_embed_proj_dim=16)
    assert Shape.from_config(model.config).parameters == multiplied(model)


def test_well_known_sizes() -> None:
    llama = Shape.from_config({
        "model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "intermediate_size": 28672, "vocab_size": 128256,
    })  # fmt: skip
    assert llama.parameters + llama.embedding == pytest.approx(70.55e9, rel=1e-3)  # Llama-3.1-70B
    assert llama.caches == ((80, 2 * 8 * 128, 64 * 128, 8, 0),)


def test_windows_by_layer(tiny_model: Any) -> None:
    def windows(family: str) -> list[int]:
        return [c.layers for c in Shape.from_config(tiny_model(family).config).caches if c.window]

    assert (windows("gemma3"), windows("mistral-sliding"), windows("mistral")) == ([1], [2], [])


def test_unknown_dimensions_are_named() -> None:
    with pytest.raises(ModelError, match="none of the keys num_experts_per_tok"):
        Shape.from_config({"model_type": "qwen3_moe", **SMALL, "num_experts_per_tok": 0})


LLAMA = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100,
         "num_key_value_heads": 2, "head_dim": 2, "intermediate_size": 16}  # fmt: skip
TOY = Shape.from_config(LLAMA, "toy")


def test_work_by_hand() -> None:
    work = TOY.work(batch_size=2, width=5, context=7)
    weights = 8 * 8 + 2 * 8 * 4 + 8 * 8  # q; k and v; o
    assert work["projections"].flops == 3 * 2 * 10 * weights
    # activations of a token: input and output of q, k, v and o
    assert work["projections"].bytes == 3 * 2 * (weights + 10 * (16 + 12 + 12 + 16))
    assert work["attention"].flops == 3 * 4 * 10 * 8 * 12  # q.K and the weighted sum of V, 12 tokens seen
    assert work["attention"].bytes == 3 * 2 * (2 * 12 * 8 + 10 * 16)
    assert work["mlp"].flops == 3 * 2 * 10 * 3 * 8 * 16
    assert work["mlp"].bytes == 3 * 2 * (3 * 8 * 16 + 10 * 3 * (8 + 16))
    assert work["head"] == (2 * (8 * 100 + 10 * 108), 2 * 10 * 800)


def test_fewer_bytes_weight_leave_flops() -> None:
    half = TOY.work(1, 1, 0, weight_bytes=1)["head"]
    assert half == (800 + 2 * 108, 2 * 800)


def test_window_limits_attention_reads() -> None:
    kinds = ["full_attention", "sliding_attention", "sliding_attention"]
    full = Shape.from_config(LLAMA | {"model_type": "qwen3", "layer_types": kinds, "sliding_window": 4,
                                      "use_sliding_window": True})  # fmt: skip
    attended = (7 + 1) + 2 * (4 + 1)
    assert full.work(1, 1, 7)["attention"].flops == 4 * 8 * attended
    assert full.work(1, 1, 3)["attention"] == TOY.work(1, 1, 3)["attention"]  # shorter than the window


def test_devices_share_work_and_repeat_scarce_kv_heads() -> None:
    one, four = TOY.work(2, 1, 100), TOY.work(2, 1, 100, devices=4)
    for part in ("projections", "attention", "mlp", "head"):
        assert four[part].flops == one[part].flops / 4
    cache = (four["attention"].bytes - 3 * 2 * 4 * 2) / (one["attention"].bytes - 3 * 2 * 16 * 2)
    assert cache == 1 / 2  # two KV heads over four devices: each holds a whole one


def test_experts_are_read_as_tokens_meet_them() -> None:
    shape = Shape.from_config(LLAMA | {
        "model_type": "mixtral", "num_hidden_layers": 1, "num_local_experts": 4, "num_experts_per_tok": 1,
    })  # fmt: skip
    assert [shape.experts_read(n) for n in (0, 1, 2)] == [0, 1, 1 + 3 / 4]
    assert shape.experts_read(1000) == pytest.approx(4)
    router, expert = 8 * 4, 3 * 8 * 16
    work = shape.work(2, 1, 0)["mlp"]
    assert work.flops == 2 * 2 * (expert + router)  # one expert a token, however many are read
    moved = (4 + 8) + (2 * 16 + 8) + (8 + 16)  # of the router, gate and up in one, down
    assert work.bytes == 2 * (1.75 * expert + router + 2 * moved)


def test_states_are_read_once_and_written_for_each_token() -> None:
    shape = dataclasses.replace(TOY, caches=(), states=10)
    assert shape.work(2, 3, 100)["attention"] == (2 * (1 + 3) * 10 * 4, 4 * 6 * 10)


def test_slower_of_memory_and_compute_counts() -> None:
    roofline = Roofline(TOY, DEVICE, efficiency=(1, 1), layer_overhead=0)
    work = TOY.work(1, 1, 0)
    assert roofline.seconds(1, 1, 0) == pytest.approx(sum(w.bytes for w in work.values()) / 1e9)
    fast_memory = Accelerator("toy", 1e20, 1e12, 1, 1, "")
    many = Roofline(TOY, fast_memory, efficiency=(1, 0.5), layer_overhead=0)
    flops = sum(w.flops for w in TOY.work(64, 4, 0).values())
    assert many.seconds(64, 4, 0) == pytest.approx(flops / 0.5e12)


def test_overheads_are_added() -> None:
    base = Roofline(TOY, DEVICE, devices=4, layer_overhead=0, all_reduce=False)
    assert base.parts(2, 1, 0)["other"] == 0
    full = Roofline(TOY, DEVICE, devices=4, layer_overhead=1e-3)
    sent = 2 * 8 * 2 * 2 * 3 / 4
    assert full.parts(2, 1, 0)["other"] == pytest.approx(3e-3 + 6 * (ALL_REDUCE_LATENCY + sent / 1e8))
    assert full.seconds(2, 1, 0) == pytest.approx(base.seconds(2, 1, 0) + full.parts(2, 1, 0)["other"])


def test_device_memory_limit() -> None:
    roofline = Roofline(TOY, DEVICE, devices=2)
    weights = (TOY.parameters + 800) * 2 / 2
    assert roofline.memory_bytes(3, 10) == weights + 3 * 10 * 3 * 2 * 2 * 2


def test_built_in_accelerators_are_complete() -> None:
    known = accelerators()
    assert {"h100", "h200", "a100-80g", "l40s", "rtx-4090", "rtx-3090", "mi300x", "b200", "tpu-v5e"} <= set(known)
    for result in known.values():
        assert result.source
        # FLOPs a byte: a slip in a unit or a figure with sparsity would leave this range
        assert 50 < result.flops / result.bandwidth < 600
        assert 1e10 < result.memory < 1e12 < result.flops


def test_accelerator_of_your_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    row = "{bandwidth: 1e12, flops: 1e14, memory: 1e10, link: 1e10, source: mine}"
    file.write_text(f"mine: {row}\n", encoding="utf-8")
    assert accelerator(str(file)) == Accelerator("mine", 1e12, 1e14, 1e10, 1e10, "mine")
    file.write_text(f"a: {row}\nb: {row}\n", encoding="utf-8")
    with pytest.raises(UsageError, match="contains 2 accelerators"):
        accelerator(str(file))
    file.write_text("mine: {bandwidth: fast}\n", encoding="utf-8")
    with pytest.raises(UsageError, match="the keys bandwidth, flops, memory, link and source"):
        accelerator(str(file))
    with pytest.raises(UsageError, match="cannot read"):
        accelerator(str(tmp_path / "none.yaml"))
    with pytest.raises(UnknownNameError, match="did you mean 'h100'"):
        accelerator("h10")


def test_shape_is_read_from_file_or_directory(tmp_path: Path) -> None:
    config = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
              "intermediate_size": 128, "vocab_size": 1000}  # fmt: skip
    directory = tmp_path / "tiny"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")
    result = read_shape(str(directory))
    assert (result.name, result.caches[0].heads, result.caches[0].queries) == (
        "tiny",
        4,
        64,
    )  # what the file leaves out
    assert read_shape(str(directory / "config.json")).parameters == result.parameters


def test_invalid_shape_is_reported(tmp_path: Path, tiny_model: Any) -> None:
    file = tmp_path / "config.json"
    with pytest.raises(UsageError, match=r"not a config\.json, a model directory"):
        read_shape(str(file))
    for text, message in [
        ("{", "config.json:1: not JSON"),
        ("[]", "must hold a JSON object, not a list"),
        ("{}", "no model_type"),
        ('{"model_type": "nonesuch"}', "cannot read a config of model_type 'nonesuch'"),
        ('{"model_type": "vit"}', "cannot lay out model_type 'vit'"),
    ]:
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match=message):
            read_shape(str(file))


def test_roofline_from_command_line(config_file: str, capsys: Any) -> None:
    options = ["--on", "h100", "--devices", "8", "--gamma", "4", "--acceptance", "0.7", "--batch-size", "1,64,2048"]
    assert cli.main(["cost", "--target", config_file, *options]) == 0
    out = capsys.readouterr().out
    assert "llama-70b (69.50 G parameters in matrix products) on 8 x h100, context 1024" in out
    assert "a = 0.7 stops paying at B = 2048" in out
    assert "weights and KV cache exceed the device memory of 80 GB from B = 2048 on" in out
    assert "without --drafter, speed-ups leave out the cost of drafts" in out
    assert "a = 0.7: policy: {name: batch-size, lengths: [[1, 4], [64, 3], [2048, 1]]}" in out

    assert cli.main(["cost", "--target", config_file, *options, "--drafter", config_file, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    slow = record["speed_up"]["a = 0.7"]["1"]
    pass_timing, step = record["target_seconds"]["1"], record["draft_step_seconds"]["1"]
    assert step == pass_timing["1"]  # the drafter is the target
    assert slow == pytest.approx((1 - 0.7**5) / 0.3 * pass_timing["1"] / (pass_timing["5"] + 4 * step))
    assert record["stops_paying"] == {"a = 0.7": 1}


def test_adapter_keeps_shape_and_quantized_names_are_refused(tmp_path: Path) -> None:
    base = save_model(tmp_path / "base")
    assert read_shape(f"{base}+{tmp_path / 'adapter'}") == read_shape(base)
    with pytest.raises(UsageError, match="--weight-bytes"):
        read_shape(f"{base}@int8")
