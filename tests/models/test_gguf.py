"""GGUF files are models: what transformers computes with their tensors, converted once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from crossdraft import generate, load_model
from crossdraft.framework.errors import ModelError
from crossdraft.framework.models import gguf as module
from crossdraft.framework.models.resolve import resolve

gguf = pytest.importorskip("gguf")

LAYERS, HEADS, KV, SIZE, INNER, CONTEXT = 2, 4, 2, 32, 64, 64
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
BYTES = [chr(i) for i in (*range(33, 127), *range(161, 173), *range(174, 256), *range(256, 256 + 68))]
TOKENS = [*BYTES, "ab", "Ġt", "<|endoftext|>", "<|im_end|>"]
EOS, EOT = len(TOKENS) - 2, len(TOKENS) - 1


def make_model(architecture: str) -> Any:
    torch.manual_seed(0)
    sizes = dict(vocab_size=len(TOKENS), hidden_size=SIZE, intermediate_size=INNER, num_hidden_layers=LAYERS)
    sizes |= dict(num_attention_heads=HEADS, num_key_value_heads=KV, max_position_embeddings=CONTEXT)
    kind = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen2": (Qwen2ForCausalLM, Qwen2Config)}[architecture]
    model = kind[0](kind[1](**sizes, initializer_range=0.3, tie_word_embeddings=False, rms_norm_eps=1e-5)).eval()
    for name, weight in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(weight)
    return model


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows in llama.cpp's order of channels, for Llama."""
    return weight.reshape(heads, 2, -1, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)


def save_gguf(path: Path, model: Any, kind: str = "F32", *, keys: Any = None, tensors: Any = None) -> None:
    """Write ``model`` as llama.cpp does; with a ``kind`` of quantised matrices, which then are the model's, too."""
    architecture, quantized = model.config.model_type, gguf.GGMLQuantizationType[kind]
    writer = gguf.GGUFWriter(path, architecture)
    for add, value in {
        "context_length": CONTEXT, "embedding_length": SIZE, "block_count": LAYERS, "feed_forward_length": INNER,
        "head_count": HEADS, "head_count_kv": KV, "rope_dimension_count": SIZE // HEADS, "rope_freq_base": 10000.0,
        "layer_norm_rms_eps": 1e-5, "vocab_size": len(TOKENS), "tokenizer_model": "gpt2", "tokenizer_pre": "qwen2",
        "token_list": TOKENS, "token_types": [1] * EOS + [3, 3], "token_merges": ["a b", "Ġ t"],
        "bos_token_id": EOS, "eos_token_id": EOS, "eot_token_id": EOT,
    }.items():  # fmt: skip
        getattr(writer, f"add_{add}")(value)
    for key, value in (keys or {}).items():
        (writer.add_string if isinstance(value, str) else writer.add_float32)(key, value)
    for name, weight in model.named_parameters():
        stem, suffix = name.rsplit(".", 1)
        layer = stem.split(".")[2] if ".layers." in stem else None
        stem = stem if layer is None else stem.split(".", 3)[3]
        own = f"{NAMES[stem]}.{suffix}" if layer is None else f"blk.{layer}.{NAMES[stem]}.{suffix}"
        data = weight.detach().numpy()
        if weight.dim() == 2 and kind != "F32":
            packed = gguf.quants.quantize(data, quantized)
            weight.data = torch.from_numpy(gguf.quants.dequantize(packed, quantized).copy())
            data = weight.data.numpy()
        if architecture == "llama" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
            data = interleaved(data, HEADS if "q_proj" in stem else KV)
        if weight.dim() == 2 and kind != "F32":
            writer.add_tensor(own, gguf.quants.quantize(data, quantized), raw_dtype=quantized)
        else:
            writer.add_tensor(own, np.ascontiguousarray(data))
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "gguf"


def converted(cache: Path) -> list[str]:
    return sorted(path.name for path in cache.iterdir() if not path.name.endswith(".lock"))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_logits_are_those_of_the_tensors(architecture: str, kind: str, tmp_path: Path) -> None:
    model, file = make_model(architecture), tmp_path / "m.gguf"
    save_gguf(file, model, kind)
    loaded = load_model(str(file), dtype="float32")
    ids = torch.arange(40)[None] * 5 % len(TOKENS)
    with torch.no_grad():
        torch.testing.assert_close(loaded.model(ids).logits, model(ids).logits, rtol=0, atol=1e-5)
    own, theirs = loaded.model.state_dict(), model.state_dict()
    assert own.keys() == theirs.keys() and all(torch.equal(own[key], theirs[key]) for key in own)
    assert loaded.eos_token_ids == (EOS, EOT) and loaded.context_length == CONTEXT
    assert loaded.source == f"file {file}, dequantised"
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("ab ta <|im_end|>")) == "ab ta <|im_end|>"


def test_file_is_draft_model(tmp_path: Path) -> None:
    """With the target's weights, it drafts what the target decodes; names have the suffixes of those of directories."""
    file = tmp_path / "m.gguf"
    save_gguf(file, make_model("qwen2"))
    target = load_model(str(file), dtype="float32", device="cpu")
    plain, drafted = (
        generate(target, ["ab ta"], drafter=drafter, temperature=0, max_new_tokens=9, ignore_eos=True)[0]
        for drafter in ("none", {"name": "draft-model", "model": str(file), "gamma": 3})
    )
    assert plain.tokens == drafted.tokens and drafted.steps[0].tau == 3
    assert resolve(f"{file}@int8").quantization == "int8"


def test_file_is_converted_once_and_by_content(tmp_path: Path, cache: Path, capfd: Any) -> None:
    first, copy, other = tmp_path / "a.gguf", tmp_path / "copy.without-suffix", tmp_path / "b.gguf"
    save_gguf(first, make_model("qwen2"))
    copy.write_bytes(first.read_bytes())
    save_gguf(other, make_model("llama"))
    assert resolve(str(first)).path == resolve(str(copy), heads=True).path != resolve(str(other)).path
    assert len(converted(cache)) == 2 and capfd.readouterr().err.count("converting") == 2
    (resolve(str(first)).path / "config.json").write_text("{}")
    load_model(str(first))
    assert capfd.readouterr().err.count("converting") == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_exact_weights_are_stored_in_half_the_size(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model("qwen2").to(dtype).float()
    save_gguf(tmp_path / "m.gguf", model)
    path = resolve(str(tmp_path / "m.gguf")).path
    assert (path / "model.safetensors").stat().st_size < 2.2 * sum(p.numel() for p in model.parameters()) + 10_000
    loaded = load_model(str(tmp_path / "m.gguf"), dtype="float32").model.state_dict()
    assert all(torch.equal(loaded[key], weight) for key, weight in model.state_dict().items())


@pytest.mark.thorough
def test_two_processes_convert_once(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "m.gguf"
    save_gguf(file, make_model("qwen2"))
    code = f"from crossdraft.framework.models.resolve import resolve; print(resolve({str(file)!r}).path)"
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([sys.executable, "-c", code], env=dict(os.environ), **options) for _ in range(2)]
    outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert outputs[0][0] == outputs[1][0] and sum(err.count("converting") for _, err in outputs) == 1
    assert len(converted(cache)) == 1


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "frequencies of Llama 3.1": (
        {"tensors": {"rope_freqs.weight": np.ones(4, np.float32)}},
        "the factors of its rotary frequencies",
    ),
    "YaRN": ({"keys": {"llama.rope.scaling.type": "yarn"}}, r"does not read llama.rope.scaling.type \(yarn\)"),
    "scaled logits": ({"keys": {"llama.logit_scale": 0.25}}, r"does not read llama.logit_scale \(0.25\)"),
}


@pytest.mark.parametrize("subject", REFUSED)
def test_model_that_transformers_would_misread(subject: str, tmp_path: Path, cache: Path) -> None:
    options, sentence = REFUSED[subject]
    save_gguf(tmp_path / "m.gguf", make_model("llama"), **options)
    with pytest.raises(
        ModelError, match=f"could not be converted: .*{sentence}.*pip install plugins/crossdraft-llamacpp"
    ):
        load_model(str(tmp_path / "m.gguf"))
    assert converted(cache) == []


def test_files_that_do_not_convert(tmp_path: Path, cache: Path, monkeypatch: Any) -> None:
    file = tmp_path / "m.gguf"
    save_gguf(file, make_model("qwen2"))
    content = file.read_bytes()
    for length in (4, 100, len(content) // 2):
        (tmp_path / "cut.gguf").write_bytes(content[:length])
        with pytest.raises(ModelError, match=r"cut\.gguf could not be converted: "):
            load_model(str(tmp_path / "cut.gguf"))
    (tmp_path / "m-00001-of-00002.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"one part of a GGUF model; merge the parts"):
        load_model(str(tmp_path / "m-00001-of-00002.gguf"))
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
        with pytest.raises(ModelError, match=r"0\.0 GB left; set CROSSDRAFT_CACHE"):
            load_model(str(file))
        patch.setitem(sys.modules, "gguf", None)
        with pytest.raises(ModelError, match=r"pip install -e '.\[gguf\]'; or"):
            load_model(str(file))
    assert converted(cache) == []
