"""Counters that a serving engine would report for recorded responses, by its `CounterDefinition`.

If it counted otherwise, there is a cause. Causes are ways of counting; those of drafting are in `diagnosis.matching`. A
cause is named if replaying with it gives what the engine counted. Where acceptance is deterministic, the counts must
agree up to rounding; otherwise the rates by position must agree up to chance.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from crossdraft import UsageError

from ..engines.acceptance import Acceptance
from ..engines.counter_definitions import DEFINITIONS, PREFILL_TOKENS, CounterDefinition
from .response import Response
from .step_chain import start_probs


@dataclass
class EngineCounts:
    """Expected counters of one drafter, verifier and draft length; whole numbers if acceptance is deterministic."""

    definition: CounterDefinition  # of the counters
    gamma: int  # draft length
    # drafts, draft_tokens: counted steps, and the tokens drafted in them
    drafts: float = 0.0
    draft_tokens: float = 0.0
    per_position: np.ndarray = field(init=False)  # [gamma], counted steps that accepted at least 1, .., gamma tokens
    # steps, tokens, responses: all steps after the prefill, tokens of the responses, responses
    steps: float = 0.0
    tokens: int = 0
    responses: int = 0
    # drafted tokens past the end of responses whose acceptance is unknown, because the continuation of the response is
    # not recorded; they count as rejected
    unknown: float = 0.0
    random: bool = False  # acceptance is not deterministic, so the counters of an engine differ from these by chance
    # drafts, and counted steps that accepted at least 1, .., gamma tokens, of each response
    by_response: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.per_position = np.zeros(self.gamma)

    @property
    def accepted(self) -> float:
        return float(self.per_position.sum())

    @property
    def length(self) -> float | None:
        """Mean acceptance length, bonus token included; None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def rate(self) -> float | None:
        """Share of drafted tokens that were accepted; None without drafts, or if the engine does not report it."""
        return self.accepted / self.draft_tokens if self.draft_tokens and self.definition.rate else None

    @property
    def tokens_per_step(self) -> float | None:
        """The engine's ratio of response tokens and steps, averaged over steps; None if it does not report it."""
        steps = self.steps + self.responses * self.definition.prefill_step
        return self.tokens / steps if steps and self.definition.tokens_per_step else None

    def add(self, survival: np.ndarray, lengths: np.ndarray, size: int, limit: int | None) -> None:
        """Add a response of ``size`` tokens T.

        ``survival [T + C, G]``: Pr(tau >= i) of a step that starts at each token of it and of its recorded
        continuation, G >= gamma; ``lengths [T + C]``: drafted tokens of that step; ``limit``: maximum length of the
        response, if known.
        """
        known, definition = len(survival), self.definition
        t, i = np.arange(size), np.arange(1, self.gamma + 1)
        drafted = np.minimum(lengths[:size], self.gamma)
        if definition.shortens and limit is not None:
            drafted = np.minimum(drafted, np.maximum(limit - 1 - t, 0))
        acceptable = np.minimum(drafted, known - t)
        at_least = survival[:size, : self.gamma] * (i <= acceptable[:, None])
        visited = np.zeros(size)  # the first step follows the prefill
        visited[PREFILL_TOKENS:] = start_probs(at_least[None, PREFILL_TOKENS:], np.array([self.gamma]))[0, 0]
        last = np.where(acceptable > 0, at_least[t, np.maximum(acceptable, 1) - 1], 1.0)
        counted = visited if definition.idle_steps else visited * (drafted > 0)
        if definition.accepted == "all":
            self.unknown += float((visited * last * (drafted - acceptable)).sum())
        else:
            ends_draft = (drafted == size - t) & (definition.accepted == "until_end")
            at_least = at_least * (i <= (size - 1 - t + ends_draft)[:, None])
        self.random = self.random or bool(((at_least > 1e-6) & (at_least < 1 - 1e-6)).any())
        accepted = counted @ at_least
        self.by_response.append(np.concatenate([[counted.sum()], accepted]))
        self.drafts += float(counted.sum())
        self.draft_tokens += float((visited * drafted).sum())
        self.per_position += accepted
        self.steps += float(visited.sum())
        self.tokens += size
        self.responses += 1


def with_continuation(response: Response) -> Response:
    """The response with its continuation as further tokens; unchanged if their log P would be unknown."""
    if not len(response.continuation):
        return response
    log_p = response.log_p
    if log_p is not None:
        if response.sampling is None or response.sampling.temperature:
            return response
        log_p = np.concatenate([log_p, np.zeros(len(response.continuation))])
    return replace(response, tokens=[*response.tokens, *response.continuation], log_p=log_p)


DEFINITION, END = "definition of the counter", "end of sequence"  # names of causes
TEMPLATE, LENGTH, DTYPE = "chat template", "draft length", "dtype"
CHANCE = 3.5  # standard errors that chance does not explain
_ROUNDING = 0.0006  # relative rounding error of counts that are computed from rates of three decimals
_LENGTH = 0.05  # difference of the mean draft lengths that chance explains, relative to gamma
_ACCEPTED = {
    "all": "all accepted tokens count, those past the end of a response, too",
    "before_last": "accepted tokens count up to the one before the last of a response",
    "until_end": "accepted tokens count up to the end of a response",
}


@dataclass(frozen=True)
class Counted:
    """Counters of an engine."""

    drafts: float  # counted drafts
    # [gamma], drafts that accepted at least 1, .., gamma tokens; [1] and their sum if ``total``
    per_position: np.ndarray
    total: bool = False  # only the sum is known
    draft_tokens: float | None = None  # tokens of the counted drafts; None if unknown

    @classmethod
    def of(cls, acceptance: Acceptance, draft_tokens: float | None = None) -> Counted:
        """Counters in a log or scrape. Raises UsageError if they lack the number of drafts."""
        rows = np.array(acceptance.rows, dtype=float)
        if not len(rows):
            raise UsageError(f"{acceptance.source} does not have the number of drafts; give a log or a scrape of them")
        drafts, *accepted = rows.sum(0)
        idle, total = acceptance.idle, not acceptance.marginal
        return cls(float(drafts) * (1 - idle), np.array(accepted), total, draft_tokens)

    @property
    def length(self) -> float:
        """Mean acceptance length, bonus token included."""
        return 1 + float(self.per_position.sum()) / self.drafts

    @property
    def rates(self) -> np.ndarray:
        return self.per_position / self.drafts

    def of_replay(self, counts: EngineCounts) -> np.ndarray:
        """The numbers of ``counts`` that ``per_position`` is compared with."""
        return np.array([counts.accepted]) if self.total else counts.per_position

    def agrees(self, counts: EngineCounts) -> bool:
        """True if the engine counted what ``counts`` computes, up to rounding or chance."""
        if not counts.drafts or len(ours := self.of_replay(counts)) != len(self.per_position):
            return False
        if not self.agrees_in_tokens(counts):
            return False
        if not counts.random:
            bound = 0.5 + _ROUNDING * counts.drafts
            differences = [self.drafts - counts.drafts, *(self.per_position - ours)]
            return bool(np.abs(differences).max() <= bound)
        rates = ours / counts.drafts
        spread = np.maximum(rates * (1 - rates), 1 / counts.drafts) if not self.total else rates * (1 + rates)
        errors = np.sqrt(spread * (1 / counts.drafts + 1 / self.drafts))
        return bool((np.abs(self.rates - rates) <= CHANCE * errors).all())

    def agrees_in_tokens(self, counts: EngineCounts) -> bool:
        """True if the drafts have as many tokens, in their mean if which drafts there are is random."""
        if self.draft_tokens is None:
            return True
        if counts.random:
            lengths = self.draft_tokens / self.drafts, counts.draft_tokens / counts.drafts
            return abs(lengths[0] - lengths[1]) <= _LENGTH * counts.gamma
        return abs(self.draft_tokens - counts.draft_tokens) <= 0.5 + _ROUNDING * counts.draft_tokens


@dataclass(frozen=True)
class Cause:
    """Cause of a difference, and its description."""

    name: str
    text: str


def cause_of(counted: Counted, counts: EngineCounts, variants: Sequence[tuple[Cause, EngineCounts]]) -> Cause | None:
    """The first way of counting that gives what the engine counted, or what else explains the difference."""
    if (cause := next((cause for cause, variant in variants if counted.agrees(variant)), None)) or not counts.drafts:
        return cause
    more = counted.per_position - counted.of_replay(counts)
    rounding = 0.5 + _ROUNDING * counts.drafts
    may_be_past_end = counts.unknown and (more >= -rounding).all() and more.sum() <= counts.unknown + rounding
    if may_be_past_end and abs(counted.drafts - counts.drafts) <= rounding and counted.agrees_in_tokens(counts):
        past_end = f"up to {counts.unknown:.0f} drafted tokens past the ends of the responses"
        text = f"{more.sum():.0f} of {past_end} were accepted; record the 'continuation' of the responses to count them"
        return Cause(END, text)
    if counted.draft_tokens is None or not replace(counted, draft_tokens=None).agrees(counts):
        return None
    lengths = counted.draft_tokens / counted.drafts, counts.draft_tokens / counts.drafts
    text = f"drafts have {lengths[0]:.2f} tokens instead of {lengths[1]:.2f}, and as many are accepted"
    return Cause(LENGTH, f"{text}: the engine ends drafts elsewhere")


def variants_of(definition: CounterDefinition) -> Iterator[tuple[Cause, CounterDefinition]]:
    """Definitions to try if an engine's counters are not those of ``definition``."""
    for accepted, text in _ACCEPTED.items():
        if accepted != definition.accepted:
            yield Cause(END, text), replace(definition, accepted=accepted)
    idle = "not counted" if definition.idle_steps else "counted"
    yield (
        Cause(DEFINITION, f"steps without a draft are {idle}"),
        replace(definition, idle_steps=not definition.idle_steps),
    )
    cut = "not cut" if definition.shortens else "cut"
    yield (
        Cause(DEFINITION, f"drafts near the maximum length are {cut} to the remaining tokens"),
        replace(definition, shortens=not definition.shortens),
    )
    for name, other in DEFINITIONS.items():
        if name != definition.engine:
            yield Cause(DEFINITION, f"the counters are those that {name} defines"), other


def differing(a: CounterDefinition, b: CounterDefinition) -> list[str]:
    """Differences between the definitions of two engines."""
    texts = []
    for text, key in (("steps without a draft count", "idle_steps"), ("drafts near the maximum are cut", "shortens")):
        if getattr(a, key) != getattr(b, key):
            texts.append(f"{text} in {(a if getattr(a, key) else b).engine} only")
    if a.accepted != b.accepted:
        texts.append("; ".join(f"{each.engine}: {_ACCEPTED[each.accepted]}" for each in (a, b)))
    return texts
