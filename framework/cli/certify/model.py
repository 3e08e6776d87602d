"""``crossdraft certify --model``: goodness-of-fit test of the first token, see `certificate.first_token_check`."""

from __future__ import annotations

import argparse
import json
import math
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import UsageError
from ...util.output_files import check_output, writing_output
from ..options.run import output_folder
from ..options.sampling import sampling_from
from ..options.trust import add_trust_argument, trusted

if TYPE_CHECKING:
    from ...certificate.first_token_check import PromptDistributions, Result
    from ...contracts.sampling import Sampling


#: Tokens shown in a histogram, the target's most probable ones.
SHOWN_TOKENS = 30
#: Limits of the draft length, of samples, and of samples per batch.
MAX_GAMMA, MAX_SAMPLES, MAX_BATCH = 64, 10**12, 2**20
#: Marks output files, so that `util.output_files.check_output` recognises them.
_MARK = "crossdraft certify"
#: Options that require ``--model``, with their defaults.
DEFAULTS = {
    "prompt": None,
    "raw": False,
    "draws": 1_000_000,
    "temperature": 1.0,
    "top_k": 0,
    "top_p": 1.0,
    "seed": 0,
    "batch": None,
    "dtype": "auto",
    "device": "auto",
    "out": None,
    "force": False,
    "trust_remote_code": [],
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``parser`` does not have yet."""
    group = parser.add_argument_group("test on a real model")

    def option(*names: str, **spec: Any) -> None:
        with suppress(argparse.ArgumentError):
            group.add_argument(*names, **spec)

    option("--model", metavar="NAME", help="target: a name, a directory or a Hub id")
    option("--drafter", metavar="NAME", help="draft model, which must share the target's tokenizer")
    option("--verifier", action="append", metavar="NAME", help="repeatable (default: all declared lossless)")
    option("--draft", action="append", metavar="LABEL", help="repeatable (default: one compatible with the verifier)")
    option("--prompt", action="append", metavar="TEXT", help="prompt (repeatable)")
    option("--raw", action="store_true", help="do not apply the chat template")
    option("--draws", type=int, metavar="N", help="samples per prompt and verifier (default: 1000000)")
    option(
        "--gamma", type=int, metavar="N", help="draft length (default: 1, for which block and token verification agree)"
    )
    option("--temperature", type=float, metavar="T", help="temperature of both models (default: 1)")
    option("--top-k", type=int, metavar="K", help="top-k of both models (default: 0, off)")
    option("--top-p", type=float, metavar="P", help="top-p of both models (default: 1, off)")
    option("--seed", type=int, metavar="N", help="random seed (default: 0)")
    option("--batch", type=int, metavar="N", help="samples per batch (default: depends on the vocabulary size)")
    option("--dtype", help="dtype of the models (default: auto)")
    option("--device", help="device (default: auto)")
    option("--out", type=Path, metavar="DIR", help="directory for histograms (PNG) and JSON")
    option("--force", action="store_true", help="overwrite files that this command did not write")
    option("--json", action="store_true", help="print JSON")
    add_trust_argument(group)
    parser.set_defaults(**DEFAULTS)


def check_unused(args: argparse.Namespace) -> None:
    """Raise UsageError for options that require ``--model``."""
    for option, default in DEFAULTS.items():
        if getattr(args, option) != default:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} requires --model; add it, or remove --{name}")


def main(args: argparse.Namespace) -> int:
    """Return 1 if a verifier that is declared lossless is rejected (p < 1e-6), or a control is not; else 0.

    Raises:
        UsageError: an invalid option, name or pair; if possible before a model is loaded.
        ModelError: a model that cannot be loaded, or a draft model with another tokenizer.
        NumericalError: a model that returns NaN.
        ContractError: a strategy that violates its contract.
    """
    sampling = _checked(args)
    from ...certificate.first_token_check import REJECTED, check_counts, choose, sample

    drafter = args.drafter
    if drafter is None:
        raise UsageError(f"--drafter is missing: give a draft model that shares the tokenizer of {args.model}")
    cases, skipped = choose(args.verifier, args.draft, drafter, args.gamma or 1)
    for reason in skipped:
        print(f"crossdraft: skipped: {reason}", file=sys.stderr)
    if not cases:
        raise UsageError("nothing to test: all pairs were skipped")

    prompts, decode = _prompts(args, drafter, sampling)
    from tqdm import tqdm

    from ...contracts.rng import CounterRng

    results_by_prompt, seconds = [], []
    total = len(prompts) * len(cases) * args.draws
    with tqdm(total=total, unit=" samples", unit_scale=True, disable=None, leave=False) as bar:
        for number, prompt in enumerate(prompts):
            bar.set_description(f"prompt {number + 1} of {len(prompts)}")
            start = time.perf_counter()
            counts = sample(
                prompt.p,
                prompt.q,
                cases,
                args.draws,
                rng=CounterRng(args.seed),
                batch=args.batch,
                position=prompt.length,
                first_stream=number * args.draws,
                progress=bar.update,
            )
            seconds.append(time.perf_counter() - start)
            results_by_prompt.append([check_counts(*pair, prompt) for pair in zip(cases, counts, strict=True)])

    records = {
        "written_by": _MARK,
        "model": args.model,
        "drafter": drafter,
        "gamma": args.gamma or 1,
        "samples": args.draws,
        "seed": args.seed,
        "sampling": sampling.model_dump(),
        "rejected_below": REJECTED,
        "prompts": [
            _record(prompt, results, decode) | {"samples_per_second": len(cases) * args.draws / max(elapsed, 1e-9)}
            for prompt, results, elapsed in zip(prompts, results_by_prompt, seconds, strict=True)
        ],
    }
    if args.out:
        with writing_output(args.out / "model_law.json", "--out") as file:
            file.write((json.dumps(records, indent=2) + "\n").encode("utf-8"))
        for number, (prompt, results) in enumerate(zip(prompts, results_by_prompt, strict=True), 1):
            _draw(args.out / f"prompt-{number}.png", prompt, results, decode, args.model, drafter)
    if args.json:
        print(json.dumps(records, indent=2))
    else:
        for prompt, results, record in zip(prompts, results_by_prompt, records["prompts"], strict=True):
            _print_table(prompt, results, record, args.draws)
    return 1 if any(result.bad for results in results_by_prompt for result in results) else 0


def _checked(args: argparse.Namespace) -> Sampling:
    """Check the options before a model is loaded, and return the sampling parameters."""
    from ...certificate.effort import shown

    if not args.model:
        raise UsageError("--model is missing: give the target to test")
    trusted(args, [args.model, args.drafter])
    if not args.prompt or not all(args.prompt):
        raise UsageError("--prompt is missing or empty: give at least one text")
    for option in ("toy", "steps", "drafter_option"):
        if getattr(args, option, None) is not None:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} is for the exact toy models and cannot be used with --model; remove it")
    for option, limit in (("draws", MAX_SAMPLES), ("gamma", MAX_GAMMA), ("batch", MAX_BATCH)):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UsageError(f"--{option} must be at least 1, got {shown(value)}")
        if value is not None and value > limit:
            raise UsageError(
                f"--{option} must be at most {limit:,}, got {shown(value)}: more would run out of time or memory"
            )
    if not 0 < args.temperature < math.inf:
        raise UsageError(
            f"--temperature must be positive and finite for a distribution that can be tested, got {args.temperature:g}"
        )
    if args.out:
        folder = output_folder(args.out)
        names = ["model_law.json", *(f"prompt-{number}.png" for number in range(1, len(args.prompt) + 1))]
        for name in names:
            inputs = [args.model, args.drafter or ""]
            check_output(folder / name, "--out", inputs=inputs, mark=_MARK.encode(), force=args.force)
    return sampling_from(args)


def _prompts(
    args: argparse.Namespace, drafter: str, sampling: Sampling
) -> tuple[list[PromptDistributions], Callable[[int], str]]:
    """Both models' next-token distributions after every prompt, and a function that decodes a token."""
    from ...api.build import TargetContext, load_draft_model, make_slots
    from ...certificate.first_token_check import PromptDistributions, next_token_probs
    from ...models.chat import encode
    from ...models.load import load_model

    consent = frozenset(args.trust_remote_code)
    target = load_model(args.model, dtype=args.dtype, device=args.device, trust_remote_code=args.model in consent)
    tokenizer: Any = target.tokenizer
    encoded = []
    for text in args.prompt:
        tokens = encode(tokenizer, [text], chat=False if args.raw else None)
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
    for text, tokens in zip(args.prompt, encoded, strict=True):
        distributions = []
        for model, title in ((lm, f"target '{args.model}'"), (draft_model, f"drafter '{drafter}'")):
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


def _print_table(prompt: PromptDistributions, results: Sequence[Result], record: dict[str, Any], samples: int) -> None:
    from tabulate import tabulate

    print(
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
    print(tabulate(rows, headers="keys", tablefmt="simple", disable_numparse=True))
    print()


def _draw(
    file: Path,
    prompt: PromptDistributions,
    results: Sequence[Result],
    decode: Callable[[int], str],
    model: str,
    drafter: str,
) -> None:
    """Three histograms per case over the target's most probable tokens: samples, target, drafter."""
    import warnings

    from matplotlib.figure import Figure

    tokens = _most_probable(prompt)
    positions = range(len(tokens))
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
            panel.bar([x + shift for x in positions], heights, width=0.28, label=label, color=colour)
        panel.set_yscale("log")
        panel.set_ylabel("probability")
        panel.set_title(
            f"{result.case.verifier.name}, draft {result.case.draft}: p = {result.target.p_value:.3g} against the "
            f"target, {result.control.p_value:.3g} against the drafter",
            fontsize="medium",
        )
        panel.margins(x=0.01)
    panels[0].legend(fontsize="small")
    panels[-1].set_xticks(list(positions), [repr(decode(token)) for token in tokens], rotation=60, ha="right")
    for label in panels[-1].get_xticklabels():
        label.set_parse_math(False)  # a dollar sign is not TeX
    figure.suptitle(textwrap.shorten(prompt.text, 100), parse_math=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph")  # a script that the font does not have
        with writing_output(file, "--out") as file_object:
            figure.savefig(file_object, format="png", dpi=120, metadata={"Software": _MARK})
