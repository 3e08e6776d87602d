"""``crossdraft cost --on`` with hostile options, accelerators and configs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor.roofline.accelerators import Accelerator
from crossdraft_advisor.roofline.roofline import Roofline, Shape

from crossdraft.framework.errors import UsageError

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 1000}  # fmt: skip
MANY = "1" + "0" * 30

#: Options beside --target CONFIG --on h100, and words of the sentence.
OPTIONS: list[tuple[list[str], list[str]]] = [
    (["--batch-size", MANY], ["--batch-size", "the maximum is 65536", "cache"]),
    (["--batch-size", "1," * 100_000 + "1"], ["--batch-size has 200001 characters"]),
    (["--batch-size", "1," * 100 + "1", "--width", "1," * 100 + "1"], ["10201 points", "the maximum is 10000"]),
    (["--context", "1,2"], ["--context takes one value with --on"]),
    (["--gamma", MANY], ["--gamma", "the maximum is 1024"]),
    (["--efficiency", "0.5"], ["--efficiency 0.5: should have at least 2 item(s)"]),
    (["--efficiency", "0.5,2"], ["--efficiency 2: should be less than or equal to 1"]),
    (["--run", "nowhere"], ["nowhere is not a directory"]),
    (["--drafter", "nowhere"], ["nowhere is not a config.json"]),
    (["--drafter", "a\0b"], ["'a\\x00b' is not a valid path"]),
    (["--on", "h1000"], ["there is no accelerator named 'h1000'"]),
    (["--on", "\x1b[31m"], ["there is no accelerator named '\\x1b[31m'"]),
    (["--on", "none.yaml"], ["cannot read the accelerator file none.yaml: No such file"]),
]  # fmt: skip


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA), encoding="utf-8")
    return file


@pytest.mark.parametrize("options, words", OPTIONS, ids=lambda v: " ".join(v)[:40] if isinstance(v, list) else "")
def test_option(options: list[str], words: list[str], refused: Any, config: Path) -> None:
    refused(["cost", "--target", str(config), "--on", "h100", *options], *words)


def test_target_is_required(refused: Any) -> None:
    for options in ([], ["--run", "runs/finished"]):
        refused(["cost", "--on", "h100", *options], "cost requires --target")


def test_config_is_not_model(refused: Any, config: Path) -> None:
    refused(["cost", "--target", str(config), "--on", ""], "a file that is not supp")


#: A machine in YAML, words of the sentence.
MACHINES: list[tuple[str, list[str]]] = [
    ("", ["an accelerator file must be a mapping"]),
    ("[a]", ["an accelerator file must be a mapping"]),
    ("mine: 3", ["m.yaml:1: an accelerator must be a mapping with the keys"]),
    ("mine: {bandwidth: 1}", ["with the keys bandwidth, flops, memory, link and source"]),
    ("mine: {bandwidth: 1, flops: 1, memory: 1, link: 1, source: x, more: 1}", ["with the keys"]),
    ("a: ROW\nb: ROW", ["contains 2 accelerators"]),
    ("{}", ["contains 0 accelerators"]),
    ("a: ROW\na: ROW", ["m.yaml:2: the key 'a' is given twice"]),
    ("a: *x", ["undefined alias"]),
    ("a: &a [*a]", ["is used inside of its own anchor"]),
    ("a: " + "[" * 3000, ["nested too deeply"]),
    ("a: !!python/object:os.system {}", ["the tag '!!python/object:os.system'"]),
    *[
        (f"mine:\n  bandwidth: {bad}\n  flops: 1\n  memory: 1\n  link: 1\n  source: x", ["m.yaml:2: ", *words])
        for bad, words in [
            ("0", ["bandwidth must be a positive number, not 0"]), ("-1", ["positive number, not -1"]),
            (".nan", ["not a finite number"]), (".inf", ["not a finite number"]),
            ("nan", ["positive number, not 'nan'"]), ("inf", ["positive number, not 'inf'"]),
            ("1e999", ["positive number"]), ("fast", ["'fast'"]),
            ("true", ["not True"]), ("null", ["not None"]), ("[1]", ["not [1]"]), ("{a: 1}", ["{'a': 1}"]),
            ("9" * 5000, ["5000 digits"]),
        ]
    ],
    ("mine: {bandwidth: 1, flops: -1, memory: 1, link: 1, source: x}", ["flops must be a positive number, not -1"]),
    ("mine: {bandwidth: 1, flops: 1, memory: 0, link: 1, source: x}", ["memory must be a positive number, not 0"]),
    ("mine: {bandwidth: 1, flops: 1, memory: 1, link: nan, source: x}", ["link must be a positive number"]),
    ("mine: {bandwidth: 1, flops: 1, memory: 1, link: 1, source: [x]}", ["source must be a text"]),
    ("mine: {bandwidth: 1e-320, flops: 1e-320, memory: 1, link: 1, source: x}", ["inf seconds, which is not"]),
]  # fmt: skip


@pytest.mark.parametrize("text, words", MACHINES, ids=lambda v: str(v)[:40])
def test_machine(text: str, words: list[str], refused: Any, config: Path, tmp_path: Path) -> None:
    file = tmp_path / "m.yaml"
    file.write_text(text.replace("ROW", "{bandwidth: 1, flops: 1, memory: 1, link: 1, source: x}"), encoding="utf-8")
    refused(["cost", "--target", str(config), "--on", str(file)], "m.yaml" if "1e-320" not in text else "", *words)


#: What config.json holds beside `LLAMA`, words of the sentence.
CONFIGS: list[tuple[Any, list[str]]] = [
    *[
        ({key: value}, [f"config.json: {key} is", "it must be"])
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
        for value in (0, -1, "8")
    ],
    ({"num_key_value_heads": -2}, ["num_key_value_heads is -2"]),
    ({"num_key_value_heads": 3}, ["4 heads, which 3 key-value heads"]),
    ({"head_dim": 0}, ["head_dim is 0"]),
    ({"num_hidden_layers": 10**9}, ["the maximum is 1024"]),
    ({"vocab_size": 10**30}, ["the maximum is 16777216"]),
    ({"hidden_size": float("nan")}, ["hidden_size is nan"]),
    ({"hidden_size": None}, ["cannot read a config of model_type 'llama'"]),
    ({"model_type": None}, ["no model_type"]),
    ({"model_type": 3}, ["model_type 3"]),
    ({"model_type": ["llama"]}, ["model_type ['llama']"]),
    ({"model_type": "t5"}, ["model_type 't5'"]),
    ({"model_type": "mixtral", "num_experts_per_tok": 9, "num_local_experts": 4}, ["experts than experts: 9 of 4"]),
    ({"model_type": "mixtral", "num_experts_per_tok": -1}, ["num_experts_per_tok is -1"]),
    ({"model_type": "qwen2_moe", "decoder_sparse_step": "x"}, ["decoder_sparse_step is 'x'"]),
    ({"model_type": "qwen2_moe", "mlp_only_layers": 3}, ["config.json"]),
    ({"sliding_window": -5, "model_type": "mistral"}, ["sliding_window is -5"]),
    ({"rope_theta": "x"}, ["rope_theta is 'x'"]),
    ("{", ["config.json:1: not JSON"]),
    ("[]", ["must hold a JSON object"]),
    ("", ["config.json:1: not JSON"]),
    ("{}", ["no model_type"]),
    ('{"a": ' + "[" * 100_000, ["nested too deeply"]),
]  # fmt: skip


@pytest.mark.parametrize("changes, words", CONFIGS, ids=lambda v: str(v)[:40])
def test_config(changes: Any, words: list[str], refused: Any, config: Path) -> None:
    config.write_text(changes if isinstance(changes, str) else json.dumps(LLAMA | changes), encoding="utf-8")
    refused(["cost", "--target", str(config), "--on", "h100"], *words, code=1)


def test_python_face_refuses_same() -> None:
    shape = Shape.from_config(LLAMA)
    device = Accelerator("toy", 1e9, 1e12, 1e9, 1e8, "made up")
    for options in ({"weight_bytes": float("nan")}, {"cache_bytes": -1}, {"devices": 0}, {"weight_bytes": 0}):
        with pytest.raises(UsageError, match="must be a positive number"):
            Roofline(shape, device, **options)
    with pytest.raises(UsageError, match="which is not a positive time"):
        Roofline(shape, Accelerator("slow", 1e-320, 1e-320, 1, 1, "x")).seconds(1, 1, 1)
    with pytest.raises(UsageError, match="which is not a positive time"):
        Roofline(shape, device).seconds(float("nan"), 1, 1)
