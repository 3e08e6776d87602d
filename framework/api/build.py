"""The one place that builds a decoder, for `generate`, the bench, training, the certificate and studies alike.

A `DraftContext` says what the drafter may ask for; `TargetContext` is that of a loaded target. `build_decoder` puts the
drafter that is made with it, the target's slots and the verifier together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError
from torch import Tensor, nn

from ..contracts.draft_kind import (
    CHAIN,
    CONDITIONAL_SIBLINGS,
    INDEPENDENT_SEQUENCES,
    ONE_SAMPLED_SIBLING,
    POINT_MASSES,
    SINGLE_CHILD,
)
from ..contracts.drafter import DraftContext, Drafter, Learner, Runner, settings_file
from ..contracts.lm import LM
from ..contracts.models import TRANSFORMERS, Checkpoint, LoadedModel
from ..contracts.options import fault
from ..contracts.rng import CounterRng, RngSource
from ..contracts.sampling import Sampling
from ..contracts.steps import StepEvent
from ..contracts.verifier import Verifier, incompatible
from ..engine.decoder import Decoder
from ..engine.logits_processors import LogitsProcessors
from ..engine.stopwatch import Stopwatch
from ..errors import CrossdraftError, ModelError, UsageError
from ..lm.cuda_graphs import runner_for
from ..lm.small_batch_linear import speed_up_small_batches
from ..lm.tensor_parallel_lm import Tables
from ..lm.trainable_lm import learner_of
from ..lm.transformers_lm import TransformersLM
from ..lm.vocab_adapter import fitted
from ..models.checkpoint import load_checkpoint
from ..models.digests import file_sha256
from ..models.load import load_model, same_tokenizer
from ..models.placement import input_device, is_split, is_spread
from ..models.resolve import resolve
from ..models.shared_embedding import shares_embedding
from ..plugins import entries, get, guarded, traits_of
from ..util.limits import PREFILL_TOKENS

#: The class of a drafter or verifier and its validated config; or an instance, which its user holds, and its config.
Configured = tuple[Any, Any]
#: A drafter or verifier: its name, a mapping with ``name`` and the keys of its Config, its class, an instance, or class
#: and config.
StrategyLike = str | Mapping[str, Any] | type[Any] | Drafter | Verifier | Configured

#: The rule for each kind of draft that ``docs/verifiers.md`` advises; all of them are lossless.
BEST_RULE = {
    SINGLE_CHILD: "block",
    INDEPENDENT_SEQUENCES: "spectr",
    ONE_SAMPLED_SIBLING: "greedy-draft-optimal",
    POINT_MASSES: "sample-match",
    CONDITIONAL_SIBLINGS: "traversal",
}


def configured(kind: str, strategy: StrategyLike) -> Configured:
    """The class (or the instance that was given) and validated config of a drafter or verifier.

    Args:
        kind: "drafters" or "verifiers".

    Raises:
        UnknownNameError, ContractError: a name that nobody provides, or a plug-in's that cannot be used.
        UsageError: names the key that does not fit; or an instance that cannot be used again.
    """
    one, base = kind[:-1], Drafter if kind == "drafters" else Verifier
    cls: Any
    pair: Any = strategy if isinstance(strategy, tuple) and len(strategy) == 2 else (strategy, None)
    if isinstance(pair[0], base):
        _check_instance(one, *pair)
        return pair[0], pair[0].config
    if pair is strategy and _is_a(base, pair[0]):
        cls, config = pair
        if not isinstance(config, cls.Config):
            raise UsageError(f"the config of {one} '{cls.name}' is {config!r}, not a {cls.__name__}.Config")
        return cls, config
    if _is_a(base, strategy):
        cls, options = strategy, {}
    elif isinstance(strategy, str | Mapping):
        options = {"name": strategy} if isinstance(strategy, str) else {str(k): v for k, v in strategy.items()}
        name = options.pop("name", None)
        if not isinstance(name, str):
            raise UsageError(f"a {one} needs a 'name', got {strategy!r}")
        cls = get(kind, name)
    else:
        raise UsageError(
            f"a {one} is given by its name, by a mapping with 'name' and its options, or by its class or an instance "
            f"of it (a subclass of crossdraft.{base.__name__}); got {strategy!r}"
        )
    try:
        with guarded(kind, cls.name, "its Config", passing=(CrossdraftError, ValidationError)):
            return cls, cls.Config(**options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise UsageError(
            f"{one} '{cls.name}', key '{key}': {fault(first)}; "
            f"its keys are {', '.join(cls.Config.model_fields) or 'none'}"
        ) from None


def _is_a(base: type[Any], strategy: Any) -> bool:
    return isinstance(strategy, type) and issubclass(strategy, base) and not strategy.__abstractmethods__


def _check_instance(one: str, strategy: Drafter | Verifier, config: Any) -> None:
    """Refuse an instance with a config beside its own, or with the slots and models of another context."""
    name = type(strategy).__name__
    if config is not None and config is not strategy.config:
        raise UsageError(f"this {name} has a config already; give the instance alone, or the class {name} and a config")
    if not isinstance(strategy.config, strategy.Config):
        raise UsageError(f"the config of {one} '{strategy.name}' is {strategy.config!r}, not a {name}.Config")
    if isinstance(strategy, Drafter) and strategy.bound and type(strategy).attach is Drafter.attach:
        raise UsageError(
            f"this {name} was made for one context and cannot draft in another; give its class or its name, make it "
            f"without a context, or define {name}.attach"
        )


def find_drafter(strategy: StrategyLike) -> Configured:
    """The class and the config of a drafter by name, or by a mapping with ``name`` and its options.

    For drafters that combine others: they make them with their own context.
    """
    return configured("drafters", strategy)


def make_verifier(strategy: StrategyLike) -> Verifier:
    """A verifier by name, or by a mapping with ``name`` and its options; for rules that wrap another one, too."""
    return _made(configured("verifiers", strategy))


def _made(rule: Configured) -> Verifier:
    return rule[0] if isinstance(rule[0], Verifier) else rule[0](rule[1])


def check_pair(drafter: Configured, verifier: Configured, sampling: Sampling) -> None:
    """Raise UsageError for a drafter and a verifier that cannot run together at these parameters.

    It says why, and which rules fit the drafter.
    """
    if reason := _misfit(drafter, verifier, sampling):
        rules = ", ".join(fitting_rules(drafter, sampling))
        raise UsageError(f"{reason}; rules that fit here: {rules}" if rules else reason)


def default_rule(drafter: Configured, sampling: Sampling) -> Configured:
    """The verifier for a drafter where none is named: ``greedy`` at temperature 0, else that of `BEST_RULE`."""
    kind = traits_of("drafters", *drafter, sampling).kind or CHAIN
    best = next((name for capability, name in BEST_RULE.items() if capability in kind.capabilities), None)
    if best is None:
        raise UsageError(f"drafter '{drafter[0].name}' makes drafts of the kind '{kind}'; name the verifier for them")
    return configured("verifiers", "greedy" if sampling.temperature == 0 else best)


def fitting_rules(drafter: Configured, sampling: Sampling) -> list[str]:
    """The installed lossless rules that can judge the drafts of ``drafter``, by name, with their default options."""
    found = []
    for name in entries("verifiers"):
        try:
            rule = configured("verifiers", name)
            fits = traits_of("verifiers", *rule).lossless and _misfit(drafter, rule, sampling) is None
        except CrossdraftError:  # one that does not load, or needs options
            continue
        if fits:
            found.append(name)
    return found


def _misfit(drafter: Configured, verifier: Configured, sampling: Sampling) -> str | None:
    draft, promise = traits_of("drafters", *drafter, sampling), traits_of("verifiers", *verifier)
    return incompatible(drafter[0].name, draft, verifier[0].name, promise, sampling)


def slot_length(sequence: int, drafters: Iterable[Configured], sampling: Sampling) -> int:
    """Tokens that a slot has to hold: the longest ``sequence``, a root, and the widest draft of any of ``drafters``."""
    return sequence + 1 + max(traits_of("drafters", *drafter, sampling).nodes for drafter in drafters)


def make_slots(loaded: LoadedModel, batch_size: int, max_length: int) -> LM:
    """Slots of a loaded model, made by its backend."""
    return get("backends", loaded.backend)().slots(loaded, batch_size, max_length)


def load_drafting_model(name: str, target: LoadedModel, *, trust_remote_code: bool = False) -> LoadedModel:
    """A model that is to draft for ``target``: on its device, in its dtype, with its embedding if that is left out.

    Where one of the two is of another backend, that one decides on its own.
    """
    alike = target.backend == TRANSFORMERS == resolve(name).backend
    same = {"dtype": target.model.dtype, "device": input_device(target.model)} if alike else {}
    share_with = replace(target, model=_readable(target)) if alike and shares_embedding(name, target) else None
    return load_model(name, share_with=share_with, trust_remote_code=trust_remote_code, **same)


@dataclass
class ModuleContext(DraftContext):
    """What a drafter may have for modules of its own, wherever the rest comes from."""

    def slots(self, module: nn.Module, *, room: int = 0) -> LM:
        return TransformersLM(module, self.batch_size, self.max_length + room)

    def runner(self, module: nn.Module) -> Runner:
        speed_up_small_batches(module)
        return runner_for(module)


@dataclass
class TargetContext(ModuleContext):
    """What a drafter may ask for where the target is a loaded model.

    Attributes:
        loaded: the target.
        sequence: longest sequence of prompt and output, in tokens; a draft model must reach as far.
        load: how draft models are loaded, `load_drafting_model` by default; the bench keeps them. ``heads``: how
            heads are.
        used: every model that the drafter asked for: digest, source, and whether it is heads, by name.
    """

    loaded: LoadedModel = field(kw_only=True)
    sequence: int = field(kw_only=True)
    load: Callable[[str, LoadedModel], LoadedModel] = field(kw_only=True, default=load_drafting_model)
    heads: Callable[[str], Checkpoint] = field(kw_only=True, default=load_checkpoint)
    used: dict[str, dict[str, Any]] = field(kw_only=True, default_factory=dict)

    @classmethod
    def of(cls, loaded: LoadedModel, lm: LM, sampling: Sampling, *, slot: int, **more: Any) -> TargetContext:
        """That of a loaded target and its slots, each ``slot`` tokens long."""
        return cls(
            sampling=sampling,
            batch_size=lm.batch_size,
            max_length=slot,
            vocab_size=lm.vocab_size,
            device=lm.device,
            target=lm,
            target_model=_readable(loaded),
            target_name=loaded.name,
            target_sha256=loaded.sha256,
            tokenizer=loaded.tokenizer,
            loaded=loaded,
            **more,
        )

    def load_model(self, name: str) -> LoadedModel:
        found = self.load(name, self.loaded)
        self.used[name] = {"sha256": found.sha256, "source": found.source}
        return found

    def load_lm(self, name: str, *, room: int = 0, ids: Tensor | None = None, unknown: int = 0) -> LM:
        found = self._reaching(name, ids is None)
        return fitted(make_slots(found, self.batch_size, self.max_length + room), self.vocab_size, ids, unknown)

    def load_learner(self, name: str) -> Learner:
        return learner_of(self._reaching(name), self.batch_size, self.max_length, self.vocab_size)

    def _reaching(self, name: str, same_tokenizer: bool = True) -> LoadedModel:
        """A draft model that speaks the target's tokens, if it has to, and reaches as far as the sequences."""
        found = self.load_model(name)
        if same_tokenizer and (difference := self._other_tokenizer(found.tokenizer)):
            raise ModelError(f"'{name}' cannot draft for '{self.target_name}': {difference}")
        if found.context_length is not None and found.context_length < self.sequence:
            raise ModelError(
                f"'{name}' has a context of {found.context_length} tokens, but sequences reach {self.sequence} here; "
                "shorten the prompts or max_new_tokens, or take another draft model"
            )
        return found

    def _other_tokenizer(self, tokenizer: Any) -> str | None:
        """Why a draft model's tokenizer will not do, or None."""
        if self.tokenizer is None:
            return "the target's tokenizer is not known"
        return same_tokenizer(self.tokenizer, tokenizer)

    def load_heads(self, name: str) -> Checkpoint:
        found = self.heads(name)
        self.used[name] = {"sha256": found.sha256, "source": found.source, "heads": True}
        return found

    def load_settings(self, name: str) -> dict[str, Any]:
        found, file = super().load_settings(name), settings_file(name).resolve()
        self.used[name] = {"sha256": file_sha256(file), "source": f"file {file}", "file": str(file)}
        return found


def _readable(loaded: LoadedModel) -> Any:
    """What drafters may read of a target: the model, if it is one of transformers, or what a larger one offers."""
    if loaded.backend != TRANSFORMERS:
        return None
    larger = is_split(loaded.model) or is_spread(loaded.model)
    return Tables(loaded.model) if larger else loaded.model


def _drafting(drafter: Configured, context: DraftContext) -> Drafter:
    """A new drafter of a class, or the instance that was given."""
    if isinstance(drafter[0], Drafter):
        drafter[0].attach(context)
        return drafter[0]
    return drafter[0](drafter[1], context)


def build_decoder(
    context: DraftContext,
    drafter: Configured | Callable[[DraftContext], Drafter],
    verifier: Configured | Verifier,
    *,
    eos: Iterable[int] = (),
    max_new_tokens: int = 128,
    rng: RngSource | None = None,
    stopwatch: Stopwatch | None = None,
    on_step: Callable[[StepEvent], None] | None = None,
    compile_verifier: bool = False,
    processors: LogitsProcessors | None = None,
    validate: str = "sampled",
    prefill_tokens: int = PREFILL_TOKENS,
) -> Decoder:
    """A decoder for a pair, over the slots of ``context.target``.

    Args:
        drafter: its class (or an instance) and config, or what makes it.
        verifier: its class (or an instance) and config, or the verifier itself.
        compile_verifier: run the verify step as compiled code, see `CompiledVerifier`, if the rule can be compiled.
        eos, max_new_tokens, rng, stopwatch, on_step, processors, validate, prefill_tokens: see `Decoder`.

    Raises:
        UsageError: a pair that is incompatible (says why); only classes and configs are checked.
        ModelError: a model or heads that the drafter asks for and cannot have.
    """
    if not callable(drafter) and not isinstance(verifier, Verifier):
        check_pair(drafter, verifier, context.sampling)
    rule = verifier if isinstance(verifier, Verifier) else _made(verifier)
    assert context.target is not None
    context.final_q = rule.traits(rule.config).modifies_target
    return Decoder(
        context.target,
        drafter(context) if callable(drafter) else _drafting(drafter, context),
        rule,
        sampling=context.sampling,
        eos=eos,
        max_new_tokens=max_new_tokens,
        rng=rng if rng is not None else CounterRng(0),
        stopwatch=stopwatch,
        on_step=on_step,
        compile_verifier=compile_verifier,
        processors=processors,
        validate=validate,
        prefill_tokens=prefill_tokens,
    )
