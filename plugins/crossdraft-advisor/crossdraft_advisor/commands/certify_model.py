"""``crossdraft certify-model``: goodness-of-fit test of the first token, see `samples.first_token_check`."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from crossdraft import Argument, Command, Table, UsageError
from crossdraft.commands import MOST_SEED, JsonOptions, SamplingOptions, TrustOptions

from ..report import Report

if TYPE_CHECKING:
    from crossdraft import Sampling

    from ..samples.first_token_check import PromptDistributions, Result

SHOWN_TOKENS = 30  # tokens whose counts are in the JSON, the target's most probable ones


class CertifyModel(SamplingOptions, TrustOptions, JsonOptions, Command):
    """Goodness-of-fit test of the first token of a real model."""

    name: ClassVar[str] = "certify-model"

    model: Annotated[str, Argument("MODEL", positional=True)] = Field(
        description="target: a name, a directory or a Hub id"
    )
    drafter: Annotated[str, Argument("MODEL")] = Field(
        description="draft model, which must share the target's tokenizer"
    )
    verifier: Annotated[tuple[str, ...], Argument("NAME")] = Field(
        (), description="verifier to test (repeatable; default: all declared lossless)"
    )
    draft: Annotated[tuple[str, ...], Argument("LABEL")] = Field(
        (), description="label of crossdraft certify (repeatable; default: one that the verifier accepts)"
    )
    gamma: int = Field(1, ge=1, le=64, description="draft length; block and token verification agree for 1")
    prompt: Annotated[tuple[str, ...], Argument("TEXT")] = Field((), description="prompt (repeatable)")
    raw: bool = Field(False, description="do not apply the chat template")
    draws: int = Field(1_000_000, ge=1, le=10**12, description="samples per prompt and verifier")
    seed: Annotated[int, MOST_SEED] = Field(0, ge=0, description="random seed")
    batch: int | None = Field(
        None, ge=1, le=2**20, description="samples per batch (default: depends on the vocabulary size)"
    )
    dtype: str = Field("auto", description="dtype of the models")
    device: str = Field("auto", description="device")

    def run(self) -> int:
        """Return 1 if a verifier that is declared lossless is rejected (p < 1e-6), or a control is not; else 0.

        Raises UsageError: an invalid option, name or pair; if possible before a model is loaded. Raises ModelError: a
        model that cannot be loaded, or a draft model with another tokenizer. Raises NumericalError: a model that
        returns NaN. Raises ContractError: a strategy that violates its contract.
        """
        self.trusted([self.model, self.drafter])
        if not self.prompt or not all(self.prompt):
            raise UsageError("--prompt is missing or empty: give at least one text")
        if not self.temperature:
            raise UsageError("--temperature must be above 0 for a distribution that can be tested, got 0")
        return _run(self)


def _run(options: CertifyModel) -> int:
    from ..samples.first_token_check import REJECTED, check_counts, choose, sample

    sampling, drafter = options.sampling, options.drafter
    cases, skipped = choose(options.verifier, options.draft, options.gamma)
    for reason in skipped:
        print(f"crossdraft: skipped: {reason}", file=sys.stderr)
    if not cases:
        raise UsageError("nothing to test: all pairs were skipped")

    prompts, decode = _prompts(options, drafter, sampling)
    from tqdm import tqdm

    from crossdraft import CounterRng

    results_by_prompt, seconds = [], []
    total = len(prompts) * len(cases) * options.draws
    with tqdm(total=total, unit=" samples", unit_scale=True, disable=None, leave=False) as bar:
        for number, prompt in enumerate(prompts):
            bar.set_description(f"prompt {number + 1} of {len(prompts)}")
            start = time.perf_counter()
            counts = sample(
                prompt.p,
                prompt.q,
                cases,
                options.draws,
                rng=CounterRng(options.seed),
                batch=options.batch,
                position=prompt.length,
                first_stream=number * options.draws,
                progress=bar.update,
            )
            seconds.append(time.perf_counter() - start)
            results_by_prompt.append([check_counts(*pair, prompt) for pair in zip(cases, counts, strict=True)])

    records = {
        "written_by": "crossdraft certify-model",
        "model": options.model,
        "drafter": drafter,
        "gamma": options.gamma,
        "samples": options.draws,
        "seed": options.seed,
        "sampling": sampling.model_dump(),
        "rejected_below": REJECTED,
        "prompts": [
            _record(prompt, results, decode) | {"samples_per_second": len(cases) * options.draws / max(elapsed, 1e-9)}
            for prompt, results, elapsed in zip(prompts, results_by_prompt, seconds, strict=True)
        ],
    }
    tables = zip(prompts, results_by_prompt, records["prompts"], strict=True)
    text = "".join(_table(*of_prompt, options.draws) + "\n\n" for of_prompt in tables)
    Report(lambda: text.removesuffix("\n"), lambda: records).emit(options)
    return 1 if any(result.bad for results in results_by_prompt for result in results) else 0


def _prompts(
    options: CertifyModel, drafter: str, sampling: Sampling
) -> tuple[list[PromptDistributions], Callable[[int], str]]:
    """Both models' next-token distributions after every prompt, and a function that decodes a token."""
    from crossdraft import load_model
    from crossdraft.models import TargetContext, encode, load_draft_model, make_slots

    from ..samples.first_token_check import PromptDistributions, next_token_probs

    consent = frozenset(options.trust_remote_code)
    target = load_model(
        options.model, dtype=options.dtype, device=options.device, trust_remote_code=options.model in consent
    )
    tokenizer: Any = target.tokenizer
    encoded = []
    for text in options.prompt:
        tokens = encode(tokenizer, [text], chat=False if options.raw else None)
        if not tokens:
            raise UsageError(f"--prompt {text!r} has no tokens; give at least one")
        if target.context_length is not None and len(tokens) > target.context_length:
            raise UsageError(
                f"--prompt {text[:40]!r} has {len(tokens)} tokens, more than the context length of {target.name}, "
                f"{target.context_length}; shorten it"
            )
        encoded.append(tokens)
    longest = max(map(len, encoded)) + 1
    lm = make_slots(target, 1, longest)
    load = partial(load_draft_model, trust_remote_code=drafter in consent)
    context = TargetContext.of(target, lm, sampling, slot=longest, sequence=longest - 1, load=load)
    draft_model = context.load_lm(drafter)
    prompts = []
    for text, tokens in zip(options.prompt, encoded, strict=True):
        distributions = []
        for model, title in ((lm, f"target '{options.model}'"), (draft_model, f"drafter '{drafter}'")):
            model.start(0, tokens)
            distributions.append(next_token_probs(model, tokens[-1:], sampling, title)[0])
        prompts.append(PromptDistributions(text, len(tokens), *distributions))
    return prompts, lambda token: str(tokenizer.decode([token]))


def _record(prompt: PromptDistributions, results: Sequence[Result], decode: Callable[[int], str]) -> dict[str, Any]:
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


def _most_probable(prompt: PromptDistributions) -> list[int]:
    return prompt.p.topk(min(SHOWN_TOKENS, int((prompt.p > 0).sum()))).indices.tolist()


def _table(prompt: PromptDistributions, results: Sequence[Result], record: dict[str, Any], samples: int) -> str:
    title = (
        f"{prompt.text!r}: {samples:,} samples of the first token, {record['possible_tokens']:,} possible tokens; "
        f"TV of drafter and target {record['tv_of_drafter_and_target']:.3f}; "
        f"{record['samples_per_second']:,.0f} samples/s"
    )
    rows = [
        {
            "verifier": result.case.verifier.name,
            "draft": result.case.draft,
            "sd": f"{result.target.sd:.2e}",
            "(expected)": f"{result.target.expected_sd:.2e}",
            "chi-square": f"{result.target.chi_square:,.1f}",
            "df": str(result.target.degrees_of_freedom),
            "p": f"{result.target.p_value:.3g}",
            "control chi-square": f"{result.control.chi_square:,.1f}",
            "control p": f"{result.control.p_value:.3g}",
            "lossless": result.verdict,
        }
        for result in results
    ]
    return f"{title}\n{Table.of(rows).text()}"
