"""The law of the first token on a real model: a million draws by the real rules against the target's softmax.

Enumeration (`crossdraft.framework.certificate.certify`) proves a rule on small exact models. This shows it at full
size: real laws over a real vocabulary, in float32, with the shipped generator. For every prompt the target's law P_0
and the drafter's law Q_0 of the next token are computed once; then registered drafters draft from Q_0, registered
verifiers judge the drafts, and what they emit first is counted. Two chi-square tests of the same counts are printed
side by side: against P_0, which a lossless rule passes, and, as a control, against Q_0, which has to be rejected,
because a test that cannot tell the two laws apart says nothing.

*After the first token both models are made to go on saying P_0 and Q_0.* A lossless rule is lossless for every pair
of models, so for this one too, and the law of its first token is the real P_0 whatever the rows after it hold. With
gamma = 1, the default, the only such row is the one that a bonus token is drawn from, after the first token; rules
that judge a whole block are then the same as token verification, and gamma = 2 or more tells them apart. So a million
samples cost two forward passes, and all rows of a batch are one row, expanded.

*Tokens that neither law can say are left out of the vocabulary.* The others keep their order. No rule and no inverse
CDF does anything else with a token of probability 0 than skip it, so the counts are the same, only sooner.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from .. import plugins
from ..contracts.draft import Sequences
from ..contracts.lm import LM
from ..contracts.sampling import Sampling
from ..contracts.verifier import incompatible
from ..errors import ContractError, NumericalError, UnknownNameError, UsageError
from .drafts import DRAFTS
from .goodness_of_fit import Fit, goodness_of_fit
from .table_lm import ToyContext

if TYPE_CHECKING:
    from torch import Tensor

    from ..contracts.draft import Draft, Verdict
    from ..contracts.drafter import Drafter
    from ..contracts.rng import RngSource
    from ..contracts.verifier import Verifier

#: A law is rejected below this p-value: a true one is, once in a million tests.
REJECTED = 1e-6
#: Samples of a batch: as many as fit with one law each into so many bytes (a CPU's caches want them few), but
#: at most `LARGEST_BATCH`.
BATCH_BYTES, BATCH_BYTES_CPU = 2**28, 2**23
LARGEST_BATCH = 2**15
#: Which draft a verifier is given if none is asked for: the first of these, then of `DRAFTS`, that it accepts.
PREFERRED = ("iid-2", "tree-greedy-2-1")


@dataclass(frozen=True)
class Case:
    """A pair under test: a draft label with the drafter and config it stands for, and a verifier."""

    draft: str
    drafter: type[Drafter]
    config: Any
    verifier: type[Verifier]

    def build(self, q: Tensor, batch_size: int) -> Drafter:
        """The drafter, with B slots, of a model whose law is ``q [V]``, warped already, whatever it is fed."""
        context = ToyContext(q, q, Sampling(), batch_size, max_length=self.nodes + 2)
        return self.drafter(self.config, context)

    @property
    def lossless(self) -> bool:
        """What the verifier promises."""
        return self.verifier.traits(self.verifier.Config()).lossless

    @property
    def nodes(self) -> int:
        """The most tokens a draft has; none is deeper."""
        return self.drafter.traits(self.config, Sampling()).nodes


@dataclass(frozen=True)
class PromptLaws:
    """A prompt and what the models say after it.

    Attributes:
        text: as it was given.
        length: its tokens, chat template included.
        p, q: ``[V]`` float32, the target's and the drafter's law of the next token, both warped.
    """

    text: str
    length: int
    p: Tensor
    q: Tensor


@dataclass(frozen=True)
class Result:
    """The counts ``[V]`` of a case, against the target's law and, as a control, against the drafter's."""

    case: Case
    counts: Tensor
    target: Fit
    control: Fit

    @property
    def kept(self) -> bool:
        return self.target.p_value >= REJECTED

    @property
    def conclusive(self) -> bool:
        return self.control.p_value < REJECTED

    @property
    def bad(self) -> bool:
        return not self.conclusive or (self.case.lossless and not self.kept)

    @property
    def verdict(self) -> str:
        if not self.kept:
            return "NO" if self.case.lossless else "no (declared lossy)"
        return "yes" if self.conclusive else "unknown: the control is not rejected"

    def as_json(self) -> dict[str, Any]:
        return {
            "draft": self.case.draft,
            "verifier": self.case.verifier.name,
            "declared_lossless": self.case.lossless,
            "target": self.target.as_json(),
            "control": self.control.as_json(),
            "target_kept": None if self.kept and not self.conclusive else self.kept,
        }


# -- the law of the first token ------------------------------------------------------------------------------


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
    """Count the first tokens that each case emits.

    Args:
        p, q: ``[V]``, the target's law and the drafter's, float32 or float64, on the device to draw on.
        cases: pairs; all get the same random numbers, and those with the same draft the same drafts.
        samples: steps of each case; step i has the stream ``first_stream + i``.
        rng: where random numbers come from.
        batch: steps at once; ``None`` = by the number of tokens that p or q can say.
        position: where the steps start, in tokens.
        progress: called with the number of samples drawn since the last call.

    Returns:
        per case ``[V]`` int64, how often each token came first.

    Raises:
        ContractError: a verifier emitted what is no token, or the wrong number of them.
    """

    if p.device.type == "cpu":
        # glibc hands each freed tensor of megabytes back to the kernel, which clears it for the next one: half of the
        # time. Once it has freed a block of 32 MiB it keeps such blocks.
        torch.zeros(2**25 - 2**16, dtype=torch.uint8)
    kept = ((p > 0) | (q > 0)).nonzero().squeeze(1)
    p, q, vocab_size = p[kept], q[kept], len(p)
    if batch is None:
        room = BATCH_BYTES_CPU if p.device.type == "cpu" else BATCH_BYTES
        batch = min(LARGEST_BATCH, max(1, room // (len(kept) * p.element_size())))
    counts = [torch.zeros(len(kept), dtype=torch.long, device=p.device) for _ in cases]
    drafts = {case.draft: case for case in cases}
    with torch.inference_mode():
        for start in range(0, samples, batch):
            streams = list(range(first_stream + start, first_stream + min(start + batch, samples)))
            b = len(streams)
            for label, one in drafts.items():
                drafter = one.build(q, b)
                numbers = rng.for_step(streams, [position] * b, p.device)
                for row in range(b):
                    drafter.start(row, [0])
                root = torch.zeros(b, 1, dtype=torch.long, device=p.device)
                draft = drafter.propose(Sequences([[0]] * b, root, [one.nodes] * b, streams), numbers)
                rows = p.expand(b, draft.width + 1, -1)
                for count, case in zip(counts, cases, strict=True):
                    if case.draft != label:
                        continue
                    verifier = case.verifier()
                    for row in range(b):
                        verifier.start(row)
                    # A copy each, of a step in which the drafter's numbers are used up.
                    token = first_token(draft, verifier.verify(draft, rows, copy.deepcopy(numbers)))
                    if token.shape != (b,) or not ((token >= 0) & (token < len(kept))).all():
                        raise ContractError(f"verifier '{case.verifier.name}' emitted something that is no token")
                    count += token.bincount(minlength=len(kept))
                    progress(b)
    return [torch.zeros(vocab_size, dtype=torch.long, device=p.device).scatter_(0, kept, count) for count in counts]


def first_token(draft: Draft, verdict: Verdict) -> Tensor:
    """``[B]``: the first token each row emits, drafted and accepted or the verifier's own."""
    if not draft.width:
        return verdict.token
    if verdict.path is None:
        drafted = draft.tokens[:, 0]
    else:
        drafted = draft.tokens.gather(1, verdict.path[:, :1].clamp(min=0)).squeeze(1)
    return drafted.where(verdict.length > 0, verdict.token)


def laws_after(lm: LM, tokens: Sequence[int], sampling: Sampling, who: str) -> Tensor:
    """What the model in row 0 of ``lm`` says after each of ``tokens``, ``[len(tokens), V]``; nothing of them is kept.

    The row was begun with a prompt, whose last token is the first of ``tokens``. Raises NumericalError for NaN.
    """
    with torch.inference_mode():
        logits, _ = lm.forward(torch.tensor([list(tokens)], device=lm.device))
    lm.commit([0])
    laws, finite = sampling.checked_probs(logits[0])
    if not bool(finite.all()):
        raise NumericalError(f"the {who} produced NaN or infinite logits; try --dtype float32 or check the weights")
    return laws


def judge(case: Case, counts: Tensor, prompt: PromptLaws) -> Result:
    """Test the counts of a case against both laws of its prompt."""
    return Result(case, counts, goodness_of_fit(counts, prompt.p), goodness_of_fit(counts, prompt.q))


def choose(
    verifiers: Iterable[str] | None, labels: Iterable[str] | None, model: str, gamma: int
) -> tuple[list[Case], list[str]]:
    """The pairs to test, and why others cannot be; ``labels`` are those of ``crossdraft certify --draft``.

    Without ``verifiers`` all that are declared lossless for sampling, without ``labels`` one draft each (`PREFERRED`).

    Raises:
        UnknownNameError: a verifier or label that there is not.
    """

    wanted = list(dict.fromkeys(labels or [*(label for label in PREFERRED if label in DRAFTS), *DRAFTS]))
    drafts = {}
    for label in wanted:
        if label not in DRAFTS:
            raise UnknownNameError.among("draft label", label, DRAFTS)
        kind = DRAFTS[label]
        options = kind.options(gamma)
        if "model" not in options:
            continue  # a drafter without a model has no law to compare with
        cls = plugins.get("drafters", kind.drafter)
        # Sampled drafts come from the drafter's law as it is warped already.
        drafts[label] = kind.drafter, cls, cls.Config(**{**options, "model": model})
    if labels and not drafts:
        raise UsageError(f"the drafts {', '.join(wanted)} come from no model: there is no drafter's law to compare")
    cases, skipped = [], []
    for rule in _verifiers(verifiers):
        reasons = []
        for label, (name, cls, config) in drafts.items():
            reason = incompatible(
                name, cls.traits(config, Sampling()), rule.name, rule.traits(rule.Config()), Sampling()
            )
            if reason:
                reasons.append(f"{label}: {reason}")
                continue
            cases.append(Case(label, cls, config, rule))
            if not labels:
                break
        else:
            skipped += reasons if labels else reasons[:1]
    return cases, list(dict.fromkeys(skipped))


def _verifiers(names: Iterable[str] | None) -> list[type[Verifier]]:
    if names:
        return [plugins.get("verifiers", name) for name in dict.fromkeys(names)]
    found = []
    for name in plugins.entries("verifiers"):
        with suppress(ContractError):  # broken ones are reported by `crossdraft plugins`
            found.append(plugins.get("verifiers", name))
    traits = [(rule, rule.traits(rule.Config())) for rule in found]
    return [rule for rule, has in traits if has.lossless and not has.temperature_zero_only]
