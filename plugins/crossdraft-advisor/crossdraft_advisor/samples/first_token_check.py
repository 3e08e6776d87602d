"""Distribution of the first token on a real model: a million samples of each verifier against the target's softmax.

Enumeration (`crossdraft.framework.certificate.certify`) proves a verifier on small exact models. This check covers full
size: real distributions over a real vocabulary, in float32, with the shipped generator. For every prompt the target's
distribution P_0 and the drafter's distribution Q_0 of the next token are computed once; then registered drafters draft
from Q_0, registered verifiers verify the drafts, and the first emitted tokens are counted. The counts are tested by
chi-square against P_0, which a lossless verifier passes, and, as a control, against Q_0, which must be rejected:
otherwise the test cannot distinguish the two distributions.

*Both models keep returning P_0 and Q_0 after the first token.* A lossless verifier is lossless for every pair of
models, so the distribution of its first token is P_0 for any rows after it. With gamma = 1, the default, the only such
row is that of the bonus token; block verifiers then equal token verification, and gamma >= 2 distinguishes them. So a
million samples cost two forward passes, and all rows of a batch are one expanded row.

*Tokens with P_0 = Q_0 = 0 are removed from the vocabulary.* The others keep their order. Verifiers and inverse CDFs
skip tokens of probability 0, so the counts do not change.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from crossdraft import (
    LM,
    ContractError,
    Draft,
    Drafter,
    NumericalError,
    Sampling,
    Sequences,
    UnknownNameError,
    UsageError,
    Verdict,
    Verifier,
    incompatible,
)
from crossdraft.framework import plugins
from crossdraft.framework.certificate.drafts import DRAFTS
from crossdraft.framework.certificate.table_lm import ToyContext
from crossdraft.framework.contracts.rng import RngSource

REJECTED = 1e-6  # p-value below which a distribution is rejected
#: Bytes of one batch of distributions (small on CPUs, for their caches); at most `LARGEST_BATCH` samples.
BATCH_BYTES, BATCH_BYTES_CPU = 2**28, 2**23
LARGEST_BATCH = 2**15
#: Default draft of a verifier: the first of these, then of `DRAFTS`, that it accepts.
PREFERRED = ("iid-2", "tree-greedy-2-1")


@dataclass(frozen=True)
class Case:
    """A pair under test: a draft label with its drafter and config, and a verifier."""

    draft: str
    drafter: type[Drafter]
    config: Any
    verifier: type[Verifier]

    def build(self, q: Tensor, batch_size: int) -> Drafter:
        """Build the drafter with B slots over a model with the fixed next-token probabilities ``q [V]``."""
        context = ToyContext(q, q, Sampling(), batch_size, max_length=self.nodes + 2)
        return self.drafter(self.config, context)

    @property
    def lossless(self) -> bool:
        """Lossless according to the verifier's traits."""
        return self.verifier.traits(self.verifier.Config()).lossless

    @property
    def nodes(self) -> int:
        """Maximum number of nodes, and depth, of a draft."""
        return self.drafter.traits(self.config, Sampling()).nodes


@dataclass(frozen=True)
class PromptDistributions:
    """A prompt and the next-token distributions of both models."""

    text: str  # of the prompt
    length: int  # in tokens, including the chat template
    # p, q: ``[V]`` float32, target and draft probabilities of the next token after temperature and truncation
    p: Tensor
    q: Tensor


@dataclass(frozen=True)
class Result:
    """Counts ``[V]`` of a case, tested against the target distribution and, as a control, the draft distribution."""

    case: Case
    counts: Tensor
    target: Fit
    control: Fit

    @property
    def target_kept(self) -> bool:
        return self.target.p_value >= REJECTED

    @property
    def conclusive(self) -> bool:
        return self.control.p_value < REJECTED

    @property
    def bad(self) -> bool:
        return not self.conclusive or (self.case.lossless and not self.target_kept)

    @property
    def verdict(self) -> str:
        if not self.target_kept:
            return "NO" if self.case.lossless else "no (declared lossy)"
        return "yes" if self.conclusive else "unknown: the control is not rejected"

    def as_json(self) -> dict[str, Any]:
        return {
            "draft": self.case.draft,
            "verifier": self.case.verifier.name,
            "declared_lossless": self.case.lossless,
            "target": self.target.as_json(),
            "control": self.control.as_json(),
            "target_kept": None if self.target_kept and not self.conclusive else self.target_kept,
        }


def sample(
    p: Tensor,
    q: Tensor,
    cases: Sequence[Case],
    samples: int,
    *,
    rng: RngSource,
    batch: int | None = None,
    position: int = 1,
    first_stream: int = 0,
    progress: Callable[[int], Any] = lambda drawn: None,
) -> list[Tensor]:
    """Count the first tokens ``[V]`` that each case emits, at target and draft probabilities ``p`` and ``q`` ``[V]``.

    All cases use the same random numbers, step i those of the stream ``first_stream + i``, and cases with one draft
    label the same drafts. ``position``: tokens before the step; ``progress``: called with the number of new samples.
    Raises ContractError if a verifier emits invalid tokens.
    """
    if p.device.type == "cpu":
        # glibc returns freed blocks of megabytes to the kernel, which zeroes them again: half of the time. After
        # freeing one block of 32 MiB it raises its threshold and keeps them.
        torch.zeros(2**25 - 2**16, dtype=torch.uint8)
    support = ((p > 0) | (q > 0)).nonzero().squeeze(1)
    p, q, vocab_size = p[support], q[support], len(p)
    if batch is None:
        batch_bytes = BATCH_BYTES_CPU if p.device.type == "cpu" else BATCH_BYTES
        batch = min(LARGEST_BATCH, max(1, batch_bytes // (len(support) * p.element_size())))
    counts = [torch.zeros(len(support), dtype=torch.long, device=p.device) for _ in cases]
    drafts = {case.draft: case for case in cases}
    with torch.inference_mode():
        for start in range(0, samples, batch):
            streams = list(range(first_stream + start, first_stream + min(start + batch, samples)))
            b = len(streams)
            for label, source in drafts.items():
                drafter = source.build(q, b)
                random_numbers = rng.for_step(streams, [position] * b, p.device)
                for row in range(b):
                    drafter.start(row, [0])
                root = torch.zeros(b, 1, dtype=torch.long, device=p.device)
                draft = drafter.propose(Sequences([[0]] * b, root, [source.nodes] * b, streams), random_numbers)
                rows = p.expand(b, draft.width + 1, -1)
                for count, case in zip(counts, cases, strict=True):
                    if case.draft != label:
                        continue
                    verifier = case.verifier()
                    for row in range(b):
                        verifier.start(row)
                    # Each verifier gets a copy of the random state after drafting.
                    token = first_token(draft, verifier.verify(draft, rows, copy.deepcopy(random_numbers)))
                    if token.shape != (b,) or not ((token >= 0) & (token < len(support))).all():
                        raise ContractError(f"verifier '{case.verifier.name}' emitted an invalid token")
                    count += token.bincount(minlength=len(support))
                    progress(b)
    return [torch.zeros(vocab_size, dtype=torch.long, device=p.device).scatter_(0, support, count) for count in counts]


def first_token(draft: Draft, verdict: Verdict) -> Tensor:
    """First emitted token of each row ``[B]``: the accepted drafted one, or the verifier's own."""
    if not draft.width:
        return verdict.token
    if verdict.path is None:
        drafted = draft.tokens[:, 0]
    else:
        drafted = draft.tokens.gather(1, verdict.path[:, :1].clamp(min=0)).squeeze(1)
    return drafted.where(verdict.length > 0, verdict.token)


def next_token_probs(lm: LM, tokens: Sequence[int], sampling: Sampling, label: str) -> Tensor:
    """Next-token probabilities in row 0 of ``lm`` after each of ``tokens``, ``[len(tokens), V]``; commits nothing.

    The row was started with a prompt whose last token is the first of ``tokens``. Raises NumericalError for NaN.
    """
    with torch.inference_mode():
        logits, _ = lm.forward(torch.tensor([list(tokens)], device=lm.device))
    lm.commit([0])
    probs, finite = sampling.checked_probs(logits[0])
    if not bool(finite.all()):
        raise NumericalError(f"the {label} produced NaN or infinite logits; try --dtype float32 or check the weights")
    return probs


def check_counts(case: Case, counts: Tensor, prompt: PromptDistributions) -> Result:
    """Test the counts of a case against both distributions of its prompt."""
    return Result(case, counts, goodness_of_fit(counts, prompt.p), goodness_of_fit(counts, prompt.q))


def choose(verifiers: Iterable[str] | None, labels: Iterable[str] | None, gamma: int) -> tuple[list[Case], list[str]]:
    """Return the pairs to test, and the reasons for skipped ones; ``labels`` as of ``crossdraft certify --draft``.

    ``verifiers`` default to all that are declared lossless for sampling, ``labels`` to one draft each (`PREFERRED`).

    Raises UnknownNameError: unknown verifier or label.
    """
    requested = list(dict.fromkeys(labels or [*(label for label in PREFERRED if label in DRAFTS), *DRAFTS]))
    drafts = {}
    for label in requested:
        if label not in DRAFTS:
            raise UnknownNameError.among("draft label", label, DRAFTS)
        cls, config = DRAFTS[label].config(gamma)  # q is warped already, so the drafter samples at temperature 1
        if getattr(config, "model", None):  # else there is no draft distribution for the control
            drafts[label] = cls, config
    if labels and not drafts:
        raise UsageError(
            f"the drafts {', '.join(requested)} do not use a model, so the control is not defined; choose other "
            "--draft labels"
        )
    cases, skipped, chosen = [], [], [plugins.get("verifiers", name) for name in dict.fromkeys(verifiers or ())]
    for name in () if chosen else plugins.entries("verifiers"):
        with suppress(ContractError):  # broken ones are reported by `crossdraft list plugins`
            traits = (verifier := plugins.get("verifiers", name)).traits(verifier.Config())
            chosen += [verifier] * (traits.lossless and not traits.temperature_zero_only)
    for verifier in chosen:
        reasons = []
        for label, (cls, config) in drafts.items():
            traits = cls.traits(config, Sampling()), verifier.traits(verifier.Config())
            reason = incompatible(cls.name, traits[0], verifier.name, traits[1], Sampling())
            if reason:
                reasons.append(f"{label}: {reason}")
                continue
            cases.append(Case(label, cls, config, verifier))
            if not labels:
                break
        else:
            skipped += reasons if labels else reasons[:1]
    return cases, list(dict.fromkeys(skipped))


MIN_EXPECTED = 5  # smallest expected count of a chi-square cell; smaller cells are pooled


@dataclass(frozen=True)
class Fit:
    """Goodness of fit of counts to a distribution."""

    sd: float  # standard deviation over the vocabulary of frequency minus probability
    expected_sd: float  # its expectation for samples of the distribution
    # Pearson's statistic, with cells that expect fewer than `MIN_EXPECTED` samples pooled; infinite if a counted token
    # has probability 0
    chi_square: float
    degrees_of_freedom: int  # number of cells - 1
    p_value: float  # probability that samples of the distribution fit no better; 1 with a single cell

    def as_json(self) -> dict[str, Any]:
        """JSON values; an infinite chi-square is null."""
        return {**asdict(self), "chi_square": self.chi_square if math.isfinite(self.chi_square) else None}


def goodness_of_fit(counts: Tensor, probs: Tensor) -> Fit:
    """Chi-square of ``counts [V]`` against ``probs [V]`` (K. Pearson, 1900), see `Fit`."""
    observed, p = counts.double().cpu().numpy(), probs.double().cpu().numpy()
    p = p / p.sum()
    n = observed.sum()
    sd = math.sqrt(np.square(observed / n - p).mean())
    expected_sd = math.sqrt((p * (1 - p) / n).mean())
    impossible = bool((observed[p == 0] > 0).any())
    order = p.argsort()
    expected, observed = (p * n)[order], observed[order]
    pooled = int((expected < MIN_EXPECTED).sum())
    if pooled and expected[:pooled].sum() < MIN_EXPECTED:  # the pooled cell is too small: add the next one
        pooled = min(pooled + 1, len(expected))
    if pooled:
        starts = np.r_[0, pooled : len(expected)]
        expected, observed = np.add.reduceat(expected, starts), np.add.reduceat(observed, starts)
    degrees = len(expected) - 1
    if impossible:
        statistic, p_value = math.inf, 0.0
    elif degrees == 0:
        statistic, p_value = 0.0, 1.0
    else:
        from scipy.stats import chisquare  # imported here: half a second

        statistic, p_value = map(float, chisquare(observed, expected))
    return Fit(sd, expected_sd, statistic, degrees, p_value)
