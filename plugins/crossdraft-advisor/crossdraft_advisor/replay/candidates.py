"""Candidates of a replay, built from the options: drafters, verifiers and length policies."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from crossdraft import DraftTraits, Sampling, UsageError
from crossdraft.commands import permits
from crossdraft.framework.util.limits import MOST_LISTED
from crossdraft.models import Configured, configured
from crossdraft.runs import Strategy, counted

from ..limits import MOST_REPLAYED
from .replay import Candidate, verifiers_for
from .response import Response
from .step_chain import confident, heuristic, oracle
from .teacher_forcing import model_free
from .teacher_forcing.lazy_models import SharedPasses, Target
from .teacher_forcing.scoring import DraftScores, ScoringRequest, with_gamma

Stream = Callable[[Iterable[Response]], Iterator[DraftScores]]
INITIAL_LENGTH = 5  # initial draft length of the heuristic policy, as in the drafters


@dataclass(frozen=True)
class Policy:
    """A length policy: ``static``, ``oracle``, ``heuristic`` or ``confidence``, with its parameter."""

    name: str
    number: float = 0.0

    @property
    def title(self) -> str:
        return self.name if self.name in ("static", "oracle") else f"{self.name} {self.number:g}"


def policies_of(texts: Sequence[str]) -> list[Policy]:
    """Parse ``static``, ``oracle``, ``heuristic[:START]`` and ``confidence:T[,T]``. Raises UsageError."""
    parsed: list[Policy] = []
    for text in texts:
        name, colon, values = text.partition(":")
        option = f"--policy {text}"
        if name in ("static", "oracle") and not colon:
            parsed.append(Policy(name))
            continue
        if name not in ("heuristic", "confidence") or (name == "confidence" and not values):
            raise UsageError(f"{option} is not static, oracle, heuristic, heuristic:START or confidence:0.2,0.4")
        for value in (values or str(INITIAL_LENGTH)).split(","):
            try:
                number = float(value)
            except ValueError:
                raise UsageError(f"{option}: {value!r} is not a number") from None
            if name == "confidence" and not 0 < number < 1:
                raise UsageError(f"{option}: a threshold must be between 0 and 1")
            if name == "heuristic" and not (number == int(number) and 1 <= number <= MOST_REPLAYED):
                raise UsageError(f"{option}: START must be an integer from 1 to {int(MOST_REPLAYED)}")
            parsed.append(Policy(name, number))
    if reason := MOST_LISTED.violation(parsed):
        raise UsageError(f"--policy is given {len(parsed)} times; {reason}")
    return list(dict.fromkeys(parsed))


def candidates_of(
    drafters: Sequence[str],
    verifiers: Sequence[str],
    gammas: Sequence[int],
    *,
    ks: Sequence[int] = (),
    sampling: Sampling | None,
    target: str,
    policies: Sequence[str] = ("static",),
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: Collection[str] = (),
    drafter_options: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> list[Candidate]:
    """Build the candidates, in the order of the options; models are loaded when responses are replayed.

    ``sampling``: of the responses, None if unknown; ``target``: its name, empty if not required; ``drafter_options``:
    defaults of an engine by drafter. Raises UsageError for a drafter, verifier or policy that cannot be replayed.
    """
    if reason := MOST_LISTED.violation(drafters):
        raise UsageError(f"--drafter is given {len(drafters)} times; {reason}")
    parsed = policies_of(policies)
    tops = any(policy.name == "confidence" for policy in parsed)
    candidates: dict[str, Candidate] = {}
    shared: SharedPasses | None = None
    for text in drafters:
        strategy = Strategy.parse(text, "--drafter")
        title = strategy.title if strategy.title not in candidates else text
        if title in candidates:
            raise UsageError(f"--drafter {text} is given twice")
        options = drafter_options.get(strategy.name, {})
        cls, config = configured("drafters", {"name": strategy.name, **options, **strategy.config})
        lengths = (config.gamma,) if "gamma" in strategy.config else tuple(gammas)
        if max(lengths) > MOST_REPLAYED or min(lengths) < 1:
            raise UsageError(f"--drafter {text}: gamma must be from 1 to {int(MOST_REPLAYED)}")
        config = with_gamma(cls, config, max(lengths))
        params = sampling or Sampling()
        rules = verifiers_for(title, (cls, config), verifiers, ks or (getattr(config, "K", 1),), params)
        depth, explicit = cls.traits(config, params).depth, config.model_dump(exclude_unset=True)
        lengths = tuple(gamma for gamma in lengths if gamma <= depth and permits(cls.Config, explicit, gamma))
        if not lengths:
            raise UsageError(f"drafter '{title}' drafts at most {counted(depth, 'token')}; reduce --gamma")
        drafter: Configured = (cls, config)
        drawn: Stream | None = None
        scores_of: Callable[[], Stream]
        if free := model_free.is_model_free(cls, config, params):
            scored = partial(model_free.score_model_free, *drafter, depth=max(lengths), sampling=params)
            scores_of = lambda scored=scored: scored  # noqa: E731
        else:
            loading: dict[str, Any] = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
            if sampling is None:
                raise UsageError(
                    "the sampling parameters of the responses are unknown; set --temperature (and --top-k, --top-p, "
                    "--min-p)"
                )
            if not target:
                raise UsageError(f"drafter '{title}' requires --target MODEL, the target of the responses")
            shared = shared or SharedPasses(Target(target, sampling, **loading))
            sequences = max((k for values in rules.values() for k in values), default=1)
            index = shared.add(ScoringRequest(drafter, max(lengths), sequences if sequences > 1 else 0, tops))
            scores_of = partial(shared.scores, index)
            drawn = shared.samples(index)
        scores = _Scores(title, drafter, rules, lengths, params, free, scores_of, drawn)
        candidates |= {candidate.title: candidate for candidate in map(scores.candidate, parsed)}
    return list(candidates.values())


@dataclass(frozen=True)
class _Scores:
    """A drafter with its scores, before a length policy."""

    title: str
    drafter: Configured
    verifiers: dict[str, tuple[int, ...]]
    gammas: tuple[int, ...]
    sampling: Sampling
    free: bool  # see `is_model_free`
    scores: Callable[[], Stream]
    drawn: Stream | None  # the scores along drawn drafts, if a model is run

    def candidate(self, policy: Policy) -> Candidate:
        """The candidate with a length policy; if it is not static, at the greatest draft length only."""
        cls, config = self.drafter
        traits, drawn = cls.traits(config, self.sampling), self.drawn
        own = getattr(getattr(config, "policy", None), "name", "")
        build = partial(Candidate, drafter=self.drafter, verifiers=self.verifiers)
        if policy.name == "static":
            lengths = None
            if drawn is not None and traits.is_chain and not traits.replayable and own != "static":
                lengths = lambda texts: (draft.lengths for draft in drawn(texts))  # noqa: E731
            return build(self.title, gammas=self.gammas, scores=self.scores(), lengths=lengths)
        gamma = max(self.gammas)
        build = partial(build, f"{self.title}, {policy.title}", gammas=(gamma,))
        if policy.name == "oracle":
            return build(scores=self.scores(), steps=oracle)
        self._check(policy, own, traits)
        if policy.name == "heuristic":
            start = min(int(policy.number), gamma)
            return build(scores=self.scores(), steps=lambda scores, gammas: heuristic(scores, gammas[0], start))

        def confident_lengths(draft: DraftScores) -> np.ndarray:
            assert draft.log_top is not None
            return np.minimum(
                draft.lengths, confident(draft.log_top if traits.point_mass else draft.log_q, policy.number)
            )

        def cut(texts: Iterable[Response]) -> Iterator[DraftScores]:
            return (replace(draft, lengths=confident_lengths(draft)) for draft in scored(texts))

        def free(texts: Iterable[Response]) -> Iterator[Any]:
            assert drawn is not None
            return map(confident_lengths, drawn(texts))

        scored = self.scores()
        return build(scores=cut, lengths=free)

    def _check(self, policy: Policy, own: str, traits: DraftTraits) -> None:
        """Raise UsageError for a policy that does not apply; ``own``: that of the drafter's options."""
        drafter = f"--policy {policy.name}: drafter '{self.title}'"
        if own not in ("", "static"):
            raise UsageError(f"{drafter} has its own length policy {own}; remove one of them")
        if any(k > 1 for ks in self.verifiers.values() for k in ks):
            raise UsageError(f"{drafter} drafts several sequences of equal length; remove the policy")
        if policy.name == "confidence" and (self.free or (traits.hidden_layers and traits.point_mass)):
            raise UsageError(f"{drafter} has no token probabilities in a replay; remove the policy")
