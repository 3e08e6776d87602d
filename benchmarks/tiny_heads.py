"""A tiny target and an EAGLE-3 head that is trained for it in a minute; used by other benchmarks.

The target is a random Llama whose distributions are peaked. Everything that a reading can change matters in the head:
it has an own embedding, an own vocabulary, norms of the features, and rotates half of the channels.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft import Checkpoint, generate
from crossdraft.heads import Eagle3Head, make_config

VOCABULARY, DRAFTED, HIDDEN, HEADS, DEPTH = 128, 112, 64, 2, 4
#: Hidden states that the head reads, of `DEPTH` layers.
LAYERS = (0, 2, 3)
PROMPT, TOKENS, STEPS = 6, 26, 3
#: Shape of the heads' decoder layer.
SHAPE: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 2 * HIDDEN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS,
    "head_dim": HIDDEN // HEADS,
    "num_hidden_layers": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 256,
}
#: Channels of the target's last state are this much larger than those of a usual initialisation.
PEAK = 6.0
#: And the output of each layer this much smaller or larger.
DEEP = 0.7


def save_target(path: Path, seed: int = 0) -> str:
    """A random Llama and a tokenizer of words, in float32."""
    torch.manual_seed(seed)
    shape = SHAPE | {"num_hidden_layers": DEPTH, "initializer_range": 0.12, "rope_theta": 10_000.0}
    config = LlamaConfig(**shape, bos_token_id=0, eos_token_id=1, tie_word_embeddings=False)
    model: Any = LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight *= 6.0
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight *= DEEP
            layer.mlp.down_proj.weight *= DEEP
        model.lm_head.weight *= PEAK
        model.lm_head.weight[:2] = 0.0  # no response ends early
    model.save_pretrained(path)
    words = Tokenizer(WordLevel({f"w{i}": i for i in range(VOCABULARY)}, unk_token="w2"))
    words.pre_tokenizer = WhitespaceSplit()  # type: ignore[assignment]
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w0", eos_token="w1").save_pretrained(path)
    return str(path)


def prompts(count: int, seed: int) -> list[list[int]]:
    return torch.randint(2, VOCABULARY, (count, PROMPT), generator=torch.Generator().manual_seed(seed)).tolist()


def texts_of(target: Any, count: int, seed: int, temperature: float) -> list[list[int]]:
    """Prompts and what the target continues them with."""
    starts = prompts(count, seed)
    options = {"max_new_tokens": TOKENS, "temperature": temperature, "ignore_eos": True, "seed": seed}
    return [
        [*prompt, *response.tokens]
        for prompt, response in zip(starts, generate(target, starts, batch_size=128, **options), strict=True)
    ]


def train_head(
    target: Any, texts: Sequence[Sequence[int]], steps: int, early: int = 0, plain: bool = False
) -> Iterator[Eagle3Head]:
    """Train an EAGLE-3 head on texts of equal length, see `roll_out`.

    Args:
        plain: without norms of the features, and with all channels rotated.
    """
    torch.manual_seed(1)
    ids = torch.tensor(texts)
    known = torch.bincount(ids.flatten(), minlength=VOCABULARY).topk(DRAFTED).indices.sort().values
    embedding = target.model.get_input_embeddings().weight.detach()
    own = embedding @ torch.linalg.qr(torch.randn(HIDDEN, HIDDEN))[0]
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0 if plain else 0.5}
    config = make_config(**SHAPE, rope_parameters=rope)
    head = Eagle3Head(config, own, len(LAYERS) * HIDDEN, target_ids=known, fc_norm=0 if plain else len(LAYERS))
    yield from roll_out(head, target, LAYERS, ids, steps, early)


def roll_out(head: Any, target: Any, layers: Sequence[int], ids: Tensor, steps: int, early: int = 0) -> Iterator[Any]:
    """Train a head on texts ``ids``, rolled out as it drafts; yield it after ``early`` steps and at the end.

    Row t of roll-out s holds the pair of token t + 1 + s with what the head made of row t in roll-out s - 1; it attends
    to the rows of the first roll-out up to its own, and to its own row of later ones.
    """
    known = torch.arange(VOCABULARY) if head.target_ids is None else head.target_ids
    labels = torch.full((VOCABULARY,), -100).scatter_(0, known, torch.arange(len(known)))[ids]
    labels[:, :PROMPT] = -100  # they are random
    n = ids.shape[1] - 2
    causal, diagonal = torch.ones(n, n).tril().bool(), torch.eye(n).bool()
    with torch.no_grad():
        states = target.model(ids, output_hidden_states=True).hidden_states
        hidden = torch.stack([states[i] for i in layers], 2)

    def loss(rows: Tensor) -> Tensor:
        batch, features = ids[rows], head.fuse(hidden[rows])[:, :n]
        cache, loss = DynamicCache(), torch.zeros(())
        for s in range(STEPS):
            padded = functional.pad(batch, (0, s))
            allowed = torch.cat([causal, *[diagonal] * s], 1)
            mask = torch.where(allowed, 0.0, -1e30)[None, None]
            out = head(padded[:, 1 + s : 1 + s + n], features, mask, (torch.arange(n) + s)[None], cache)
            features = out.features
            expected = functional.pad(labels[rows], (0, s), value=-100)[:, 2 + s : 2 + s + n]
            loss = loss + functional.cross_entropy(out.logits.flatten(0, 1), expected.flatten(), ignore_index=-100)
        return loss

    yield from minimise(loss, head, len(ids), steps, early)


def minimise(loss: Callable[[Tensor], Tensor], head: Any, texts: int, steps: int, early: int) -> Iterator[Any]:
    """Train a head on the loss of batches of texts; yield it after ``early`` steps and at the end."""
    weights = [weight for weight in head.parameters() if weight.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=4e-3, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 4e-3, total_steps=steps)
    for number in range(steps):
        optimiser.zero_grad()
        loss(torch.randint(texts, (32,))).backward()
        optimiser.step()
        schedule.step()
        if number + 1 in (early, steps):
            yield head


def save_head(head: Eagle3Head, path: Path) -> str:
    """Write the head and its embedding."""
    head.save(path, layers=LAYERS)
    (file,) = path.glob("*.safetensors")
    tensors: dict[str, Tensor] = load_file(file)
    tensors["embed_tokens.weight"] = head.embed_tokens.weight.detach().contiguous()
    save_file(tensors, file)
    return str(path)


def written(heads: Checkpoint, path: Path) -> str:
    path.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in heads.tensors.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(heads.config), encoding="utf-8")
    return str(path)
