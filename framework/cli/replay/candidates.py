"""Drafters, rules and length policies as options name them, made into what `replay` takes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ...contracts.sampling import Sampling
from ...errors import UsageError
from ...util.limits import MOST_LISTED, MOST_REPLAYED

if TYPE_CHECKING:
    import numpy as np

    from ...api.build import Configured
    from ...replay.replay import Candidate
    from ...replay.response import Response
    from ...replay.teacher_forcing.draft_scores import DraftScores
    from ...replay.teacher_forcing.draft_traces import DraftTrace
    from ...replay.teacher_forcing.lazy_models import Target

#: The heuristic policy's first length, as the drafters have it.
START = 5


@dataclass(frozen=True)
class Policy:
    """How long drafts are: ``static``, ``oracle``, ``heuristic`` or ``confidence``, with its number."""

    name: str
    number: float = 0.0

    @property
    def title(self) -> str:
        return self.name if self.name in ("static", "oracle") else f"{self.name} {self.number:g}"


def policies_of(texts: Sequence[str]) -> list[Policy]:
    """``static``, ``oracle``, ``heuristic[:START]``, ``confidence:T[,T]``. Raises UsageError for anything else."""
    found: list[Policy] = []
    for text in texts:
        name, colon, values = text.partition(":")
        where = f"--policy {text}"
        if name in ("static", "oracle") and not colon:
            found.append(Policy(name))
            continue
        if name not in ("heuristic", "confidence") or (name == "confidence" and not values):
            raise UsageError(f"{where}: write static, oracle, heuristic, heuristic:START or confidence:0.2,0.4")
        for value in (values or str(START)).split(","):
            try:
                number = float(value)
            except ValueError:
                raise UsageError(f"{where}: {value!r} is no number") from None
            if name == "confidence" and not 0 < number < 1:
                raise UsageError(f"{where}: a threshold lies between 0 and 1")
            if name == "heuristic" and not (number == int(number) and 1 <= number <= MOST_REPLAYED):
                raise UsageError(f"{where}: a first length is a whole number from 1 to {int(MOST_REPLAYED)}")
            found.append(Policy(name, number))
    if reason := MOST_LISTED.refusal(found):
        raise UsageError(f"--policy: {len(found)} of them; {reason}")
    return list(dict.fromkeys(found))


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
) -> list[Candidate]:
    """What to replay, in the order in which it was asked for; nothing is loaded before responses are replayed.

    Args:
        drafters: names, or mappings as in recipes.
        sampling: of the responses; None = not known, which drafters with a model cannot do without.
        target: its name; empty if nothing needs it.
        dtype, device, trust_remote_code: see `Target`.

    Raises:
        UsageError: a drafter, rule or policy that cannot be replayed.
    """
    from ...api.build import configured
    from ...recipe.recipe import Strategy
    from ...replay.replay import Candidate, verifiers_for
    from ...replay.teacher_forcing import model_free
    from ...replay.teacher_forcing.scoring import ScoringRequest, with_gamma
    from ...replay.teacher_forcing.shared_passes import SharedPasses

    if reason := MOST_LISTED.refusal(drafters):
        raise UsageError(f"--drafter: {len(drafters)} of them; {reason}")
    wanted = policies_of(policies)
    tops = any(policy.name == "confidence" for policy in wanted)
    found: dict[str, Candidate] = {}
    beside: SharedPasses | None = None
    for text in drafters:
        strategy = Strategy.parse(text, "--drafter")
        title = strategy.title if strategy.title not in found else text
        if title in found:
            raise UsageError(f"--drafter {text} is given twice")
        cls, config = configured("drafters", {"name": strategy.name, **strategy.config})
        chosen = (config.gamma,) if "gamma" in strategy.config else tuple(gammas)
        if max(chosen) > MOST_REPLAYED or min(chosen) < 1:
            raise UsageError(f"--drafter {text}: gamma must be from 1 to {int(MOST_REPLAYED)}")
        config = with_gamma(cls, config, max(chosen))
        law = sampling or Sampling()
        verifiers_of = verifiers_for(title, (cls, config), verifiers, ks or (getattr(config, "K", 1),), law)
        depth = cls.traits(config, law).depth
        if not (chosen := tuple(gamma for gamma in chosen if gamma <= depth)):
            raise UsageError(f"drafter '{title}' drafts at most {depth} tokens; ask for a --gamma up to that")
        drafter: Configured = (cls, config)
        drawn: Callable[[Iterable[Response]], Iterator[DraftTrace]] | None = None
        forced: Callable[[], Callable[[Iterable[Response]], Iterator[DraftScores]]]
        if free := model_free.is_model_free(cls, config, law):
            forced = partial(_without_model, drafter, max(chosen), law)
        else:
            made_of = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
            beside = beside or SharedPasses(_target(title, target, sampling, made_of))
            several = max((k for each in verifiers_of.values() for k in each), default=1)
            one = beside.add(ScoringRequest(drafter, max(chosen), several if several > 1 else 0, tops))
            forced = partial(beside.scores, one)
            drawn = beside.samples(one)
        made = partial(Candidate, drafter=drafter, verifiers=verifiers_of)
        for policy in wanted:
            name = title if policy.name == "static" else f"{title}, {policy.title}"
            if policy.name in ("confidence", "heuristic"):
                _check_policy(policy, title, drafter, law, free, verifiers_of)
            if policy.name == "static":
                by_draw = drawn if drawn is not None and _length_is_drawn(drafter, law) else None
                lengths = None if by_draw is None else partial(_lengths, by_draw)
                found[name] = made(name, gammas=chosen, scores=forced(), lengths=lengths)
            else:
                found[name] = _under(policy, made, name, max(chosen), forced(), drawn, drafter, law)
    return list(found.values())


def _under(
    policy: Policy,
    made: Callable[..., Candidate],
    name: str,
    gamma: int,
    forced: Callable[[Iterable[Response]], Iterator[DraftScores]],
    drawn: Callable[[Iterable[Response]], Iterator[DraftTrace]] | None,
    drafter: Configured,
    law: Sampling,
) -> Candidate:
    """The candidate of a policy, at its longest draft alone."""
    from ...replay.length_policies import confident, heuristic, oracle

    if policy.name == "oracle":
        return made(name, gammas=(gamma,), scores=forced, steps=oracle)
    if policy.name == "heuristic":
        start = min(int(policy.number), gamma)
        return made(
            name, gammas=(gamma,), scores=forced, steps=lambda given, gammas: heuristic(given, gammas[0], start)
        )
    point_mass = drafter[0].traits(drafter[1], law).point_mass

    def lengths(one: DraftScores | DraftTrace) -> np.ndarray:
        assert one.log_top is not None
        return confident(one.log_top if point_mass else one.log_q, one.log_top, policy.number)

    def cut(texts: Iterable[Response]) -> Iterator[DraftScores]:
        for one in forced(texts):
            yield replace(one, lengths=_least(one.lengths, lengths(one)))

    def free(texts: Iterable[Response]) -> Iterator[Any]:
        assert drawn is not None
        for one in drawn(texts):
            yield _least(one.lengths, lengths(one))

    # A point mass drafts the same whatever is drawn.
    return made(name, gammas=(gamma,), scores=cut, lengths=free)


def _least(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    import numpy as np

    return np.minimum(one, other)


def _lengths(
    drawn: Callable[[Iterable[Response]], Iterator[DraftTrace]], texts: Iterable[Response]
) -> Iterator[np.ndarray]:
    for walked in drawn(texts):
        yield walked.lengths


def _check_policy(
    policy: Policy, title: str, drafter: Configured, law: Sampling, free: bool, verifiers_of: dict[str, tuple[int, ...]]
) -> None:
    """Refuse a policy that says nothing of this drafter."""
    cls, config = drafter
    own = getattr(getattr(config, "policy", None), "name", "static")
    if own != "static":
        raise UsageError(f"--policy {policy.name}: drafter '{title}' has a policy of its own, {own}; name it without")
    if any(k > 1 for ks in verifiers_of.values() for k in ks):
        raise UsageError(f"--policy {policy.name}: drafter '{title}' drafts several sequences, which have one length")
    heads = bool(cls.traits(config, law).hidden_layers)
    if policy.name == "confidence" and (free or (heads and cls.traits(config, law).point_mass)):
        raise UsageError(f"--policy confidence: how sure drafter '{title}' is of what it drafts is not known here")


def _without_model(
    drafter: Configured, depth: int, sampling: Sampling
) -> Callable[[Iterable[Response]], Iterator[DraftScores]]:
    from ...replay.teacher_forcing import model_free

    return lambda texts: model_free.score_model_free(*drafter, texts, depth, sampling)


def _target(title: str, name: str, sampling: Sampling | None, options: dict[str, Any]) -> Target:
    from ...replay.teacher_forcing.lazy_models import Target

    if sampling is None:
        raise UsageError(
            "it is not known what the responses were sampled with, on which the laws of target and drafter depend; say "
            "it with --temperature (and --top-k, --top-p, --min-p)"
        )
    if not name:
        raise UsageError(f"drafter '{title}' needs a target: --target MODEL, the one that was recorded")
    return Target(name, sampling, **options)


def _length_is_drawn(drafter: Configured, sampling: Sampling) -> bool:
    """Whether how long a draft is may hang on the tokens that were drawn; it does not where the traits or the length
    policy say that it is fixed."""
    cls, config = drafter
    traits = cls.traits(config, sampling)
    policy = getattr(config, "policy", None)
    return traits.is_chain and not traits.replayable and getattr(policy, "name", "") != "static"
