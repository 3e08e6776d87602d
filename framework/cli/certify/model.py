"""``crossdraft certify --model``: the law of the first token on a real model, see `certificate.first_token_check`."""

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
from ..run_args import output_folder
from ..sampling_args import sampling_from
from ..trust_args import add_consent, trusted

if TYPE_CHECKING:
    from ...certificate.first_token_check import PromptLaws, Result
    from ...contracts.sampling import Sampling


#: Tokens shown in a histogram, the target's most probable ones.
SHOWN = 30
#: Most tokens of a draft, samples, and samples at once; beyond, a test would not end or not fit.
LONGEST, MOST_SAMPLES, MOST_AT_ONCE = 64, 10**12, 2**20
#: In the files that are written: `util.output_files.check_output` recognises them by it.
_MARK = "crossdraft certify"
#: Options of this test that mean nothing without ``--model``, and what they are if nobody gives them.
OWN = {
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
    option("--draws", type=int, metavar="N", help="per prompt and verifier (default: 1000000)")
    option("--gamma", type=int, metavar="N", help="draft length (default: 1, where block and token rules agree)")
    option("--temperature", type=float, metavar="T", help="of both models (default: 1)")
    option("--top-k", type=int, metavar="K", help="of both models (default: 0, off)")
    option("--top-p", type=float, metavar="P", help="of both models (default: 1, off)")
    option("--seed", type=int, metavar="N", help="of all random numbers (default: 0)")
    option("--batch", type=int, metavar="N", help="samples drawn at once (default: by the vocabulary's size)")
    option("--dtype", help="of the models (default: auto)")
    option("--device", help="of the models and the rules (default: auto)")
    option("--out", type=Path, metavar="DIR", help="write histograms (PNG) and JSON here")
    option("--force", action="store_true", help="replace files there that this command did not write, too")
    option("--json", action="store_true", help="print JSON")
    group.add_argument(
        "--samples",
        type=Path,
        metavar="FILE",
        help="test what somebody else's sampler drew: JSONL with prompt, prefix or law, and counts or samples",
    )
    group.add_argument(
        "--deviation",
        type=float,
        metavar="D",
        help="with --samples: the total variation that the sampler must be within (default: 0.02)",
    )
    group.add_argument(
        "--first-tokens",
        action="store_true",
        help="with --samples: let the first tokens of sequences, which come from the prefill pass, decide, too",
    )
    add_consent(group)
    parser.set_defaults(**OWN)


def refuse_options(args: argparse.Namespace) -> None:
    """Raise UsageError for what was asked of a real model, where there is none."""
    for option, default in OWN.items():
        if getattr(args, option) != default:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} is for the law on a real model; name one with --model, or leave --{name} out")


def main(args: argparse.Namespace) -> int:
    """Run the test; 1 if a verifier that is declared lossless loses the law (p < 1e-6), or a control is not rejected.

    Raises:
        UsageError: an option, name or pair that cannot be meant; before any model is loaded where possible.
        ModelError: a model that cannot be loaded, or a drafter with another tokenizer.
        NumericalError: a model that says NaN.
        ContractError: a strategy that drafts or emits what its contract forbids.
    """
    sampling = _checked(args)
    from ...certificate.first_token_check import REJECTED, choose, judge, sample

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

    from ...contracts.rng import CounterRng

    found, seconds = [], []
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
            found.append([judge(case, of_case, prompt) for case, of_case in zip(cases, counts, strict=True)])

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
            _record(prompt, results, decode) | {"samples_per_second": len(cases) * args.draws / max(spent, 1e-9)}
            for prompt, results, spent in zip(prompts, found, seconds, strict=True)
        ],
    }
    if args.out:
        with writing_output(args.out / "model_law.json", "--out") as file:
            file.write((json.dumps(records, indent=2) + "\n").encode("utf-8"))
        for number, (prompt, results) in enumerate(zip(prompts, found, strict=True), 1):
            _draw(args.out / f"prompt-{number}.png", prompt, results, decode, args.model, drafter)
    if args.json:
        print(json.dumps(records, indent=2))
    else:
        for prompt, results, record in zip(prompts, found, records["prompts"], strict=True):
            _print_table(prompt, results, record, args.draws)
    return 1 if any(result.bad for results in found for result in results) else 0


def _checked(args: argparse.Namespace) -> Sampling:
    """The sampling parameters of the command line, once everything that needs no model is known to be usable."""
    from ...certificate.effort import shown

    if not args.model:
        raise UsageError("--model is missing: name the target whose law is to be tested")
    trusted(args, [args.model, args.drafter])
    if not args.prompt or not all(args.prompt):
        raise UsageError("--prompt is missing or empty: give at least one text")
    for option in ("toy", "steps", "drafter_option"):
        if getattr(args, option, None) is not None:
            name = option.replace("_", "-")
            raise UsageError(f"--{name} is for the exact models; leave it out with --model")
    for option, most in (("draws", MOST_SAMPLES), ("gamma", LONGEST), ("batch", MOST_AT_ONCE)):
        value = getattr(args, option)
        if value is not None and value < 1:
            raise UsageError(f"--{option} must be at least 1, got {shown(value)}")
        if value is not None and value > most:
            raise UsageError(f"--{option} must be at most {most:,}, got {shown(value)}: it would not end, or not fit")
    if not 0 < args.temperature < math.inf:
        raise UsageError(
            f"--temperature must be above 0 and finite for a law that can be tested, got {args.temperature:g}"
        )
    if args.out:
        folder = output_folder(args.out)
        names = ["model_law.json", *(f"prompt-{number}.png" for number in range(1, len(args.prompt) + 1))]
        for name in names:
            read = [args.model, args.drafter or ""]
            check_output(folder / name, "--out", inputs=read, mark=_MARK.encode(), force=args.force)
    return sampling_from(args)


def _prompts(
    args: argparse.Namespace, drafter: str, sampling: Sampling
) -> tuple[list[PromptLaws], Callable[[int], str]]:
    """What both models say after every prompt, and how a token reads."""
    from ...api.build import TargetContext, load_draft_model, make_slots
    from ...certificate.first_token_check import PromptLaws, laws_after
    from ...models.chat import encode
    from ...models.load import load_model

    consent = frozenset(args.trust_remote_code)
    target = load_model(args.model, dtype=args.dtype, device=args.device, trust_remote_code=args.model in consent)
    tokenizer: Any = target.tokenizer
    encoded = []
    for text in args.prompt:
        tokens = encode(tokenizer, [text], chat=False if args.raw else None)
        if not tokens:
            raise UsageError(f"the prompt {text!r} has no tokens; a prompt needs at least one")
        if target.context_length is not None and len(tokens) > target.context_length:
            raise UsageError(
                f"the prompt {text[:40]!r} has {len(tokens)} tokens, but {target.name} has a context of "
                f"{target.context_length}; shorten it"
            )
        encoded.append(tokens)
    longest = max(map(len, encoded)) + 1
    lm = make_slots(target, 1, longest)
    load = partial(load_draft_model, trust_remote_code=drafter in consent)
    context = TargetContext.of(target, lm, sampling, slot=longest, sequence=longest - 1, load=load)
    small = context.load_lm(drafter)
    prompts = []
    for text, tokens in zip(args.prompt, encoded, strict=True):
        laws = []
        for model, who in ((lm, f"target '{args.model}'"), (small, f"drafter '{drafter}'")):
            model.start(0, tokens)
            laws.append(laws_after(model, tokens[-1:], sampling, who)[0])
        prompts.append(PromptLaws(text, len(tokens), *laws))
    return prompts, lambda token: str(tokenizer.decode([token]))


def _record(prompt: PromptLaws, results: Sequence[Result], decode: Callable[[int], str]) -> dict[str, Any]:
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


def _most_probable(prompt: PromptLaws) -> list[int]:
    return prompt.p.topk(min(SHOWN, int((prompt.p > 0).sum()))).indices.tolist()


def _print_table(prompt: PromptLaws, results: Sequence[Result], record: dict[str, Any], samples: int) -> None:
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


def _draw(
    file: Path, prompt: PromptLaws, results: Sequence[Result], decode: Callable[[int], str], model: str, drafter: str
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
        with writing_output(file, "--out") as opened:
            figure.savefig(opened, format="png", dpi=120, metadata={"Software": _MARK})
