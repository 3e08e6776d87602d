"""Train an EAGLE-3 head for a frozen target.

Y. Li, F. Wei, C. Zhang, H. Zhang, "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via
Training-Time Test", 2025, section 3.2. The head runs several times over each text: first on the target's features,
then on its own output of the previous pass with the text's tokens shifted by one, as in drafting. A later pass attends
to the keys of the first one up to its own position, and in the passes since only to those of its own chain.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional

from crossdraft import Argument, LoadedModel, UsageError
from crossdraft.heads import LAYERS, Eagle3Head, make_config, named_layers, read_head
from crossdraft.models import load_checkpoint

from ..contract import Batch, Text, Trainee, TrainingConfig, bfloat16_copy
from ..losses import distil_many, most_frequent, overlap


def default_layers(depth: int) -> tuple[int, ...]:
    """Default hidden states of an EAGLE-3 head for a target of ``depth`` layers."""
    return tuple(int(i * depth) if isinstance(i, float) else i % (depth + 1) for i in LAYERS)


def _rope_theta(config: Any) -> float:
    """The target's ``rope_theta``, which fits the initial weights; 10000 if it has several."""
    theta = (getattr(config, "rope_parameters", None) or {}).get("rope_theta", 10000.0)
    return float(theta) if isinstance(theta, int | float) else 10000.0


@torch.no_grad()
def start_as_last_layer(target: Any, head: Eagle3Head) -> None:
    """Initialise the head with the target's last layer on the highest feature, as far as shapes allow.

    Where attention reads [embedding; feature], the feature's half gets the target's weights. Random initialisation
    needs many more steps.
    """
    decoder, layer, size = target.get_decoder(), head.layers[0], head.fc.out_features
    norm = getattr(decoder, "norm", None)
    # Gemma's norms multiply by 1 + weight; copied weights would be wrong.
    if norm is None or not torch.allclose(norm(torch.ones_like(norm.weight)), norm.weight, rtol=0.02):
        return
    source_state = decoder.layers[-1].state_dict() | {"norm.weight": norm.weight}
    # Input norms: that of the last layer for features, that of the first one for embeddings.
    source_state["hidden_norm.weight"] = source_state.get("input_layernorm.weight")
    source_state["input_layernorm.weight"] = decoder.layers[0].state_dict().get("input_layernorm.weight")
    for name, weight in [*layer.named_parameters(), ("norm.weight", head.norm.weight)]:
        source = source_state.get(name)
        if source is None:
            continue
        if source.shape == weight.shape:
            weight.copy_(source)
        elif source.dim() == 2 and (len(source), 2 * source.shape[1]) == tuple(weight.shape):
            weight[:, source.shape[1] :] = source
    if head.fc.in_features % size == 0:
        head.fc.weight[:, :-size] *= 0.1
        head.fc.weight[:, -size:] = torch.eye(size)


class Eagle3Training(TrainingConfig):
    """Options of ``crossdraft train eagle3``."""

    name = "eagle3"

    learning_rate: float = Field(1e-3, description="of AdamW at its peak", gt=0, le=10)
    unroll: int = Field(
        0,
        description="passes of the head over a text, one per drafted token (default: 3 on a CPU, else 5)",
        ge=0,
        le=64,
    )
    decay: float = Field(0.8, description="weight of a pass's loss relative to the previous pass's", ge=0, le=1)
    draft_vocab: int = Field(
        8192,
        description="size of the head's vocabulary: the most frequent response tokens (0: all tokens)",
        ge=0,
        le=10_000_000,
    )
    layers: Annotated[tuple[Annotated[int, Field(ge=0, le=4095)], ...], Argument(commas=True)] = Field(
        (),
        description="the target's hidden states that the head reads, e.g. 2,15,27 (default: 2, L // 2 and L - 3)",
        max_length=256,
    )
    feed_forward: int = Field(
        0, description="inner size of the head's feed-forward layer (default: the target's)", ge=0, le=1_000_000
    )

    def with_target_defaults(self, target: LoadedModel) -> Self:
        default = default_layers(target.model.config.get_text_config().num_hidden_layers)
        unroll = self.unroll or (3 if target.model.device.type == "cpu" else 5)
        return self.model_copy(update={"unroll": unroll, "layers": self.layers or default})

    @classmethod
    def export_servable(cls, model: str, target: LoadedModel, directory: Path) -> str:
        checkpoint = load_checkpoint(model)
        layers = tuple(named_layers(checkpoint) or ()) or None
        read_head(checkpoint, target.model, layers).save(directory, layers=layers)
        return "engines take the token embedding from the target"

    def trainee(self, target: LoadedModel) -> Trainee:
        return Eagle3Trainee(target, self)


class Eagle3Trainee(Trainee):
    """A head with one decoder layer like the target's; its LM head starts as the target's rows."""

    student: Eagle3Head

    def __init__(self, target: LoadedModel, recipe: Eagle3Training):
        super().__init__(target, recipe)
        text: Any = target.model.config.get_text_config()
        layers, depth, vocab = recipe.layers, text.num_hidden_layers, len(self.head)
        if len(layers) != 3 or any(not 0 <= i < depth for i in layers) or layers[0] == 1:
            raise UsageError(
                f"--layers {','.join(map(str, layers))}: must name three of the hidden states 0 to {depth - 1}, the "
                "first of them not 1 (readers of EAGLE-3 configs interpret it as 2)"
            )
        self.hidden_layers = (*layers, -1)
        self.drafter = {"name": "eagle3"} if layers == default_layers(depth) else {"name": "eagle3", "layers": layers}
        self._config = make_config(
            hidden_size=text.hidden_size,
            intermediate_size=recipe.feed_forward or text.intermediate_size,
            num_attention_heads=text.num_attention_heads,
            num_key_value_heads=getattr(text, "num_key_value_heads", None) or text.num_attention_heads,
            head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
            rms_norm_eps=getattr(text, "rms_norm_eps", 1e-6),
            max_position_embeddings=text.max_position_embeddings,
            num_hidden_layers=1,
            rope_parameters={"rope_type": "default", "rope_theta": _rope_theta(text)},
            vocab_size=vocab,
        )
        self._start: Eagle3Head | None = None

    def start_from(self, name: str) -> None:
        checkpoint, read = load_checkpoint(name), list(self.recipe.layers)
        if (named := named_layers(checkpoint)) and named != read:
            raise UsageError(
                f"{name} reads the hidden states {named}, not {read}; add --layers {','.join(map(str, named))}"
            )
        head = read_head(checkpoint, self.target.model, self.drafter.get("layers"))
        if head.feed_normed:
            raise UsageError(
                f"{name} feeds its normed output back (feed_normed), which the written layout cannot represent"
            )
        size = self.target.model.config.get_text_config().hidden_size
        if head.config.hidden_size != size:
            raise UsageError(f"{name} has hidden states of size {head.config.hidden_size}, the target of {size}")
        self._start = head.to(self.head.device, torch.float32)
        # The table may be the target's own tensor: copy it.
        self._start.lm_head.weight = nn.Parameter(head.lm_head.weight.detach().clone())

    def prepare(self, texts: Sequence[Text]) -> None:
        self.student = self._new(texts) if self._start is None else self._start
        ids = self.student.target_ids
        #: The target's rows of the head's vocabulary; ``_known [V]`` marks its tokens.
        self._rows = self.head if ids is None else self.head[ids]
        self._known = torch.ones(len(self.head), dtype=torch.bool, device=self.head.device)
        if ids is not None:
            self._known = torch.zeros_like(self._known).index_fill_(0, ids, True)
        if self._start is None:
            start_as_last_layer(self.target.model, self.student)
            with torch.no_grad():
                self.student.lm_head.weight.copy_(self._rows)
        self._no_bias = torch.zeros(len(self._rows), device=self.head.device)

    def _new(self, texts: Sequence[Text]) -> Eagle3Head:
        """Make a head whose vocabulary is the most frequent tokens of the texts."""
        size, vocab = self.recipe.draft_vocab, len(self.head)
        ids = None
        if 0 < size < vocab:
            responses = (token for text in texts for token in text.response)
            ids = most_frequent(responses, size, vocab).to(self.head.device)
        embedding: Any = self.target.model.get_input_embeddings()
        width = self.head.shape[1] * (len(self.hidden_layers) - 1)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.recipe.seed)
            # In float32, as all trained weights.
            return Eagle3Head(self._config, embedding.weight.float(), width, target_ids=ids).to(self.head.device)

    def loss(self, batch: Batch, step: int) -> tuple[Tensor, Tensor]:
        """Compute the loss without tokens outside the head's vocabulary and chains through them, never drafted."""
        r = self.recipe
        states, keep, target, tokens = self._unrolled(batch)
        known = self._known[tokens]
        for s in range(r.unroll):  # s drafted tokens and the next one
            prefix = functional.pad(known, (s, 0), value=True)[:, : known.shape[1]]
            keep[s:] &= prefix
        flat = batch.predicts.sum(1)[:, None] > torch.arange(known.shape[1], device=known.device)
        loss, same = distil_many(
            states[:, flat],
            keep[:, flat],
            target[flat],
            self.student.lm_head.weight,
            self._no_bias,
            r.divergence,
            beta=r.beta,
            decay=r.decay,
            target_head=self._rows,
        )
        return loss, same[0]

    def acceptance(self, batch: Batch) -> list[Tensor]:
        states, keep, target, _ = self._unrolled(batch)
        flat = keep.any(0)
        overlaps = overlap(
            states[:, flat], target[flat], self.student.lm_head.weight, self.head, self.student.target_ids
        )
        return [same[kept] for same, kept in zip(overlaps, keep[:, flat], strict=True)]

    def _unrolled(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the training-time test, K passes, for the R tokens of the longest response.

        Returns:
            inputs of the LM head for token i of a response in pass s, after s drafted tokens, ``[K, n, R, H]``; True
            if this draft exists, ``[K, n, R]``; the target's last hidden states for the same tokens, ``[n, R, H]``;
            and the tokens ``[n, R]``.
        """
        from transformers import DynamicCache

        ids, hidden, head = batch.ids, batch.hidden, self.student
        n, width = ids.shape
        pairs, count = width - 1, int(batch.predicts.sum(1).max())
        # Row r is the pair that drafts token r of the response in the first pass, two positions before it. Rows beyond
        # a short response attend to themselves only, and are masked.
        first = batch.predicts.int().argmax(1) - 1
        rows = first[:, None] + torch.arange(count, device=ids.device)

        def at(values: Tensor, shift: int) -> Tensor:
            """Gather ``[n, R, ..]`` from ``[n, L, ..]``, ``shift`` positions after each row."""
            index = (rows + shift).clamp(0, values.shape[1] - 1)
            return values[torch.arange(n, device=ids.device)[:, None], index]

        cache = DynamicCache()
        positions = torch.arange(pairs, device=ids.device).expand(n, -1)
        features = head.fuse(hidden[:, :-1, :-1])
        out = at(head.advance(head.embed_tokens(ids[:, 1:]), features, positions, None, cache), 0)
        own = torch.eye(count, dtype=torch.bool, device=ids.device).expand(n, -1, -1)
        visible = positions[:, None] <= rows[..., None]  # keys of the first pass, by row
        states, keep = [], []
        for s in range(self.recipe.unroll):
            if s:
                visible = torch.cat([visible, own], -1)
                embeds = head.embed_tokens(at(ids, 1 + s))
                out = head.advance(embeds, head.recurrent(out), rows + s, visible[:, None], cache)
            # Row r drafts token r + s.
            shift = min(s, count)
            states.append(functional.pad(head.head_input(out)[:, : count - shift], (0, 0, shift, 0)))
            inside = (rows >= 0) & (rows < pairs - s)
            drafts = at(functional.pad(batch.drafts(s), (0, s)), 0) & inside
            keep.append(functional.pad(drafts[:, : count - shift], (shift, 0)))
        return torch.stack(states), torch.stack(keep), at(hidden, 1)[:, :, -1], at(ids, 2)

    def export(self, directory: Path, held_out: Iterable[Batch]) -> None:
        head: Any = bfloat16_copy(self.student)
        head.save(directory, layers=self.recipe.layers)

    def describe(self) -> tuple[str, str, str]:
        r, size = self.recipe, sum(weight.numel() for weight in self.trained.values())
        layers = "" if "layers" not in self.drafter else f" Give the drafter `layers: {list(r.layers)}`."
        return (
            f"An EAGLE-3 head for {self.target_name}",
            f"One decoder layer ({size / 1e6:.1f} M trained parameters) that drafts for `{self.target_name}`. It reads "
            f"the target's hidden states {', '.join(map(str, r.layers))}, has a vocabulary of {len(self._rows)} tokens "
            f"and shares the target's embedding, which is not stored here.{layers}",
            f"{r.divergence} on response tokens, over the head's vocabulary; training-time test of {r.unroll} passes, "
            f"pass k weighted by {r.decay:g}^k",
        )
