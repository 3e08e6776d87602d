"""The contract of a drafter: whatever proposes tokens for the target to check.

A drafter is one class: a registered ``name``, a pydantic ``Config`` (unknown keys are errors), its ``traits``
(decided before any model is loaded), and ``propose``. It sees committed tokens (:class:`Sequences`) and
returns a :class:`Draft`; it does not know which verifier follows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ModelError, quoted
from ..util.input_files import kind_of, path_of, read_json
from ..util.limits import CONFIG_BYTES, MOST_NODES
from .draft import Draft, Scores, Sequences, Verdict
from .draft_kind import DRAFT_KINDS, DraftKind
from .lm import LM
from .misconfiguration import Misconfiguration
from .models import Checkpoint, LoadedModel
from .options import Options
from .rng import StepRng
from .sampling import Sampling

#: ``run(function, tensors, *constants)`` returns ``function(*constants, **tensors)``, see `DraftContext.runner`.
Runner = Callable[..., tuple[Tensor | None, ...]]


class StrategyConfig(Options):
    """Base of every drafter's and verifier's ``Config``: a misspelt key is an error, not a silent default."""


@dataclass(frozen=True)
class DraftTraits:
    """Properties of the drafts of a drafter with a given config.

    Attributes:
        kind: of its drafts; ``None`` = it never drafts (the autoregressive baseline).
        point_mass: True if its drafts carry no ``q`` (deterministic proposals).
        nodes: the most nodes a draft can have in a row, probes included; buffers are made for as many.
        levels: depth of the deepest node there can be; ``None`` = as many as ``nodes``. Steps in which a sequence had
            room for less are left out of the block efficiency.
        hidden_layers: target layers whose hidden states it needs (0 = embeddings, i = output of layer i,
            negative indices count from the end, a float is a share of the depth rounded down: 0.5 is the middle of
            any target), in the order it wants them in ``Scores.hidden``.
        branching: for a tree in which all nodes of a level have as many children: how many, level by level.
        replayable: the drafts are chains whose laws depend on the committed tokens alone, whose length is fixed
            before the first token is drawn, and which carry the law after their last token where
            `DraftContext.final_q` asks for it. A rule that modifies later targets needs all three.
        temperature_zero_only: its drafts make sense only where the target is decoded greedily; other cells of a matrix
            leave it out.
        adapts: what or how long it drafts depends on how earlier steps went, not on the committed tokens alone (a
            schedule of lengths, a bandit). Such drafts cannot be told from a text, so replay refuses them.
        nested: a shorter draft, of a smaller gamma, is the beginning of a longer one, so that replay can tell all
            lengths from the longest. Text that is made tokens of once it is drafted is not like that.
    """

    kind: DraftKind | None
    point_mass: bool
    nodes: int
    hidden_layers: tuple[float, ...] = ()
    branching: tuple[int, ...] | None = None
    replayable: bool = False
    temperature_zero_only: bool = False
    levels: int | None = None
    adapts: bool = False
    nested: bool = True

    def problem(self) -> str | None:
        """Return the reason why these traits are invalid, as a message; None if they are valid."""
        if self.kind is not None and not isinstance(self.kind, DraftKind):
            return f"kind={quoted(self.kind)}, which is not a DraftKind ({', '.join(DRAFT_KINDS)}, or one of your own)"
        if not _is_count(self.nodes) or MOST_NODES.refusal(self.nodes):
            return f"nodes={quoted(self.nodes)}, which is no number of nodes; the most is {int(MOST_NODES)}"
        if self.levels is not None and not (_is_count(self.levels) and self.levels <= self.nodes):
            return f"levels={quoted(self.levels)}, which is no depth of a draft of {self.nodes} nodes"
        layers = self.hidden_layers
        if not isinstance(layers, tuple) or any(type(x) not in (int, float) or not isfinite(x) for x in layers):
            return f"hidden_layers={quoted(layers)}, which is no tuple of layers"
        if self.branching is not None and not (
            isinstance(self.branching, tuple) and all(_is_count(n) and n for n in self.branching)
        ):
            return f"branching={quoted(self.branching)}, which is no tuple of numbers of children"
        for key in ("point_mass", "replayable", "temperature_zero_only", "adapts", "nested"):
            if not isinstance(value := getattr(self, key), bool):
                return f"{key}={quoted(value)}, which is neither True nor False"
        return None

    @property
    def is_chain(self) -> bool:
        """True if it drafts chains; False for trees and for the baseline."""
        return self.kind is not None and self.kind.is_chain

    @property
    def depth(self) -> int:
        """Depth of the deepest node there can be."""
        return self.nodes if self.levels is None else self.levels


@dataclass(frozen=True)
class TextDistribution:
    """Drafting in which the distribution of a token depends only on the tokens before it.

    Then one pass over a text says what drafting from each of its tokens would, see `Drafter.text_distribution`.

    Attributes:
        lm: slots of the model whose law it is, the drafter's own.
        sampling: makes the law that tokens are drawn from of the model's logits.
        goes_on: ``goes_on(logits, q, token) -> [n] bool``: is another token drafted after ``token [n]``, drawn from
            ``q [n, V]``, which was made from ``logits [n, V]`` (their softmax at temperature 0)? ``None`` = always.
        keeps_last: is the token at which that says no part of the draft?
    """

    lm: LM
    sampling: Sampling
    goes_on: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    keeps_last: bool = True


@dataclass(frozen=True)
class Learner:
    """A model whose weights are its drafter's to change while it drafts, see `DraftContext.load_learner`.

    Attributes:
        lm: its B slots. What they compute follows the weights as they are then; keys and values of tokens that were fed
            before stay as they are.
        weights: what may be learnt, to be changed in place, outside of inference mode.
        logits: ``logits(tokens, at) -> [n, V]``, what the model says after the tokens with the n indices ``at`` of one
            sequence; ``torch.autograd`` finds its gradients with respect to ``weights``.
    """

    lm: LM
    weights: Sequence[Tensor]
    logits: Callable[[Sequence[int], Sequence[int]], Tensor]


def settings_file(name: str) -> Path:
    """The file of `DraftContext.load_settings`."""
    path = path_of(name)
    return path / "settings.json" if kind_of(path) == "directory" else path


def _is_count(value: object) -> bool:
    return type(value) is int and value >= 0


@dataclass
class DraftContext:
    """Everything that a drafter is built from: facts of the run, and resources to request.

    Every method may be refused with a `ModelError`, a sentence for people: the target of the certificate is no
    transformers model, say, and has no heads.

    Attributes:
        sampling: the target's sampling parameters; a drafter that samples uses the same warpers.
        batch_size: number of slots B.
        max_length: longest sequence (prompt, output and draft) any slot will hold, in tokens.
        vocab_size: V, the width of every ``q`` row.
        device: where the drafts must live.
        target: the target's own slots. ``target.fork(layers)`` runs some of its layers over what it has computed;
            nothing else of it is a drafter's to call.
        target_model: the target's module where it is a transformers model (heads share its embedding and head), else
            ``None``.
        target_name: what the user calls the target.
        target_sha256: the digest of its weights, empty where it has none.
        tokenizer: the target's, ``None`` where there is none.
        final_q: the verifier wants one more row of ``q`` for every row whose draft is shorter than the drafter's
            own gamma: the law of the token that would have come next (row ``count[b]``).
    """

    sampling: Sampling
    batch_size: int
    max_length: int
    vocab_size: int
    device: torch.device
    target: LM | None = None
    target_model: Any = None
    target_name: str = ""
    target_sha256: str = ""
    tokenizer: Any = None
    final_q: bool = False

    def load_lm(self, name: str, *, room: int = 0, ids: Tensor | None = None, unknown: int = 0) -> LM:
        """B slots of the model called ``name``, which speaks the target's token ids.

        Args:
            room: tokens that a slot has to hold beyond ``max_length`` and its draft (nodes that are fed and not kept).
            ids: ``[V]`` int64, the model's own id of every id of the target, -1 where it has none: logits are
                -inf there. Without it the model has to have the target's tokenizer.
            unknown: with ``ids``, the model's id that stands for committed tokens that it has none for.

        Raises:
            ModelError: no such model, another tokenizer (without ``ids``), or a context that is too short.
        """
        raise self._refused("load a model of its own")

    def load_model(self, name: str) -> LoadedModel:
        """The model called ``name`` and its tokenizer, unchecked: on the target's device, in its dtype.

        For drafters that make something of it before `load_lm`, a map of ids, say.
        """
        raise self._refused("load a model of its own")

    def load_learner(self, name: str) -> Learner:
        """A copy of the model called ``name``, which has the target's tokenizer, for a drafter that learns.

        Embedding and head, which others may share, stay as they are.

        Raises:
            ModelError: as `load_lm`, or a model that has no gradients.
        """
        raise self._refused("change a model of its own")

    def load_heads(self, name: str) -> Checkpoint:
        """The tensors and the config of heads made for the target. Raises ModelError if there are none, or damaged."""
        raise self._refused("load heads")

    def load_settings(self, name: str) -> dict[str, Any]:
        """Read settings made for a drafter beforehand: the object in the JSON file ``name``, or in its
        ``settings.json``.

        Raises:
            UsageError: no such file, or none that holds a JSON object.
        """
        return read_json(settings_file(name), CONFIG_BYTES, what="the settings")

    def slots(self, module: nn.Module, *, room: int = 0) -> LM:
        """B slots of a module of the drafter's own, which is called as transformers calls a causal LM.

        ``module(input_ids, attention_mask, position_ids, past_key_values, **inputs)`` gives ``logits`` and
        ``hidden_states``; it has ``config``, ``device``, ``dtype`` and ``get_output_embeddings``. Keys and values,
        masks and positions are kept for it; ``start`` and ``forward`` hand further ``inputs`` to it by name. ``room``:
        as in `load_lm`.
        """
        raise self._refused("run a head over a cache")

    def runner(self, module: nn.Module) -> Runner:
        """Make calls of ``module`` fast, and return how: ``run(function, tensors, *constants)``.

        That returns ``function(*constants, **tensors)``, a tuple of tensors. ``function`` may read its arguments and
        the module's weights alone, because on CUDA what it launches is recorded once for each shape and replayed. On a
        CPU the module's own linear layers are given a faster product for few rows.
        """
        return lambda function, tensors, *constants: function(*constants, **tensors)

    def _refused(self, wish: str) -> ModelError:
        target = f"target '{self.target_name}'" if self.target_name else "this target"
        return ModelError(f"the drafter wants to {wish}, which {target} does not offer here; use another drafter")


class Drafter(ABC):
    """Base class of all drafters.

    Life of a slot: ``start`` with a prompt, then per step ``propose`` and ``observe``, then ``free``.
    All of it happens under `torch.inference_mode`.

    An instance that is made without a context, ``MyDrafter()``, is its user's: `crossdraft.generate` takes it as often
    as they like, and what it remembers stays. Every run then begins with `attach`.
    """

    name: ClassVar[str]
    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    #: What it drafts for, from `attach` on.
    context: DraftContext
    #: Whether it was made for that context alone.
    bound: bool = True
    #: Whose it is for now: the decoder's, which sets it.
    claim: object = None

    def __init__(self, config: StrategyConfig | None = None, context: DraftContext | None = None):
        self.config = config if config is not None else self.Config()
        self.bound = context is not None
        if context is not None:
            self.attach(context)

    def attach(self, context: DraftContext) -> None:
        """Draft for ``context`` from here on: it has other slots, perhaps of another target, than any before it.

        A drafter that makes something for its slots, or loads a model, does it here (or in ``__init__``, if it is only
        ever to be given by class or name); what earlier sequences taught it may stay. The base class keeps ``context``.
        """
        self.context = context

    @classmethod
    @abstractmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        """Return the traits of a drafter with this ``config`` for a target sampled with ``sampling``; load nothing."""

    @classmethod
    def wrapped(cls, config: Any) -> Sequence[type[Drafter]]:
        """The drafters that one with this ``config`` runs by their names: results depend on their code, too."""
        return ()

    @classmethod
    def drafts_along(
        cls, config: Any, texts: Iterable[tuple[Sequence[int], Sequence[int]]], depth: int
    ) -> Iterator[np.ndarray] | None:
        """A fast path for `crossdraft replay`, for drafters of point-mass chains that need no model. Optional.

        Args:
            texts: prompt and response of each recorded text, as token ids, neither empty; asked for as they are needed.
            depth: most tokens of a draft, whatever ``config`` says.

        Returns:
            for each text, in order, int64 ``[T, depth]``: row t is what `propose` would draft after the prompt and the
            first t tokens of the response, where every step before was observed; -1 past its end. None = not offered.
        """
        return None

    @classmethod
    def misconfigurations(cls, config: Any, heads: Checkpoint, target_model: Any) -> Iterable[Misconfiguration]:
        """Yield common mistakes with ``heads`` like these, for `crossdraft doctor` to try. Optional.

        Args:
            heads: what `DraftContext.load_heads` gives for the ``model`` of ``config``.
            target_model: as in `DraftContext`.
        """
        return ()

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        """Slot ``row`` starts a sequence with ``prompt`` (its last token is the first root).

        ``hidden``: ``[len(prompt) - 1, L, H]``, the target's features of all prompt tokens but the last, if
        ``traits.hidden_layers`` asks for any.
        """

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Optional: feed a model of its own the first tokens of prompts whose slots `start` soon, see `Prefills`.

        Called once the target has fed them, before any of these slots begins; ``start`` does what is left. Not called
        where a subclass defines ``start`` alone. ``free`` is told of slots that are given up before they begin.
        """

    @abstractmethod
    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        """Draft for every slot; no node of row b deeper than ``sequences.limit[b]``, none for free slots."""

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        """The step is over: ``sequences`` already hold the emitted tokens; ``accepted[b]`` is tau on the host."""

    def free(self, row: int, finish_reason: str | None = None) -> None:
        """Slot ``row`` is free again. ``finish_reason``: see `Response`; ``None`` = aborted before its end."""

    def reset(self) -> None:
        """Forget what earlier sequences taught: called between the warm-up and the first measured prompt.

        A drafter whose memory outlives a sequence has to define it; what belongs to a slot is begun anew anyway.
        """

    @classmethod
    def remembers(cls, config: Any) -> bool:
        """Return True if drafts with this ``config`` depend on other sequences, earlier or concurrent ones.

        By default: does its class define `reset`?
        """
        return cls.reset is not Drafter.reset

    def text_distribution(self) -> TextDistribution | None:
        """The law of every drafted token, if it follows from the tokens before it alone; ``None`` if it does not.

        A shortcut for replay, which uses this drafter's slots then, and never calls ``propose``.
        """
        return None

    @property
    def passes(self) -> int:
        """Forward passes of a draft model made so far (0 for drafters without one)."""
        return 0
