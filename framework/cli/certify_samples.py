"""``crossdraft certify --samples FILE``: an engine's sampler against the target, see `certificate.foreign_samples`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ..contracts.errors import UsageError
from .certify_model import OWN
from .consent import trusted
from .sampling import sampling_from

if TYPE_CHECKING:
    from torch import Tensor

    from ..certificate.foreign_samples import Draws, Verdict

#: Options that say how the law is made; all others of ``certify`` mean nothing here.
OPTIONS = ("samples", "deviation", "model", "raw", "temperature", "top_k", "top_p", "seed", "dtype", "device", "json")
#: Lines of the table; ``--json`` has all.
SHOWN = 20


def main(args: argparse.Namespace) -> int:
    """0: the draws fit the target; 1: they do not, or are too few to show the deviation that was asked about.

    Raises:
        UsageError: an option, a line of the file or a token that cannot be meant.
        ModelError, NumericalError: a model that cannot be loaded, or says NaN.
    """
    from ..certificate.foreign_samples import LEVEL, judge, read_draws, rows

    _check(args)
    deviation = 0.02 if args.deviation is None else args.deviation
    every = read_draws(args.samples)
    from tqdm import tqdm

    total = sum(len(draws.sequences) + draws.counts.total() for draws in every)
    with tqdm(total=total, unit=" draws", disable=None, leave=False) as bar:
        laws = _laws(args, every)
        verdict = judge(every, laws, deviation=deviation, seed=args.seed, progress=bar.update)
    if args.json:
        found = {"kept": verdict.kept, "conclusive": verdict.conclusive, "p_value": verdict.p_value, "level": LEVEL}
        found |= {"control_p_value": verdict.control, "deviation": deviation, "tests": list(rows(verdict))}
        print(json.dumps(found, indent=2))
    else:
        _print(verdict, deviation)
    return 0 if verdict.kept and verdict.conclusive else 1


def _check(args: argparse.Namespace) -> None:
    other = ("toy", "verifier", "draft", "drafter", "drafter_option", "rounds", "gamma")
    defaults = {**dict.fromkeys(other), "bounds": False, **OWN}
    for name, default in defaults.items():
        if name not in (*OPTIONS, "trust_remote_code") and getattr(args, name) != default:
            raise UsageError(
                f"--{name.replace('_', '-')} means nothing with --samples, whose draws are made; leave it out"
            )
    if args.deviation is not None and not 0 < args.deviation < 0.5:
        raise UsageError(f"--deviation must be above 0 and below 0.5, not {args.deviation:g}")
    trusted(args, [args.model])


def _laws(args: argparse.Namespace, every: Sequence[Draws]) -> Callable[[Draws, Sequence[int]], Tensor]:
    """The target's laws after a prefix and what follows it."""
    import torch

    from ..certificate.first_token_law import laws_after
    from ..decoding.build import make_slots
    from ..models.chat import encode
    from ..models.load import load_model

    sampling = sampling_from(args)
    asked = [draws for draws in every if draws.law is None]
    if not asked:
        if args.model:
            raise UsageError(f"--model: every line of {args.samples} gives its own law; leave it out")
        return lambda draws, tokens: torch.tensor([draws.law])
    if not args.model:
        raise UsageError(f"{asked[0].where}: whose law follows this prefix? Name the target with --model")
    loaded = load_model(
        args.model, dtype=args.dtype, device=args.device, trust_remote_code=args.model in args.trust_remote_code
    )
    prefixes: dict[str, list[int]] = {}
    for draws in asked:
        tokens = draws.prefix
        if isinstance(tokens, str):
            tokens = encode(loaded.tokenizer, [tokens], chat=False if args.raw else None)
        if not tokens:
            raise UsageError(f"{draws.where}: the prompt has no tokens")
        prefixes[draws.where] = tokens
    # What follows the last token of a sequence is not asked for.
    longest = max(len(prefixes[d.where]) + max(map(len, d.sequences), default=1) for d in asked)
    if loaded.context_length is not None and longest - 1 > loaded.context_length:
        raise UsageError(
            f"{longest - 1} tokens are too long for {loaded.name}, whose context is {loaded.context_length}"
        )
    lm = make_slots(loaded, 1, longest)
    for draws in asked:
        reach = max(prefixes[draws.where])
        if reach >= lm.vocab_size:
            raise UsageError(f"{draws.where}: token {reach} is beyond the vocabulary, which has {lm.vocab_size}")

    begun = ""

    def laws(draws: Draws, tokens: Sequence[int]) -> Tensor:
        nonlocal begun
        prefix = prefixes[draws.where]
        if max(tokens, default=0) >= lm.vocab_size:
            raise UsageError(f"{draws.where}: token {max(tokens)} is beyond the vocabulary, which has {lm.vocab_size}")
        if begun != draws.where:
            lm.begin(0, prefix)
            begun = draws.where
        return laws_after(lm, [prefix[-1], *tokens], sampling, f"target '{args.model}'")

    return laws


def _print(verdict: Verdict, deviation: float) -> None:
    from tabulate import tabulate

    from ..certificate.foreign_samples import LEVEL, POWER, rows

    lines = list(rows(verdict))
    table = [
        {
            "draws": line["draws"],
            "n": f"{line['n']:,}",
            "chi-square": "impossible token" if line["chi_square"] is None else f"{line['chi_square']:,.1f}",
            "df": line["degrees_of_freedom"],
            "p": f"{line['p_value']:.3g}",
            "control p": "-" if line["control_p_value"] is None else f"{line['control_p_value']:.3g}",
            "visible": "-" if line["visible"] is None else f"{line['visible']:.4f}",
        }
        for line in lines[:SHOWN]
    ]
    print(tabulate(table, headers="keys", tablefmt="simple", disable_numparse=True))
    if len(lines) > SHOWN:
        print(f"... and {len(lines) - SHOWN} more with greater p")
    print(
        f"visible: the change of the most probable token's share that such draws show {POWER:.0%} of the time; "
        f"control: the same draws against a law in which that share is {deviation:g} off."
    )
    if not verdict.kept:
        print(f"NOT the target's law: p = {verdict.p_value:.3g}, all tests counted.")
    elif verdict.conclusive:
        print(f"The target's law, as far as {deviation:g} goes: p = {verdict.p_value:.3g}, all tests counted.")
    else:
        print(
            f"Unknown: the draws fit the target's law (p = {verdict.p_value:.3g}), and they would fit one that is "
            f"{deviation:g} off, too (p = {verdict.control:.3g}, not below {LEVEL:g}); draw more."
        )
