"""The contract of a drafter, which proposes tokens for the target to verify.

A drafter is one class: a registered ``name``, a pydantic ``Config`` (unknown keys are errors), its ``traits``
(available before any model is loaded), and ``propose``, which gets the committed tokens (:class:`Sequences`) and
returns a :class:`Draft`. It is independent of the verifier.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from math import isfinite
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import ModelError, quoted
from ..util.input_files import kind_of, path_of, read_json
from ..util.limits import CONFIG_BYTES, MOST_NODES
from .constraint import RowConstraints
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


def no_bool(traits: Any) -> str | None:
    """Return the first field of type bool that has another value, as a message; None if all are valid."""
    for key in (field.name for field in fields(traits) if field.type == "bool"):
        if not isinstance(value := getattr(traits, key), bool):
            return f"{key}={quoted(value)}, which is neither True nor False"
    return None


class StrategyConfig(Options):
    """Base of every drafter's and verifier's ``Config``: a misspelt key is an error, not a silent default."""


@dataclass(frozen=True)
class DraftTraits:
    """Properties of the drafts of a drafter with a given config.

    Attributes:
        kind: kind of its drafts; ``None`` = it never drafts (the autoregressive baseline).
        point_mass: True if its drafts have no ``q`` (deterministic proposals).
        nodes: maximum number of nodes per row, probes included; sets buffer sizes.
        levels: maximum depth of a node; ``None`` = ``nodes``. Steps with a smaller limit are excluded from the block
            efficiency.
        hidden_layers: target layers whose hidden states it needs, in the order of ``Scores.hidden``: 0 = embeddings,
            i = output of layer i, -1 = output of the final norm, -i = output of layer L + 1 - i of L; a float is a
            share of the depth, rounded down. So L is the last layer's output before the final norm, as in serving
            engines; the last of transformers' ``hidden_states`` is -1.
        branching: children per node of each level, for trees in which all nodes of a level have the same number.
        replayable: the drafts are chains whose distributions depend only on the committed tokens, whose length is fixed
            before the first token is drawn, and which have the distribution after their last token if
            `DraftContext.final_q` is set. Verifiers that modify the target need all three.
        temperature_zero_only: supports greedy decoding only; matrices skip it at other temperatures.
        adapts: drafts or their lengths depend on the outcome of earlier steps, not only on the committed tokens (a
            length schedule, a bandit). Replay does not support such drafters.
        nested: a draft of a smaller gamma is a prefix of one of a larger gamma, so that replay derives all lengths
            from the longest. False for drafts that are tokenised after drafting.
        shortenable: the draft is a chain whose tokens are drafted one after another, so that the acceptance of a token
            hardly depends on where its step started, and gamma is only their maximum number. The acceptance of shorter
            drafts then follows from counters of longer ones (crossdraft-advisor). False for blocks drafted in one
            pass, trees, and lengths that a policy sets.
        always_drafts: every step with room for a draft has one.
        waits: maximum number of times that drafting a step waits for the device (``.item()``, ``.tolist()``), beyond
            the one wait of the loop.
        on_host: drafts are made on the host, by `Draft.copied`, so that reading them does not wait.
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
    shortenable: bool = False
    always_drafts: bool = False
    waits: int = 0
    on_host: bool = False

    def problem(self) -> str | None:
        """Return the reason why these traits are invalid, as a message; None if they are valid."""
        if self.kind is not None and not isinstance(self.kind, DraftKind):
            return f"kind={quoted(self.kind)}, which is not a DraftKind ({', '.join(DRAFT_KINDS)}, or one of your own)"
        if not _is_count(self.nodes) or MOST_NODES.violation(self.nodes):
            return f"nodes={quoted(self.nodes)}, which is not a number of nodes from 0 to {int(MOST_NODES)}"
        if self.levels is not None and not (_is_count(self.levels) and self.levels <= self.nodes):
            return f"levels={quoted(self.levels)}, which is not a depth from 0 to nodes = {self.nodes}"
        if not _is_count(self.waits):
            return f"waits={quoted(self.waits)}, which is not a number of waits"
        layers = self.hidden_layers
        if not isinstance(layers, tuple) or any(type(x) not in (int, float) or not isfinite(x) for x in layers):
            return f"hidden_layers={quoted(layers)}, which is not a tuple of numbers"
        if self.branching is not None and not (
            isinstance(self.branching, tuple) and all(_is_count(n) and n for n in self.branching)
        ):
            return f"branching={quoted(self.branching)}, which is not a tuple of positive integers"
        return no_bool(self)

    @property
    def is_chain(self) -> bool:
        """True if it drafts chains; False for trees and for the baseline."""
        return self.kind is not None and self.kind.is_chain

    @property
    def depth(self) -> int:
        """Maximum depth of a node."""
        return self.nodes if self.levels is None else self.levels


@dataclass(frozen=True)
class TextDistribution:
    """Draft model and stopping rule of a drafter whose token distributions depend only on earlier tokens.

    One pass over a text then gives the drafts from each of its positions, see `Drafter.text_distribution`.

    Attributes:
        lm: slots of the draft model.
        sampling: sampling parameters of the drafts.
        should_continue: ``should_continue(logits, q, token) -> [n] bool``: True if drafting continues after
            ``token [n]``, drawn from ``q [n, V]``, which is computed from ``logits [n, V]`` (their softmax at
            temperature 0); ``None`` = always.
        keeps_last: True if the token at which drafting stops is part of the draft.
    """

    lm: LM
    sampling: Sampling
    should_continue: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    keeps_last: bool = True


@dataclass(frozen=True)
class Learner:
    """A draft model trained while decoding, see `DraftContext.load_learner`.

    Attributes:
        lm: its B slots. Forward passes use the current weights; cached keys and values are not recomputed.
        weights: trainable weights, updated in place outside of inference mode.
        logits: ``logits(tokens, at) -> [n, V]``, differentiable logits after the n positions ``at`` of one sequence.
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
    """Parameters of a run and resources for a drafter.

    Every method may raise a `ModelError` if the target does not support the request: the toy targets of the
    certificate have no heads, for example.

    Attributes:
        sampling: sampling parameters of the target; drafters that sample use the same warpers.
        batch_size: number of slots B.
        max_length: maximum length of a sequence (prompt, output and draft), in tokens.
        vocab_size: V, the size of a row of ``q``.
        device: device of the drafts.
        target: slots of the target. A drafter may call only ``target.fork(layers)``.
        target_model: module of a transformers target (heads share its embedding and head), else ``None``.
        target_name: name of the target as the user wrote it.
        target_sha256: digest of its weights, empty if unknown.
        tokenizer: tokenizer of the target, or ``None``.
        final_q: the verifier needs one more row of ``q`` for rows whose draft is shorter than gamma: the distribution
            of the next token (row ``count[b]``).
        constraints: constraints of the slots.
        mask_drafts: a constraint of the run masks draft models, see `Constraint`: `load_lm` returns such models.
        once: ``once(key, make)`` returns ``make()``, or what it returned for an earlier decoder of the target.
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
    constraints: RowConstraints | None = None
    mask_drafts: bool = False
    once: Callable[[Hashable, Callable[[], Any]], Any] = lambda key, make: make()

    def load_lm(self, name: str, *, extra_tokens: int = 0, ids: Tensor | None = None, unknown: int = 0) -> LM:
        """B slots of the model ``name``, with the target's token ids.

        Args:
            extra_tokens: tokens per slot beyond ``max_length`` and a draft, for nodes that are fed and not committed.
            ids: ``[V]`` int64, the model's id of every id of the target, -1 if it has none: its logit is -inf.
                Without it the model must have the target's tokenizer.
            unknown: with ``ids``, the model's id to feed for committed tokens that it does not have.

        Raises:
            ModelError: unknown model, another tokenizer (without ``ids``), or a context that is too short.
        """
        raise self._refused("load a draft model")

    def load_model(self, name: str) -> LoadedModel:
        """The model ``name`` and its tokenizer, on the target's device, in its dtype; compatibility is not checked.

        For preparations before `load_lm`, such as a map of ids.
        """
        raise self._refused("load a draft model")

    def load_learner(self, name: str) -> Learner:
        """A trainable copy of the model ``name``, with the target's tokenizer, for online learning.

        Embedding and head, which may be shared, are not trained.

        Raises:
            ModelError: as `load_lm`, or a model without gradients.
        """
        raise self._refused("train a draft model")

    def load_heads(self, name: str) -> Checkpoint:
        """Tensors and config of heads trained for the target. Raises ModelError if they are missing or damaged."""
        raise self._refused("load heads")

    def load_module(self, heads: Checkpoint, make: Callable[[Checkpoint], Any], *key: Hashable) -> Any:
        """``make(heads)``, or an earlier result, with its CUDA graphs; ``key``: what else it depends on."""
        return self.once((heads.sha256, repr(heads.config), *key), lambda: make(heads))

    def load_settings(self, name: str) -> dict[str, Any]:
        """Read settings of a drafter: the object in the JSON file ``name``, or in ``settings.json`` of a directory.

        Raises:
            UsageError: the file does not exist or does not hold a JSON object.
        """
        return read_json(settings_file(name), CONFIG_BYTES, subject="the settings")

    def slots(self, module: nn.Module, *, extra_tokens: int = 0) -> LM:
        """B slots of a drafter's own module with the interface of a causal LM of transformers.

        ``module(input_ids, attention_mask, position_ids, past_key_values, **inputs)`` returns ``logits`` and
        ``hidden_states``; it has ``config``, ``device``, ``dtype`` and ``get_output_embeddings``. The slots manage
        cache, masks and positions; ``start`` and ``forward`` pass further ``inputs`` by name. ``extra_tokens``: as in
        `load_lm`.
        """
        raise self._refused("run a head over a cache")

    def runner(self, module: nn.Module) -> Runner:
        """Return a fast caller ``run(function, tensors, *constants)`` for functions that use ``module``.

        It returns ``function(*constants, **tensors)``, a tuple of tensors. On CUDA the function is captured in a CUDA
        graph per shape, so it may read only its arguments and the module's weights. On a CPU the module's linear layers
        are replaced by ones that are faster for few rows.
        """
        return lambda function, tensors, *constants: function(*constants, **tensors)

    def _refused(self, action: str) -> ModelError:
        target = f"target '{self.target_name}'" if self.target_name else "this target"
        return ModelError(f"the drafter needs to {action}, which {target} does not support here; use another drafter")


class Drafter(ABC):
    """Base class of all drafters.

    Life of a slot: ``start`` with a prompt, then per step ``propose`` and ``observe``, then ``free``, all under
    `torch.inference_mode`.

    An instance created without a context, ``MyDrafter()``, can be passed to `crossdraft.generate` repeatedly and keeps
    its memory across runs; each run calls `attach` first.
    """

    name: ClassVar[str]
    Config: ClassVar[type[StrategyConfig]] = StrategyConfig
    #: Set by `attach`.
    context: DraftContext
    #: True if it was created for one context.
    bound: bool = True
    #: Token of the decoder that uses it, set by the decoder.
    claim: object = None

    def __init__(self, config: StrategyConfig | None = None, context: DraftContext | None = None):
        self.config = config if config is not None else self.Config()
        self.bound = context is not None
        if context is not None:
            self.attach(context)

    def attach(self, context: DraftContext) -> None:
        """Switch to ``context``: new slots, possibly of another target.

        Load models and allocate per-slot state here (or in ``__init__``, for drafters used only by class or name).
        Memory of earlier sequences may stay. The base class stores ``context``.
        """
        self.context = context

    @classmethod
    @abstractmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        """Return the traits of a drafter with this ``config`` for a target sampled with ``sampling``; load nothing."""

    @classmethod
    def wrapped(cls, config: Any) -> Sequence[type[Drafter]]:
        """Drafters that one with this ``config`` delegates to; their code is part of a result's digest."""
        return ()

    @classmethod
    def response_drafts(
        cls, config: Any, texts: Iterable[tuple[Sequence[int], Sequence[int]]], depth: int
    ) -> Iterator[np.ndarray] | None:
        """A fast path for `crossdraft replay`, for drafters of point-mass chains that need no model. Optional.

        Args:
            texts: prompt and response of each recorded text, as token ids, neither empty; read lazily.
            depth: maximum draft length, in place of the one in ``config``.

        Returns:
            for each text, in order, int64 ``[T, depth]``: row t is the draft of `propose` after the prompt and t tokens
            of the response, with all earlier steps observed, -1 past its end. None = not supported.
        """
        return None

    @classmethod
    def misconfigurations(cls, config: Any, heads: Checkpoint, target_model: Any) -> Iterable[Misconfiguration]:
        """Yield common mistakes with ``heads`` of this type, for `crossdraft diagnose` to test. Optional.

        Args:
            heads: result of `DraftContext.load_heads` for the ``model`` of ``config``.
            target_model: as in `DraftContext`.
        """
        return ()

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        """Start a sequence with ``prompt`` in slot ``row``; its last token is the first root.

        ``hidden``: ``[len(prompt) - 1, L, H]``, the target's hidden states of all prompt tokens but the last, if
        ``traits.hidden_layers`` is not empty.
        """

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Optional: feed the first tokens of prompts to the draft model before their slots `start`, see `Prefills`.

        Called after the target's prefill pass; ``start`` feeds the rest. Not called if a subclass overrides only
        ``start``. ``free`` is called for slots that are aborted before they start.
        """

    @abstractmethod
    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        """Return a draft for every slot, of depth at most ``sequences.limit[b]`` in row b, empty in free slots."""

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        """Called after a step: ``sequences`` include the emitted tokens, ``accepted[b]`` is tau."""

    def free(self, row: int, finish_reason: str | None = None) -> None:
        """Called when slot ``row`` is freed. ``finish_reason``: see `Response`; ``None`` = aborted."""

    def reset(self) -> None:
        """Clear memory of earlier sequences; called between the warm-up and the first measured prompt.

        Drafters with memory across sequences must define it; per-slot state is reset by ``start``.
        """

    @classmethod
    def remembers(cls, config: Any) -> bool:
        """Return True if drafts with this ``config`` depend on other sequences, earlier or concurrent ones.

        Default: True if the class defines `reset`.
        """
        return cls.reset is not Drafter.reset

    def text_distribution(self) -> TextDistribution | None:
        """The distribution of drafted tokens if it depends only on earlier tokens, else ``None``.

        Lets replay use this drafter's slots directly, without ``propose``.
        """
        return None

    @property
    def passes(self) -> int:
        """Forward passes of the draft model so far (0 for drafters without one)."""
        return 0
