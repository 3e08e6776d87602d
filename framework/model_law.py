"""The law of the first token on a real model: a million draws by the real rules against the target's softmax.

Enumeration (`crossdraft.framework.certify`) proves a rule on small exact models. This shows it at full size: real
laws over a real vocabulary, in float32, with the shipped generator. For every prompt the target's law P_0 and the
drafter's law Q_0 of the next token are computed once; then registered drafters draft from Q_0, registered verifiers
judge the drafts, and what they emit first is counted. Two chi-square tests of the same counts are printed side by
side: against P_0, which a lossless rule passes, and, as a control, against Q_0, which has to be rejected, because a
test that cannot tell the two laws apart says nothing.

*After the first token both models are made to go on saying P_0 and Q_0.* A lossless rule is lossless for every pair
of models, so for this one too, and the law of its first token is the real P_0 whatever the rows after it hold. With
gamma = 1, the default, the only such row is the one that a bonus token is drawn from, after the first token; rules
that judge a whole block are then the same as token verification, and gamma = 2 or more tells them apart. So a million
samples cost two forward passes, and all rows of a batch are one row, expanded.

*Tokens that neither law can say are left out of the vocabulary.* The others keep their order. No rule and no inverse
CDF does anything else with a token of probability 0 than skip it, so the counts are the same, only sooner.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import plugins
from .errors import ContractError, NumericalError, UnknownNameError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from .decoding.sampling import Sampling
    from .draft import Draft, Verdict
    from .drafter import Drafter
    from .rng import RngSource
    from .verifier import Verifier

#: A law is rejected below this p-value: a true one is, once in a million tests.
REJECTED = 1e-6
#: Cells of a chi-square test that expect fewer samples are pooled.
LEAST_EXPECTED = 5
#: Samples of a batch: as many as fit with one law each into so many bytes (a CPU's caches want them few), but
#: at most `LARGEST_BATCH`.
BATCH_BYTES, BATCH_BYTES_CPU = 2**28, 2**23
LARGEST_BATCH = 2**15
#: Tokens shown in a histogram, the target's most probable ones.
SHOWN = 30
#: Which draft a verifier is given if none is asked for: the first of these, then of `DRAFTS`, that it accepts.
PREFERRED = ("iid-2", "tree-greedy-2-1")


class RepeatedLaw:
    """B slots of a model that says ``law [V]`` after whatever it is fed; see :class:`~crossdraft.framework.lm.LM`."""

    context_length: int | None = None

    def __init__(self, law: Tensor, batch_size: int):
        self.batch_size, self.vocab_size, self.device = batch_size, law.shape[0], law.device
        self.lengths = [0] * batch_size
        self.passes = 0
        self._logits = law.log()

    def begin(self, row: int, prompt: Sequence[int]) -> None:
        self.lengths[row] = len(prompt) - 1

    def grow(self, tokens: Tensor, parents: Tensor | None = None) -> tuple[Tensor, None]:
        self.passes += 1
        return self._logits.expand(*tokens.shape, -1), None

    def keep(self, counts: Sequence[int], path: Tensor | None = None) -> None:
        """Nothing: there is one round, and no place in it changes the law."""

    def retire(self, row: int) -> None:
        self.lengths[row] = 0


@dataclass(frozen=True)
class Case:
    """A pair under test: a draft label with the drafter and config it stands for, and a verifier."""

    draft: str
    drafter: type[Drafter]
    config: Any
    verifier: type[Verifier]

    def build(self, q: Tensor, batch_size: int) -> Drafter:
        """The drafter, with B slots, of a model whose law is ``q [V]``, warped already, whatever it is fed."""
        from .decoding.sampling import Sampling
        from .drafter import DraftContext

        context = DraftContext(
            sampling=Sampling(),
            batch_size=batch_size,
            max_length=self.nodes + 2,
            vocab_size=len(q),
            device=q.device,
            load_lm=lambda name: RepeatedLaw(q, batch_size),
        )
        return self.drafter(self.config, context)

    @property
    def nodes(self) -> int:
        """The most tokens a draft has; none is deeper."""
        from .decoding.sampling import Sampling

        return self.drafter.traits(self.config, Sampling()).nodes


@dataclass(frozen=True)
class Prompt:
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
class Fit:
    """How well counts fit a law.

    Attributes:
        sd: standard deviation over the vocabulary of (frequency - law).
        expected_sd: what it is on average for samples of that very law.
        chi_square: Pearson's statistic, cells that expect fewer than `LEAST_EXPECTED` samples pooled; infinite
            where the law calls a counted token impossible.
        degrees: its degrees of freedom, cells - 1.
        p_value: probability that samples of that law fit no better; 1 if there is only one cell.
    """

    sd: float
    expected_sd: float
    chi_square: float
    degrees: int
    p_value: float


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
        return not self.conclusive or (self.case.verifier.traits.lossless and not self.kept)

    @property
    def verdict(self) -> str:
        if not self.kept:
            return "NO" if self.case.verifier.traits.lossless else "no (declared lossy)"
        return "yes" if self.conclusive else "unknown: the control is not rejected"

    def as_json(self) -> dict[str, Any]:
        return {
            "draft": self.case.draft,
            "verifier": self.case.verifier.name,
            "declared_lossless": self.case.verifier.traits.lossless,
            "target": _fit_as_json(self.target),
            "control": _fit_as_json(self.control),
            "target_kept": None if self.kept and not self.conclusive else self.kept,
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; those that ``parser`` has already (``--verifier``, say) stay as they are."""
    group = parser.add_argument_group("the law on a real model")

    def option(*names: str, **spec: Any) -> None:
        with suppress(argparse.ArgumentError):
            group.add_argument(*names, **spec)

    option("--model", metavar="NAME", help="the target: a name, a directory or a Hub id")
    option("--drafter", metavar="NAME", help="the model that drafts; one with the target's tokenizer")
    option("--verifier", action="append", metavar="NAME", help="repeatable (default: all that are declared lossless)")
    option("--draft", action="append", metavar="LABEL", help="repeatable (default: one that the verifier accepts)")
    option("--prompt", action="append", metavar="TEXT", help="repeatable")
    option("--raw", action="store_true", help="leave the chat template out")
    option("--samples", type=int, default=1_000_000, metavar="N", help="per prompt and verifier (default: 1000000)")
    option("--gamma", type=int, metavar="N", help="draft length (default: 1, where block and token rules agree)")
    option("--temperature", type=float, default=1.0, metavar="T", help="of both models (default: 1)")
    option("--top-k", type=int, default=0, metavar="K", help="of both models (default: 0, off)")
    option("--top-p", type=float, default=1.0, metavar="P", help="of both models (default: 1, off)")
    option("--seed", type=int, default=0, metavar="N", help="of all random numbers (default: 0)")
    option("--batch", type=int, metavar="N", help="samples drawn at once (default: by the vocabulary's size)")
    option("--dtype", default="auto", help="of the models (default: auto)")
    option("--device", default="auto", help="of the models and the rules (default: auto)")
    option("--out", type=Path, metavar="DIR", help="write histograms (PNG, needs crossdraft[plots]) and JSON here")
    option("--json", action="store_true", help="print JSON")


def main(args: argparse.Namespace) -> int:
    """Run the test; 1 if a verifier that is declared lossless loses the law (p < 1e-6), or a control is not rejected.

    Raises:
        UsageError: an option, name or pair that cannot be meant; before any model is loaded where possible.
        ModelError: a model that cannot be loaded, or a drafter with another tokenizer.
        NumericalError: a model that says NaN.
        ContractError: a strategy that drafts or emits what its contract forbids.
    """
    sampling = _checked(args)
    drafter = args.drafter
    if drafter is None:
        raise UsageError(f"--drafter is missing: name a model that shares the tokenizer of {args.model}")
    cases, skipped = choose(args.verifier, args.draft, drafter, args.gamma or 1)
    for sentence in skipped:
        print(f"crossdraft: skipped: {sentence}", file=sys.stderr)
    if not cases:
        raise UsageError("no pair is left to test: every one was skipped")

    prompts, decode = _prompts(args, drafter, sampling)
    from tqdm import tqdm

    from .rng import CounterRng

    found, seconds = [], []
    total = len(prompts) * len(cases) * args.samples
    with tqdm(total=total, unit=" samples", unit_scale=True, disable=None, leave=False) as bar:
        for number, prompt in enumerate(prompts):
            bar.set_description(f"prompt {number + 1} of {len(prompts)}")
            start = time.perf_counter()
            counts = sample(
                prompt.p,
                prompt.q,
                cases,
                args.samples,
                rng=CounterRng(args.seed),
                batch=args.batch,
                position=prompt.length,
                first_stream=number * args.samples,
                progress=bar.update,
            )
            seconds.append(time.perf_counter() - start)
            found.append([judge(case, of_case, prompt) for case, of_case in zip(cases, counts, strict=True)])

    records = {
        "model": args.model,
        "drafter": drafter,
        "gamma": args.gamma or 1,
        "samples": args.samples,
        "seed": args.seed,
        "sampling": sampling.model_dump(),
        "rejected_below": REJECTED,
        "prompts": [
            _record(prompt, results, decode) | {"samples_per_second": len(cases) * args.samples / max(spent, 1e-9)}
            for prompt, results, spent in zip(prompts, found, seconds, strict=True)
        ],
    }
    if args.out:
        (args.out / "model_law.json").write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")
        for number, (prompt, results) in enumerate(zip(prompts, found, strict=True), 1):
            _draw(args.out / f"prompt-{number}.png", prompt, results, decode, args.model, drafter)
    if args.json:
        print(json.dumps(records, indent=2))
    else:
        for prompt, results, record in zip(prompts, found, records["prompts"], strict=True):
            _print_table(prompt, results, record, args.samples)
    return 1 if any(result.bad for results in found for result in results) else 0


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
        samples: rounds of each case; round i has the stream ``first_stream + i``.
        rng: where random numbers come from.
        batch: rounds at once; ``None`` = by the number of tokens that p or q can say.
        position: where the rounds start, in tokens.
        progress: called with the number of samples drawn since the last call.

    Returns:
        per case ``[V]`` int64, how often each token came first.

    Raises:
        ContractError: a verifier emitted what is no token, or the wrong number of them.
    """
    import torch

    from .draft import Sequences

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
                numbers = rng.round(streams, [position] * b, p.device)
                for row in range(b):
                    drafter.begin(row, [0])
                root = torch.zeros(b, 1, dtype=torch.long, device=p.device)
                draft = drafter.propose(Sequences([[0]] * b, root, [one.nodes] * b, streams), numbers)
                rows = p.expand(b, draft.width + 1, -1)
                for count, case in zip(counts, cases, strict=True):
                    if case.draft != label:
                        continue
                    verifier = case.verifier()
                    for row in range(b):
                        verifier.begin(row)
                    # A copy each, of a round in which the drafter's numbers are used up.
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


def goodness_of_fit(counts: Tensor, law: Tensor) -> Fit:
    """Chi-square of ``counts [V]`` against ``law [V]`` (K. Pearson, 1900), see `Fit`."""
    import torch

    counts = counts.double().cpu()
    law = law.double().cpu()
    law = law / law.sum()
    n = counts.sum()
    sd = (counts / n - law).square().mean().sqrt()
    expected_sd = (law * (1 - law) / n).mean().sqrt()
    order = (law * n).argsort()
    expected, observed = (law * n)[order], counts[order]
    pooled = int((expected < LEAST_EXPECTED).sum())
    if pooled and expected[:pooled].sum() < LEAST_EXPECTED:  # too little by itself: join the smallest cell
        pooled = min(pooled + 1, len(expected))

    def cells(values: Tensor) -> Tensor:
        return torch.cat([values[:pooled].sum()[None], values[pooled:]]) if pooled else values

    impossible = (observed[expected == 0] > 0).any()
    expected, observed = cells(expected), cells(observed)
    statistic = math.inf if impossible else float(((observed - expected).square() / expected).sum())
    degrees = len(expected) - 1
    if statistic == math.inf:
        p_value = 0.0
    elif degrees == 0:
        p_value = 1.0
    else:
        half = torch.tensor([degrees, statistic], dtype=torch.float64) / 2
        p_value = float(torch.special.gammaincc(half[0], half[1]))
    return Fit(float(sd), float(expected_sd), statistic, degrees, p_value)


def judge(case: Case, counts: Tensor, prompt: Prompt) -> Result:
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
    from .certify_command import DRAFTS
    from .decoding.sampling import Sampling
    from .verifier import incompatible

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
            reason = incompatible(name, cls.traits(config, Sampling()), rule.name, rule.traits, Sampling())
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
    return [rule for rule in found if rule.traits.lossless and not rule.traits.temperature_zero_only]


# -- the models ----------------------------------------------------------------------------------------------


def _checked(args: argparse.Namespace) -> Sampling:
    """The sampling parameters of the command line, once everything that needs no model is known to be usable."""
    from pydantic import ValidationError

    from .decoding.sampling import Sampling

    if not args.model:
        raise UsageError("--model is missing: name the target whose law is to be tested")
    if not args.prompt or not all(args.prompt):
        raise UsageError("--prompt is missing or empty: give at least one text")
    for option, default in (("toy", None), ("rounds", 1), ("bounds", False)):
        if getattr(args, option, default) != default:
            raise UsageError(f"--{option} is for the exact models; leave it out with --model")
    for option in ("samples", "gamma", "batch"):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UsageError(f"--{option} must be at least 1, got {value}")
    if args.temperature <= 0:
        raise UsageError(f"--temperature must be above 0 for a law that can be tested, got {args.temperature:g}")
    if args.out:
        _need_matplotlib()
        try:
            args.out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--out {args.out} cannot be made a directory: {error.strerror}") from None
    try:
        return Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"--{str(first['loc'][0]).replace('_', '-')}: {first['msg']}") from None


def _prompts(args: argparse.Namespace, drafter: str, sampling: Sampling) -> tuple[list[Prompt], Callable[[int], str]]:
    """What both models say after every prompt, and how a token reads."""
    from .bench.prompts import encode
    from .decoding.lm import TransformersLM
    from .generate import drafter_lm
    from .models import load_model

    target = load_model(args.model, dtype=args.dtype, device=args.device)
    tokenizer: Any = target.tokenizer
    encoded = []
    for text in args.prompt:
        tokens = list(tokenizer(text)["input_ids"]) if args.raw else encode(tokenizer, [text])
        if not tokens:
            raise UsageError(f"the prompt {text!r} has no tokens; a prompt needs at least one")
        if target.context_length is not None and len(tokens) > target.context_length:
            raise UsageError(
                f"the prompt {text[:40]!r} has {len(tokens)} tokens, but {target.name} has a context of "
                f"{target.context_length}; shorten it"
            )
        encoded.append(tokens)
    longest = max(map(len, encoded)) + 1
    lm = TransformersLM(target.model, 1, longest)
    small = drafter_lm(target, drafter, 1, longest, lm.vocab_size)
    prompts = [
        Prompt(
            text,
            len(tokens),
            _law_after(lm, tokens, sampling, f"target '{args.model}'"),
            _law_after(small, tokens, sampling, f"drafter '{drafter}'"),
        )
        for text, tokens in zip(args.prompt, encoded, strict=True)
    ]
    return prompts, lambda token: str(tokenizer.decode([token]))


def _law_after(lm: Any, tokens: Sequence[int], sampling: Sampling, who: str) -> Tensor:
    import torch

    lm.begin(0, tokens)
    logits, _ = lm.grow(torch.tensor([[tokens[-1]]], device=lm.device))
    lm.keep([0])
    law, finite = sampling.checked_law(logits[0, -1])
    if not finite:
        raise NumericalError(f"the {who} produced NaN or infinite logits; try --dtype float32 or check the weights")
    return law


# -- what is printed, written and drawn ----------------------------------------------------------------------


def _record(prompt: Prompt, results: Sequence[Result], decode: Callable[[int], str]) -> dict[str, Any]:
    return {
        "prompt": prompt.text,
        "prompt_tokens": prompt.length,
        "vocab_size": len(prompt.p),
        "possible_tokens": int(((prompt.p > 0) | (prompt.q > 0)).sum()),
        "tv_of_drafter_and_target": float((prompt.p.double() - prompt.q.double()).abs().sum() / 2),
        "pairs": [result.as_json() for result in results],
        "shown": [
            {
                "id": token,
                "text": decode(token),
                "target": float(prompt.p[token]),
                "drafter": float(prompt.q[token]),
                "counts": [int(result.counts[token]) for result in results],
            }
            for token in _most_probable(prompt)
        ],
    }


def _fit_as_json(fit: Fit) -> dict[str, Any]:
    return {
        "sd": fit.sd,
        "expected_sd": fit.expected_sd,
        "chi_square": fit.chi_square if math.isfinite(fit.chi_square) else None,  # JSON has no infinity
        "degrees_of_freedom": fit.degrees,
        "p_value": fit.p_value,
    }


def _most_probable(prompt: Prompt) -> list[int]:
    return prompt.p.topk(min(SHOWN, int((prompt.p > 0).sum()))).indices.tolist()


def _print_table(prompt: Prompt, results: Sequence[Result], record: dict[str, Any], samples: int) -> None:
    from tabulate import tabulate

    print(
        f"{prompt.text!r}: {samples:,} first tokens of {record['possible_tokens']:,} possible ones; "
        f"drafter and target are {record['tv_of_drafter_and_target']:.3f} apart (TV); "
        f"{record['samples_per_second']:,.0f} samples/s"
    )
    rows = [
        {
            "verifier": result.case.verifier.name,
            "draft": result.case.draft,
            "sd": f"{result.target.sd:.2e}",
            "(expected)": f"{result.target.expected_sd:.2e}",
            "chi-square": f"{result.target.chi_square:,.1f}",
            "df": str(result.target.degrees),
            "p": f"{result.target.p_value:.3g}",
            "control chi-square": f"{result.control.chi_square:,.1f}",
            "control p": f"{result.control.p_value:.3g}",
            "law kept": result.verdict,
        }
        for result in results
    ]
    print(tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True))
    print()


def _need_matplotlib() -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise UsageError(
            "--out draws histograms with matplotlib, which is not installed: pip install 'crossdraft[plots]', "
            "or leave --out away and use --json"
        )


def _draw(
    file: Path, prompt: Prompt, results: Sequence[Result], decode: Callable[[int], str], model: str, drafter: str
) -> None:
    """Three histograms per case over the target's most probable tokens: samples, target, drafter."""
    import warnings

    from matplotlib.figure import Figure

    tokens = _most_probable(prompt)
    places = range(len(tokens))
    figure = Figure(figsize=(12, 1.6 + 2.6 * len(results)), layout="constrained")
    panels = figure.subplots(len(results), 1, sharex=True, squeeze=False)[:, 0]
    for panel, result in zip(panels, results, strict=True):
        share = result.counts.double() / result.counts.sum()
        for shift, values, label, colour in (
            (-0.28, prompt.p, f"target {model}", "#4477aa"),
            (0.0, share, f"{int(result.counts.sum()):,} samples", "#228833"),
            (0.28, prompt.q, f"drafter {drafter}", "#ccbb44"),
        ):
            heights = [float(values[token]) for token in tokens]
            panel.bar([x + shift for x in places], heights, width=0.28, label=label, color=colour)
        panel.set_yscale("log")
        panel.set_ylabel("probability")
        panel.set_title(
            f"{result.case.verifier.name}, draft {result.case.draft}: p = {result.target.p_value:.3g} against the "
            f"target, {result.control.p_value:.3g} against the drafter",
            fontsize="medium",
        )
        panel.margins(x=0.01)
    panels[0].legend(fontsize="small")
    panels[-1].set_xticks(list(places), [repr(decode(token)) for token in tokens], rotation=60, ha="right")
    for label in panels[-1].get_xticklabels():
        label.set_parse_math(False)  # a dollar sign is a token like others
    figure.suptitle(textwrap.shorten(prompt.text, 100), parse_math=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a token in a script that the font lacks
        figure.savefig(file, dpi=120)
