"""Construction of decoders, for `generate`, the bench, training, the certificate and studies.

A `DraftContext` provides what a drafter may request; `TargetContext` is the one of a loaded target. `build_decoder`
combines the drafter, the target's slots and the verifier.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from ..contracts.constraint import Grammar
from ..contracts.draft_kind import (
    CHAIN,
    CONDITIONAL_SIBLINGS,
    DELAYED_SEQUENCES,
    INDEPENDENT_SEQUENCES,
    ONE_SAMPLED_SIBLING,
    POINT_MASSES,
    SINGLE_CHILD,
)
from ..contracts.drafter import DraftContext, Drafter, Learner, Runner, settings_file
from ..contracts.lm import LM
from ..contracts.models import TRANSFORMERS, Checkpoint, LoadedModel
from ..contracts.options import fault
from ..contracts.sampling import Sampling
from ..contracts.verifier import Verifier, incompatible
from ..engine.constrained_lm import masked
from ..engine.constraints import Constraints
from ..engine.decoder import Decoder
from ..errors import CrossdraftError, ModelError, UsageError
from ..lm.cuda_graphs import runner_for
from ..lm.forward_pass import each_preparation
from ..lm.tables import Tables
from ..lm.trainable_lm import learner_of, trainable_copy
from ..lm.transformers_lm import TransformersLM
from ..lm.vocab_adapter import adapt_vocab
from ..models.checkpoint import load_checkpoint
from ..models.digests import file_sha256
from ..models.load import load_model, same_tokenizer
from ..models.placement import input_device, is_spread, split_of
from ..models.resolve import resolve
from ..models.shared_embedding import shares_embedding
from ..plugins import entries, get, guarded, traits_of
from ..recipe.recipe import Strategy

#: A drafter's or verifier's class (or an instance of the user) and its validated config.
Configured = tuple[Any, Any]
#: A drafter or verifier: its name, a mapping with ``name`` and the keys of its Config, a strategy of a recipe, its
#: class, an instance, or class and config.
StrategyLike = str | Mapping[str, Any] | Strategy | type[Any] | Drafter | Verifier | Configured

#: The verifier that ``docs/verifiers.md`` advises for each kind of draft; all of them are lossless.
DEFAULT_VERIFIERS = {
    SINGLE_CHILD: "block",
    INDEPENDENT_SEQUENCES: "spectr",
    DELAYED_SEQUENCES: "traversal",
    ONE_SAMPLED_SIBLING: "greedy-draft-optimal",
    POINT_MASSES: "sample-match",
    CONDITIONAL_SIBLINGS: "traversal",
}


def configured(kind: str, strategy: StrategyLike) -> Configured:
    """The class (or the given instance) and validated config of a drafter or verifier.

    Args:
        kind: "drafters" or "verifiers".

    Raises:
        UnknownNameError, ContractError: the name is unknown, or its plug-in cannot be used.
        UsageError: a key of the config is wrong, or the instance cannot be used again.
    """
    noun, base = kind[:-1], Drafter if kind == "drafters" else Verifier
    cls: Any
    cls, config = strategy if isinstance(strategy, tuple) and len(strategy) == 2 else (strategy, None)
    if isinstance(cls, base):
        _check_instance(noun, cls, config)
        return cls, cls.config
    options: dict[str, Any] = {}
    if isinstance(strategy, Strategy):
        strategy = {**strategy.config, "name": strategy.name}
    if isinstance(cls, type) and issubclass(cls, base) and not cls.__abstractmethods__:
        if cls is not strategy:
            if not isinstance(config, cls.Config):
                raise UsageError(f"the config of {noun} '{cls.name}' is {config!r}, not a {cls.__name__}.Config")
            return cls, config
    elif isinstance(strategy, str | Mapping):
        options = {"name": strategy} if isinstance(strategy, str) else {str(k): v for k, v in strategy.items()}
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise UsageError(f"a {noun} needs a 'name', got {strategy!r}")
        cls = get(kind, name)
    else:
        raise UsageError(
            f"a {noun} is given by its name, by a mapping with 'name' and its options, or by its class or an instance "
            f"of it (a subclass of crossdraft.{base.__name__}); got {strategy!r}"
        )
    try:
        with guarded(kind, cls.name, "its Config", passing=(CrossdraftError, ValidationError)):
            return cls, cls.Config(**options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{noun} '{cls.name}', key '{key}': {fault(first)}; "
            f"its keys are {', '.join(cls.Config.model_fields) or 'none'}"
        ) from None


def _check_instance(noun: str, strategy: Drafter | Verifier, config: Any) -> None:
    """Raise UsageError for an instance with a second config, or one that belongs to another context."""
    name = type(strategy).__name__
    if config is not None and config is not strategy.config:
        raise UsageError(f"this {name} already has a config; pass only the instance, or the class {name} and a config")
    if not isinstance(strategy.config, strategy.Config):
        raise UsageError(f"the config of {noun} '{strategy.name}' is {strategy.config!r}, not a {name}.Config")
    if isinstance(strategy, Drafter) and strategy.bound and type(strategy).attach is Drafter.attach:
        raise UsageError(
            f"this {name} was made for one context and cannot draft in another; pass its class or its name, make it "
            f"without a context, or define {name}.attach"
        )


def find_drafter(strategy: StrategyLike) -> Configured:
    """The class and config of a drafter, for drafters that combine others and create them with their own context."""
    return configured("drafters", strategy)


def make_verifier(strategy: StrategyLike) -> Verifier:
    """Create a verifier, also for verifiers that wrap another one."""
    return _instance(configured("verifiers", strategy))


def _instance(verifier: Configured) -> Verifier:
    return verifier[0] if isinstance(verifier[0], Verifier) else verifier[0](verifier[1])


def check_pair(drafter: Configured, verifier: Configured, sampling: Sampling) -> None:
    """Raise UsageError if drafter and verifier are incompatible, with the reason and the compatible verifiers."""
    if reason := _incompatible(drafter, verifier, sampling):
        names = ", ".join(compatible_verifiers(drafter, sampling))
        raise UsageError(f"{reason}; compatible verifiers: {names}" if names else reason)


def default_verifier(drafter: Configured, sampling: Sampling) -> Configured:
    """The verifier for a drafter by default: ``greedy`` at temperature 0, else the one of `DEFAULT_VERIFIERS`."""
    kind = traits_of("drafters", *drafter, sampling).kind or CHAIN
    best = next((name for capability, name in DEFAULT_VERIFIERS.items() if capability in kind.capabilities), None)
    if best is None:
        raise UsageError(f"drafter '{drafter[0].name}' makes drafts of the kind '{kind}'; name the verifier for them")
    return configured("verifiers", "greedy" if sampling.temperature == 0 else best)


def compatible_verifiers(drafter: Configured, sampling: Sampling) -> list[str]:
    """Names of the installed lossless verifiers that accept the drafts of ``drafter`` with their default options."""
    names = []
    for name in entries("verifiers"):
        try:
            verifier = configured("verifiers", name)
            lossless = traits_of("verifiers", *verifier).lossless
            if lossless and _incompatible(drafter, verifier, sampling) is None:
                names.append(name)
        except CrossdraftError:  # it does not load, or needs options
            continue
    return names


def _incompatible(drafter: Configured, verifier: Configured, sampling: Sampling) -> str | None:
    draft, accepted = traits_of("drafters", *drafter, sampling), traits_of("verifiers", *verifier)
    return incompatible(drafter[0].name, draft, verifier[0].name, accepted, sampling)


def slot_length(sequence: int, drafters: Iterable[Configured], sampling: Sampling) -> int:
    """Length of a slot in tokens: the longest ``sequence``, a root, and the widest draft of any of ``drafters``."""
    return sequence + 1 + max(traits_of("drafters", *drafter, sampling).nodes for drafter in drafters)


def make_slots(loaded: LoadedModel, batch_size: int, max_length: int) -> LM:
    """Create slots of a loaded model with its backend."""
    return get("backends", loaded.backend)().slots(loaded, batch_size, max_length)


def load_draft_model(name: str, target: LoadedModel, *, trust_remote_code: bool = False) -> LoadedModel:
    """Load a draft model on the device and in the dtype of ``target``, with its embedding if the model has none.

    If one of the two has another backend, that backend decides.
    """
    both_transformers = target.backend == TRANSFORMERS == resolve(name).backend
    placement = {"dtype": target.model.dtype, "device": input_device(target.model)} if both_transformers else {}
    share_with = (
        replace(target, model=_readable_target(target))
        if both_transformers and shares_embedding(name, target)
        else None
    )
    return load_model(name, share_with=share_with, trust_remote_code=trust_remote_code, **placement)


@dataclass
class ModuleContext(DraftContext):
    """Slots and graph runners for modules that a drafter brings."""

    def slots(self, module: nn.Module, *, extra_tokens: int = 0) -> LM:
        return TransformersLM(module, self.batch_size, self.max_length + extra_tokens)

    def runner(self, module: nn.Module) -> Runner:
        list(each_preparation("prepare_head", module))
        return self.once((runner_for, module), lambda: runner_for(module))


@dataclass
class TargetContext(ModuleContext):
    """The context of a drafter for a loaded target.

    Attributes:
        loaded: the target.
        sequence: longest sequence of prompt and output, in tokens; the context of a draft model must not be shorter.
        load: loads draft models; the bench caches them.
        heads: loads draft heads.
        used: digest and source of every model that the drafter loaded, by name, and ``heads`` if it is heads.
    """

    loaded: LoadedModel = field(kw_only=True)
    sequence: int = field(kw_only=True)
    load: Callable[[str, LoadedModel], LoadedModel] = field(kw_only=True, default=load_draft_model)
    heads: Callable[[str], Checkpoint] = field(kw_only=True, default=load_checkpoint)
    used: dict[str, dict[str, Any]] = field(kw_only=True, default_factory=dict)

    @classmethod
    def of(cls, loaded: LoadedModel, lm: LM, sampling: Sampling, *, slot: int, **more: Any) -> TargetContext:
        """The context of a loaded target and its slots, each ``slot`` tokens long."""
        return cls(
            sampling=sampling,
            batch_size=lm.batch_size,
            max_length=slot,
            vocab_size=lm.vocab_size,
            device=lm.device,
            target=lm,
            target_model=_readable_target(loaded),
            target_name=loaded.name,
            target_sha256=loaded.sha256,
            tokenizer=loaded.tokenizer,
            loaded=loaded,
            **more,
        )

    def load_model(self, name: str) -> LoadedModel:
        loaded = self.load(name, self.loaded)
        self.used[name] = {"sha256": loaded.sha256, "source": loaded.source}
        return loaded

    def load_lm(self, name: str, *, extra_tokens: int = 0, ids: Tensor | None = None, unknown: int = 0) -> LM:
        loaded = self._checked_model(name, ids is None)
        lm = make_slots(loaded, self.batch_size, self.max_length + extra_tokens)
        return masked(adapt_vocab(lm, self.vocab_size, ids, unknown), self.constraints, self.mask_drafts)

    def load_learner(self, name: str) -> Learner:
        loaded = self._checked_model(name)
        copied = self.once((trainable_copy, loaded.model), lambda: trainable_copy(loaded))
        return learner_of(copied, self.batch_size, self.max_length, self.vocab_size)

    def _checked_model(self, name: str, needs_same_tokenizer: bool = True) -> LoadedModel:
        """Load a draft model; ModelError if its tokenizer or its context length does not fit."""
        loaded = self.load_model(name)
        if needs_same_tokenizer and (difference := self._tokenizer_mismatch(loaded.tokenizer)):
            raise ModelError(f"'{name}' cannot draft for '{self.target_name}': {difference}")
        if loaded.context_length is not None and loaded.context_length < self.sequence:
            raise ModelError(
                f"'{name}' has a context of {loaded.context_length} tokens, but sequences reach {self.sequence} here; "
                "shorten the prompts or max_new_tokens, or use another draft model"
            )
        return loaded

    def _tokenizer_mismatch(self, tokenizer: Any) -> str | None:
        """The reason why a draft model's tokenizer does not fit, or None."""
        if self.tokenizer is None:
            return "the target's tokenizer is not known"
        return same_tokenizer(self.tokenizer, tokenizer)

    def load_heads(self, name: str) -> Checkpoint:
        checkpoint = self.heads(name)
        self.used[name] = {"sha256": checkpoint.sha256, "source": checkpoint.source, "heads": True}
        return checkpoint

    def load_settings(self, name: str) -> dict[str, Any]:
        settings, file = super().load_settings(name), settings_file(name).resolve()
        self.used[name] = {"sha256": file_sha256(file), "source": f"file {file}", "file": str(file)}
        return settings


def _readable_target(loaded: LoadedModel) -> Any:
    """The target's module as drafters may read it: `Tables` if it is on several devices, None for other backends."""
    if loaded.backend != TRANSFORMERS:
        return None
    if split := split_of(loaded.model):
        return split.tables(loaded.model)
    return Tables(loaded.model) if is_spread(loaded.model) else loaded.model


def build_decoder(
    context: DraftContext,
    drafter: Configured | Callable[[DraftContext], Drafter],
    verifier: Configured | Verifier,
    *,
    constraint: Grammar | None = None,
    mask_drafts: bool = False,
    **options: Any,
) -> Decoder:
    """A decoder for a pair, over the slots of ``context.target``.

    Args:
        drafter: its class (or an instance) and config, or a function that makes it.
        verifier: its class (or an instance) and config, or the verifier itself.
        constraint: see `Decoder`.
        mask_drafts: draft models are masked for requests whose constraint has ``mask_drafts``.
        options: further keywords of `Decoder`.

    Raises:
        UsageError: the pair is incompatible; only classes and configs are checked.
        ModelError: a model or heads that the drafter requests cannot be used.
    """
    if not callable(drafter) and not isinstance(verifier, Verifier):
        check_pair(drafter, verifier, context.sampling)
    instance = verifier if isinstance(verifier, Verifier) else _instance(verifier)
    assert context.target is not None
    context.constraints = constraints = Constraints(context.target.vocab_size)
    context.mask_drafts = mask_drafts or (constraint is not None and constraint.mask_drafts)
    context.final_q = instance.traits(instance.config).modifies_target
    if callable(drafter):
        drafting = drafter(context)
    elif isinstance(drafter[0], Drafter):
        drafting = drafter[0]
        drafting.attach(context)
    else:
        drafting = drafter[0](drafter[1], context)
    return Decoder(
        context.target,
        drafting,
        instance,
        sampling=context.sampling,
        constraint=constraint,
        constraints=constraints,
        **options,
    )
