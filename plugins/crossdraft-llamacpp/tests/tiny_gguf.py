"""Small GGUF models with random weights, and what llama.cpp itself outputs with them: one sequence, its own sampler."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from crossdraft_llamacpp.library import GGUFModel, library

#: With the pieces that they are merged of.
WORDS = ["▁cat", "▁a", "▁c", "at", "▁", "a", "c", "t"]
SPECIAL = ["<unk>", "<s>", "</s>"]
VOCAB = len(SPECIAL) + 256 + len(WORDS)
TEMPLATE = (
    "{% for m in messages %}{{ m['content'] }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %} the{% endif %}"
)


def save_gguf(path: Path, *, seed: int = 0, width: int = 64, vocabulary: bool = True, nan: int | None = None) -> Path:
    """A llama of two layers; ``nan`` is a token whose embedding is not a number."""
    from gguf import GGUFWriter

    rng, inner, key = np.random.default_rng(seed), 2 * width, width // 2
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(512)
    writer.add_embedding_length(width)
    writer.add_block_count(2)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(key)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCAB)
    if vocabulary:
        tokens = SPECIAL + [f"<0x{byte:02X}>" for byte in range(256)] + WORDS
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_list(tokens)
        writer.add_token_scores([0.0] * (len(SPECIAL) + 256) + [-float(i) for i in range(len(WORDS))])
        writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(WORDS))
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_chat_template(TEMPLATE)
    else:
        writer.add_tokenizer_model("none")
    shapes = {"token_embd": (VOCAB, width), "output": (VOCAB, width)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.attn_q": (width, width),
            f"blk.{layer}.attn_k": (key, width),
            f"blk.{layer}.attn_v": (key, width),
            f"blk.{layer}.attn_output": (width, width),
            f"blk.{layer}.ffn_gate": (inner, width),
            f"blk.{layer}.ffn_up": (inner, width),
            f"blk.{layer}.ffn_down": (width, inner),
        }
    for name, shape in shapes.items():
        weight = rng.normal(0, 2 / np.sqrt(width), shape).astype(np.float32)
        if name == "token_embd" and nan is not None:
            weight[nan] = np.nan
        writer.add_tensor(f"{name}.weight", weight)
    norms = [f"blk.{layer}.{norm}" for layer in range(2) for norm in ("attn_norm", "ffn_norm")] + ["output_norm"]
    for name in norms:
        writer.add_tensor(f"{name}.weight", np.ones(width, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


class Plain:
    """llama.cpp as it is used without crossdraft: one context, one sequence, `llama_batch_get_one`."""

    def __init__(self, model: GGUFModel, length: int):
        self.api, self.model = library(), model
        options = self.api.llama_context_default_params()
        options.n_ctx = options.n_batch = length
        self.context = self.api.llama_init_from_model(model.handle, options)
        self.sampler = self.api.llama_sampler_init_greedy()

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        self.api.llama_sampler_free(self.sampler)
        self.api.llama_free(self.context)

    def feed(self, tokens: Sequence[int]) -> np.ndarray:
        """``[V]`` logits after the last of ``tokens``, which continue what was fed."""
        ids = (self.api.llama_token * len(tokens))(*tokens)
        assert self.api.llama_decode(self.context, self.api.llama_batch_get_one(ids, len(tokens))) == 0
        result = self.api.llama_get_logits_ith(self.context, -1)
        return np.ctypeslib.as_array(
            ctypes.cast(result, ctypes.POINTER(ctypes.c_float)), (self.model.vocab_size,)
        ).copy()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The same after ``tokens`` alone."""
        self.api.llama_memory_clear(self.api.llama_get_memory(self.context), True)
        return self.feed(tokens)

    def greedy(self, prompt: Sequence[int], maximum: int, ends: Sequence[int]) -> tuple[list[int], list[np.ndarray]]:
        """Tokens of its greedy sampler, and the logits of each token."""
        if prompt[:-1]:  # the last token by itself, so that its pass is like those that follow
            self.logits(prompt[:-1])
            distributions = [self.feed(prompt[-1:])]
        else:
            distributions = [self.logits(prompt)]
        output = [int(self.api.llama_sampler_sample(self.sampler, self.context, -1))]
        while len(output) < maximum and output[-1] not in ends:
            distributions.append(self.feed(output[-1:]))
            output.append(int(self.api.llama_sampler_sample(self.sampler, self.context, -1)))
        return output, distributions
