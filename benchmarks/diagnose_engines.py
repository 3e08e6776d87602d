"""``crossdraft diagnose`` on real engines that serve a damaged EAGLE-3 head: vLLM and llama.cpp's server.

    python benchmarks/diagnose_engines.py --out DIR [--vllm ENV/bin/python] [--llama-server PATH] [--damage NAME]

A tiny target and its head (`tiny_heads`) are trained into DIR, which a second call reuses. The head is trained on the
traffic that is served, too, so that it uses its attention: a wrong rotation costs acceptance. Each damage is made in a
copy of the head, which the engine serves: 32 prompts at temperature 0 in float32. The diagnosis gets the sound head,
the 32 responses and the server's scrape, and prints its answer.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
from crossdraft_advisor import ServedCell
from crossdraft_advisor.diagnosis.matching import UNLISTED
from crossdraft_advisor.engines.engine_cell import without_weights
from safetensors.torch import load_file
from tiny_heads import LAYERS, TOKENS, VOCABULARY, prompts, save_head, save_target, texts_of, train_head, written

from crossdraft import Sampling, load_model
from crossdraft.framework import plugins
from crossdraft.framework.cli.main import main as crossdraft
from crossdraft.models import load_checkpoint

REQUESTS, GAMMA, STEPS = 32, 3, 300
#: Seed of the prompts; copies of their greedy responses among 512 sampled ones, in training.
SEED, COPIES = 2, 4
#: Key of the layers that a head reads, in its config.
READS = "eagle_aux_hidden_state_layer_ids"
BOTH = ("vllm", "llama.cpp")
#: Changes of a head's config (None removes a tensor), the beginning of the hypothesis that names the damage, and the
#: engines that can be given it. Without ``is_neox_style`` `write_gguf` lets llama.cpp rotate other pairs of channels.
DAMAGES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "none": ({}, "as configured", BOTH),
    "rotary base 500,000": ({"rope_theta": 500_000.0}, "the rotary base is 500000", BOTH),
    "other pairs rotated": ({"is_neox_style": False}, "channels are rotated in pairs of neighbours", ("llama.cpp",)),
    "layers off by one": ({READS: [i + 1 for i in LAYERS]}, "ids of hidden layers are off by one", ("vllm",)),
    "layers permuted": (
        {READS: [LAYERS[i] for i in (2, 1, 0)]},
        "the inputs of fc are permuted: the head reads [3, 2, 0]",
        ("llama.cpp",),
    ),
    "no embedding": ({"embed_tokens.weight": None}, "the heads were trained with the target's embedding", BOTH),
}


def pair(out: Path) -> tuple[Path, Path]:
    """Directories of the target and the sound head, trained on the first call."""
    target, head = out / "target", out / "plain"
    if not head.exists():
        loaded = load_model(save_target(target), dtype="float32", device="cpu")
        served_texts = texts_of(loaded, REQUESTS, SEED, 0.0) * COPIES
        (trained,) = train_head(loaded, [*served_texts, *texts_of(loaded, 512, 0, 1.0)], STEPS, plain=True)
        save_head(trained, head)
    return target, head


def damaged(head: Path, path: Path, changes: Mapping[str, Any]) -> Path:
    """A copy of the head, damaged."""
    shutil.rmtree(path, ignore_errors=True)
    heads = load_checkpoint(str(head))
    config = heads.config | {key: value for key, value in changes.items() if value is not None}
    tensors = {name: tensor for name, tensor in heads.tensors.items() if name not in changes}
    return Path(written(replace(heads, config=config, tensors=tensors), path))


def for_vllm(python: str, target: Path, head: Path) -> tuple[dict[str, Any], list[str]]:
    """Options of its server, and arguments that set up speculation."""
    speculative = {"method": "eagle3", "model": str(head), "num_speculative_tokens": GAMMA}
    options = {"python": python, "args": ["--enforce-eager"], "env": {"VLLM_CPU_KVCACHE_SPACE": "1"}}
    return options, ["--speculative-config", json.dumps(speculative)]


def for_llama_cpp(server: str, target: Path, head: Path) -> tuple[dict[str, Any], list[str]]:
    """As `for_vllm`; writes the models as GGUF files beside the head."""
    files = {"llama": target, "eagle3": head}
    for arch, model in files.items():
        files[arch] = head.with_name(f"{model.name}.gguf")
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        write_gguf(files[arch], arch, config, load_file(model / "model.safetensors"))
    args = ["--threads", "1", "--no-warmup", "--device", "none", "--cache-type-k", "f32", "--cache-type-v", "f32"]
    flags = ["--spec-type", "draft-eagle3", "--model-draft", str(files["eagle3"]), "--spec-draft-n-max", str(GAMMA)]
    flags += ["--spec-draft-p-min", "0", "--spec-draft-device", "none"]
    return {"executable": server, "model": str(files["llama"]), "args": args}, flags


ENGINES = {"vllm": for_vllm, "llama.cpp": for_llama_cpp}


def responses(engine: str, program: str, target: Path, head: Path, starts: list[list[int]]) -> list[list[int]]:
    """Responses of a server, one after another; its scrape is ``counters`` beside the head."""
    options, flags = ENGINES[engine](program, target, head)
    cls, model = plugins.get("servers", engine), without_weights(str(target), trust_remote_code=False)
    cell = ServedCell(  # a tiny model emits several steps at once, so more than GAMMA tokens
        *(target, "float32", Sampling(temperature=0), 0, 1, 128, TOKENS, flags),
        end_tokens=model.eos_token_ids,
        tokenizer=model.tokenizer,
    )
    server = cls(cls.Config(**options), cell, head.parent)
    server.start()
    try:
        texts = [server.complete(prompt, TOKENS).tokens for prompt in starts]
        (head.parent / "counters").write_text(server.scrape(), encoding="utf-8")
    finally:
        server.stop()
    return texts


#: Names of tensors in GGUF files, of layers behind their number.
_GGUF = {
    "model.embed_tokens": "token_embd",
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "norm": "output_norm",
    "lm_head": "output",
    "fc": "fc",
    "input_layernorm": "attn_norm",
    "hidden_norm": "attn_norm_2",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_gguf(path: Path, arch: str, config: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write a Llama or an EAGLE-3 head as llama.cpp reads it: q and k for pairs of neighbours, ``d2t`` as ids."""
    from gguf import GGUFWriter

    writer = GGUFWriter(path, arch)
    heads, width = config["num_attention_heads"], config["head_dim"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_rope_dimension_count(width)
    rope = config.get("rope_parameters") or {}
    writer.add_rope_freq_base(float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([f"w{i}" for i in range(VOCABULARY)])
    writer.add_token_scores([-float(i) for i in range(VOCABULARY)])
    writer.add_token_types([3, 3, 2] + [1] * (VOCABULARY - 3))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    if arch == "eagle3":
        writer.add_array("eagle3.target_layers", config["eagle_aux_hidden_state_layer_ids"])
        writer.add_uint32("eagle3.target_hidden_size", config["hidden_size"])
    for name, tensor in tensors.items():
        if name == "t2d":
            continue
        values = tensor.numpy()
        if name == "d2t":
            writer.add_tensor("d2t", values.astype(np.int64) + np.arange(len(values)))
            continue
        stem = name.removesuffix(".weight").replace("midlayer.", "model.layers.0.", 1)
        prefix = ""
        if stem.startswith("model.layers."):
            number, stem = stem.removeprefix("model.layers.").split(".", 1)
            prefix = f"blk.{number}."
        if stem.endswith(("q_proj", "k_proj")) and config.get("is_neox_style", True):
            values = values.reshape(heads, 2, width // 2, -1).swapaxes(1, 2).reshape(values.shape)
        writer.add_tensor(f"{prefix}{_GGUF[stem]}.weight", np.ascontiguousarray(values, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def diagnosis(engine: str, target: Path, head: Path, served: list[tuple[list[int], list[int]]], work: Path) -> str:
    """Report of ``crossdraft diagnose``."""
    common = {"finish_reason": "length", "temperature": 0, "max_tokens": TOKENS}
    lines = [json.dumps({"id": str(i), "prompt": p, "tokens": t} | common) for i, (p, t) in enumerate(served)]
    (work / "responses.jsonl").write_text("\n".join(lines), encoding="utf-8")
    drafter = json.dumps({"name": "eagle3", "model": str(head), "layers": LAYERS, "gamma": GAMMA})
    options = {"target": target, "drafter": drafter, "replay": work / "responses.jsonl", "dtype": "float32"}
    options |= {"device": "cpu", "counters": work / "counters", "as": engine}
    with redirect_stdout(StringIO()) as answer:
        status = crossdraft(
            ["diagnose", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]
        )
    if status:
        raise SystemExit(answer.getvalue())
    return answer.getvalue()


def verdict(answer: str, expected: str) -> str:
    """The way in which an answer names the damage: alone, beside others that fit equally well, or not at all."""
    best = answer.split("hypothesis", 1)[1].splitlines()[2].split("  ")[0]
    others = [line for line in answer.splitlines() if line.startswith("Not distinguished")]
    alike = others[0].rstrip(".").partition(": ")[2].split("; ") if others else []
    alike = [name for name in alike if name != UNLISTED]
    if not best.startswith(expected) and not any(name.startswith(expected) for name in alike):
        return "not named"
    return f"named beside {len(alike)} others" if alike else "named"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--vllm", help="Python of vLLM's environment")
    parser.add_argument("--llama-server", help="llama.cpp's server")
    parser.add_argument("--damage", action="append", choices=DAMAGES, help="one of the damages (repeatable)")
    args = parser.parse_args()
    target, head = pair(args.out)
    starts = prompts(REQUESTS, SEED)
    for engine, program in (("vllm", args.vllm), ("llama.cpp", args.llama_server)):
        for name in (args.damage or DAMAGES) if program else ():
            damage, expected, able = DAMAGES[name]
            if engine not in able:
                continue
            copy = damaged(head, args.out / "damaged", damage)
            texts = responses(engine, program, target, copy, starts)
            answer = diagnosis(engine, target, head, list(zip(starts, texts, strict=True)), args.out)
            print(f"## {engine}, {name}: {verdict(answer, expected)}\n\n{answer}", flush=True)


if __name__ == "__main__":
    main()
