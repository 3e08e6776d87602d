"""What drafting heads that read the target's features share: EAGLE-1, -2 and -3, multi-token prediction.

Such a head is a decoder layer over *pairs*: the token at t + 1 and the feature at t, the target's own hidden state
where the token before it is committed, the head's own output where it is drafted. A pair of committed tokens is always
fed with the target's feature, from the very pass that verified it; what was computed from the head's own is dropped
after the draft. So the head's keys and values depend on the committed tokens alone, whatever was drafted on the way.

Pair t sits in slot t of the head's cache, at position t; a constant shift of all positions is nothing to rotary
embeddings. A sequence of one token has no pair yet: such a row drafts nothing in its first round, because heads were
never trained on a token without a feature.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from ..framework.decoding.lm import TransformersLM
from ..framework.decoding.sampling import Sampling
from ..framework.draft import Draft, Scores, Sequences, Verdict, on_device
from ..framework.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from ..framework.errors import ContractError, ModelError, NumericalError
from ..framework.rng import RoundRng
from ._growth import DRAWN, Shape, Siblings, grow_dynamic, grow_fixed


@dataclass
class HeadOutput:
    """What a pass of a head gives.

    Attributes:
        logits: ``[B, W, Vd]`` of the token after each pair (fewer positions with ``logits_to_keep``).
        features: ``[B, W, H]``, what takes the target's place in the next pair.
    """

    logits: Tensor
    features: Tensor

    @property
    def hidden_states(self) -> tuple[Tensor]:
        return (self.features,)


class FeatureHead(nn.Module, ABC):
    """Base of the heads: a plain module that runs over whole sequences or, with a cache, piece by piece.

    Attributes:
        config: a transformers config of its decoder layers.
        embed_tokens: ``[V, H]``, frozen; the target's own tensor where the heads bring none.
        lm_head: ``[Vd, H]``; the same.
        target_ids: ``[Vd]`` int64, the target's id of each row of ``lm_head``; ``None`` where they are the same ids.
    """

    config: Any
    embed_tokens: nn.Embedding
    lm_head: nn.Linear
    target_ids: Tensor | None

    @property
    def device(self) -> torch.device:
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_tokens.weight.dtype

    def get_output_embeddings(self) -> nn.Linear:
        return self.lm_head

    def fuse(self, hidden: Tensor) -> Tensor:
        """``hidden [.., L, Ht]``, the target's hidden states of the L layers asked for -> features ``[.., H]``."""
        return hidden.to(self.dtype).flatten(-2)

    @abstractmethod
    def advance(self, embeds: Tensor, features: Tensor, position_ids: Tensor, mask: Any, cache: Any) -> Tensor:
        """The decoder layers over pairs: ``embeds [B, W, H]`` and ``features [B, W, H]`` -> ``[B, W, H]``.

        ``mask``: what the layers take, or a dict of it by layer type; ``cache``: transformers' cache or ``None``.
        """

    def recurrent(self, out: Tensor) -> Tensor:
        """The feature ``[B, W, H]`` that is fed back, from the last layer's output."""
        return out

    def scored(self, out: Tensor) -> Tensor:
        """What ``lm_head`` reads, from the last layer's output."""
        return out

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        attention_mask: Tensor | Mapping[str, Tensor] | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> HeadOutput:
        """Score what follows each pair.

        Args:
            input_ids: ``[B, W]`` the tokens, each one position after its feature.
            features: ``[B, W, H]`` fused features of the target, or the head's own.
            attention_mask: additive ``[B, 1, W, keys]``; ``None`` = causal over the W pairs (then without a cache).
            position_ids: ``[B, W]``; 0, 1, .. by default.
            past_key_values: a transformers cache that the layers append to.
            logits_to_keep: the last so many positions, 0 = all; ``[B]`` = one position of each row.
        """
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        mask = self._windows(input_ids.shape[1]) if attention_mask is None else attention_mask
        out = self.advance(self.embed_tokens(input_ids), features, position_ids, mask, past_key_values)
        if isinstance(logits_to_keep, Tensor):
            kept = out[torch.arange(len(out), device=out.device), logits_to_keep][:, None]
        else:
            kept = out[:, -logits_to_keep:]
        return HeadOutput(self.lm_head(self.scored(kept)), self.recurrent(out))

    def _windows(self, width: int) -> dict[str, Tensor | None] | None:
        """Masks by layer type for W pairs without a cache, if there are sliding layers: those do not follow from W."""
        kinds = getattr(self.config, "layer_types", None) or ()
        if "sliding_attention" not in kinds or getattr(self.config, "use_sliding_window", True) is False:
            return None
        near = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        near &= near.triu(1 - self.config.sliding_window)
        mask = torch.zeros(width, width, dtype=self.dtype, device=self.device)
        mask = mask.masked_fill(~near, torch.finfo(self.dtype).min)[None, None]
        return {"full_attention": None, "sliding_attention": mask}


class FeatureLM:
    """B slots of a head, used like an :class:`~crossdraft.framework.lm.LM` but counting pairs instead of tokens.

    Drafted nodes take their parent's feature by themselves, so that trees grow as with any model.
    """

    def __init__(self, head: FeatureHead, batch_size: int, max_length: int, vocab_size: int):
        self.head, self.vocab_size, self.batch_size = head, vocab_size, batch_size
        self._lm = TransformersLM(head, batch_size, max_length, hidden_layers=(-1,))
        # Heads name the length they were trained on; rotary positions go on beyond it, and the target's own context
        # bounds every sequence.
        self._lm.context_length = None
        self.device = self._lm.device

    @property
    def lengths(self) -> list[int]:
        return self._lm.lengths

    @property
    def passes(self) -> int:
        return self._lm.passes

    def begin(self, row: int, tokens: Sequence[int], features: Tensor) -> None:
        """Slot ``row`` starts over with the pairs of all ``tokens`` but the last, ``features [len(tokens) - 1, H]``."""
        self._lm.begin(row, tokens, features=features)

    def commit(self, tokens: Tensor, features: Tensor, counts: Sequence[int]) -> Tensor:
        """Feed and keep the first ``counts[b]`` pairs of each row; logits ``[B, V]`` after the last one.

        ``tokens [B, W]`` and ``features [B, W, H]`` are padded; the logits of a row without pairs mean nothing.
        """
        last = on_device(list(counts), self.device).clamp(min=1) - 1
        logits, hidden = self._lm.grow(tokens, features=features, logits_to_keep=last)
        assert hidden is not None
        self._lm.keep(counts)
        #: ``[B, 1 + grown, H]``: the feature after the last pair, then those of the nodes grown since.
        self._features = hidden[torch.arange(len(last), device=self.device), last]
        return self._wide(logits)[:, 0]

    def grow(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Add drafted nodes, see :meth:`LM.grow`; returns logits ``[B, W, V]``. A chain grows one node at a time."""
        if parents is None:
            features = self._features[:, -1:]
        else:
            features = self._features.gather(1, (parents + 1)[..., None].expand(-1, -1, self._features.shape[2]))
        logits, hidden = self._lm.grow(tokens, parents, features=features)
        assert hidden is not None
        self._features = torch.cat([self._features, hidden[:, :, 0]], 1)
        return self._wide(logits)

    def forget(self) -> None:
        """Drop all drafted nodes."""
        self._lm.keep([0] * self.batch_size)

    def retire(self, row: int) -> None:
        self._lm.retire(row)

    def _wide(self, logits: Tensor) -> Tensor:
        """Logits of a reduced vocabulary -> ``[.., V]``, -inf elsewhere: q is 0 there, and [p - q]+ covers the rest."""
        ids = self.head.target_ids
        if ids is None:
            return logits
        wide = logits.new_full((*logits.shape[:-1], self.vocab_size), -torch.inf)
        wide[..., ids] = logits
        return wide


class HeadConfig(StrategyConfig):
    """Options of the drafters with such heads: a chain, a fixed tree or a dynamic tree."""

    model: str = Field(description="name, directory or Hub id of the heads' checkpoint")
    tree: Literal["static", "dynamic"] | None = Field(
        None, description="static: of branching or choices; dynamic: EAGLE-2's; default: a chain"
    )
    gamma: int = Field(default=5, ge=0, description="a chain's draft length")
    branching: tuple[int, ...] = Field((2, 2, 1), description="static tree: children of every node of level 1, 2, ..")
    choices: tuple[tuple[int, ...], ...] | None = Field(
        None, description="static tree, instead of branching: nodes as lists of sibling ranks, e.g. [[0], [1], [0, 0]]"
    )
    siblings: Siblings = Field("top-k", description="static tree: top-k (point masses), without-replacement or greedy")
    depth: int = Field(default=4, ge=1, description="dynamic tree: levels, one pass of the head each")
    top_k: int = Field(default=4, ge=1, description="dynamic tree: nodes expanded per level, and children of each")
    nodes: int = Field(default=12, ge=1, description="dynamic tree: nodes kept")
    temperature: float | None = Field(
        None, ge=0, description="drafting temperature of sampled drafts; default: the target's"
    )

    #: Which kind of draft a key belongs to.
    _KEYS: ClassVar[dict[str, tuple[str | None, ...]]] = {
        "gamma": (None,),
        "branching": ("static",),
        "choices": ("static",),
        "siblings": ("static",),
        "depth": ("dynamic",),
        "top_k": ("dynamic",),
        "nodes": ("dynamic",),
        "temperature": (None, "static"),
    }

    @model_validator(mode="after")
    def _fits(self) -> Any:
        kinds = {None: "a chain (leave out tree)", "static": "tree: static", "dynamic": "tree: dynamic"}
        for key, meant in self._KEYS.items():
            if self.tree not in meant and getattr(self, key) != type(self).model_fields[key].default:
                owners = " or ".join(kinds[kind] for kind in meant)
                raise ValueError(f"{key} belongs to {owners}, but the draft is {kinds[self.tree]}")
        if self.choices is not None and self.branching != type(self).model_fields["branching"].default:
            raise ValueError("branching and choices both describe the tree; give one of them")
        if any(count < 1 for count in self.branching):
            raise ValueError(f"branching must hold positive numbers, got {list(self.branching)}")
        if self.tree == "dynamic":
            candidates = self.top_k + (self.depth - 1) * self.top_k**2
            if self.nodes > candidates:
                raise ValueError(f"depth {self.depth} and top_k {self.top_k} give {candidates} nodes, not {self.nodes}")
        elif self.shape.nodes > 4096:
            raise ValueError(f"the draft has {self.shape.nodes} nodes; the most is 4096")
        return self

    @property
    def shape(self) -> Shape:
        """Of a chain or a static tree."""
        if self.tree is None:
            return Shape.branching((1,) * self.gamma)
        if self.choices is not None:
            return Shape.choices(self.choices, contiguous=self.siblings != "top-k")
        return Shape.branching(self.branching)

    def chosen(self, target: Sampling) -> Siblings:
        """How children are chosen; a sampled chain is a tree whose only child is drawn."""
        if target.at(self.temperature).temperature == 0:
            return "top-k"
        return self.siblings if self.tree else "without-replacement"


class FeatureDrafter(Drafter):
    """Base of the drafters with such heads. A subclass says which layers it reads and loads its head."""

    Config = HeadConfig
    config: HeadConfig

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        if context.target_model is None:
            raise ModelError(
                f"drafter '{self.name}' reads the features of its target and shares its embedding, but this target is "
                "no transformers model"
            )
        self.head = self.load().to(context.device).eval()
        # Parameters alone: a rotary embedding in bfloat16 would put tokens in the wrong places.
        for weight in self.head.parameters():
            weight.data = weight.data.to(context.target_model.dtype)
        self.sampling = context.sampling.at(self.config.temperature)
        self.shape = None if self.config.tree == "dynamic" else self.config.shape
        # A dynamic tree feeds more nodes than it keeps.
        fed = (self.config.depth - 1) * self.config.top_k if self.shape is None else 0
        self.lm = FeatureLM(self.head, context.batch_size, context.max_length + fed, context.vocab_size)
        self._pending: list[list[Tensor]] = [[] for _ in range(context.batch_size)]  # features not yet fed

    @abstractmethod
    def load(self) -> FeatureHead:
        """The head. Raises ModelError for a checkpoint that does not fit."""

    @classmethod
    def layers(cls, config: Any) -> tuple[float, ...]:
        """The layers whose hidden states the head reads, see `DraftTraits.hidden_layers`."""
        return (-1,)

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        # Never replayable: where a round started decides which features are the target's, and with it the laws.
        layers, siblings = cls.layers(config), config.chosen(sampling)
        if config.tree == "dynamic":
            return DraftTraits(drawn="deterministic", point_mass=True, nodes=config.nodes, hidden_layers=layers)
        shape = config.shape
        return DraftTraits(
            drawn="chain" if shape.is_path else DRAWN[siblings],
            point_mass=siblings == "top-k",
            nodes=shape.nodes,
            hidden_layers=layers,
            branching=config.branching if config.tree and config.choices is None else None,
        )

    @property
    def passes(self) -> int:
        return self.lm.passes

    @torch.inference_mode()
    def begin(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self._pending[row] = []
        if len(prompt) == 1:
            self.lm.begin(row, [], self._none())
            return
        if hidden is None:
            raise ContractError(
                f"drafter '{self.name}' needs the target's hidden states of layers {self.layers(self.config)}, but "
                "the target returned none; build it with the drafter's traits.hidden_layers"
            )
        features = self.head.fuse(hidden)
        # The last pair, the root's, is fed with the first draft.
        self.lm.begin(row, list(prompt[1:]), features[:-1])
        self._pending[row] = [features[-1:]]

    def retire(self, row: int) -> None:
        self._pending[row] = []
        self.lm.retire(row)

    def propose(self, sequences: Sequences, rng: RoundRng) -> Draft:
        has_pair = [len(history) > 1 for history in sequences.history]
        limit = [most if some else 0 for most, some in zip(sequences.limit, has_pair, strict=True)]
        levels = min(self.config.depth if self.shape is None else len(self.shape.ranks), max(limit))
        if levels == 0:
            return Draft.empty(sequences.batch_size, sequences.device)
        root = self._checked(self._catch_up(sequences), sequences)
        most = on_device(limit, sequences.device)
        if self.shape is None:
            top_k = min(self.config.top_k, root.shape[1])
            draft, _ = grow_dynamic(levels, top_k, self.config.nodes, root, self.lm.grow, most)
        else:
            shape = Shape(self.shape.parents[:levels], self.shape.ranks[:levels])
            # A chain's mask is simpler without parents.
            expand = (lambda tokens, parents: self.lm.grow(tokens)) if shape.is_path else self.lm.grow
            siblings = self.config.chosen(self.context.sampling)
            draft, _ = grow_fixed(shape, siblings, root, expand, self.sampling, most, rng)
        self.lm.forget()
        return draft

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        assert scores.hidden is not None
        kept = max(accepted) + 1
        rows = torch.arange(len(accepted), device=scores.hidden.device)[:, None]
        path = torch.arange(kept, device=rows.device).expand(len(accepted), -1)  # node i of the draft is position i + 1
        if verdict.path is not None:
            path = torch.cat([torch.zeros_like(rows), verdict.path.clamp(min=0) + 1], 1)[:, :kept]
        features = self.head.fuse(scores.hidden[rows, path])
        for row, (history, tau) in enumerate(zip(sequences.history, accepted, strict=True)):
            if history:
                self._pending[row].append(features[row, : tau + 1])

    def _catch_up(self, sequences: Sequences) -> Tensor:
        """Feed the pairs that were committed since, with the target's features; logits ``[B, V]`` after the root."""
        features = [torch.cat(rows) if rows else self._none() for rows in self._pending]
        self._pending = [[] for _ in features]
        counts = [len(rows) for rows in features]
        tokens = [history[held + 1 :] for history, held in zip(sequences.history, self.lm.lengths, strict=True)]
        assert [len(t) for t in tokens] == counts, "a committed pair lacks its token or its feature"
        width = max(counts)
        padded = on_device([t + [0] * (width - len(t)) for t in tokens], sequences.device)
        return self.lm.commit(padded, pad_sequence(features, batch_first=True), counts)

    def _none(self) -> Tensor:
        return torch.empty(0, self.head.embed_tokens.embedding_dim, dtype=self.head.dtype, device=self.context.device)

    def _checked(self, logits: Tensor, sequences: Sequences) -> Tensor:
        if logits.device.type == "cpu" and (bad := logits.isnan().any(1)).any():
            for row, history in enumerate(sequences.history):
                if len(history) > 1 and bad[row]:
                    raise NumericalError(
                        f"the heads '{self.config.model}' produced NaN logits in slot {row}; try dtype float32 or "
                        "check the weights"
                    )
        return logits
