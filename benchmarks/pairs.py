"""Options, models, prompts and decoders of a target and a drafter; used by other benchmarks."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from crossdraft import Sampling, load_model, load_prompts
from crossdraft.models import Decoder, encode, pair_decoder

DEFAULTS = {
    "target": "smollm2-135m-instruct",
    "model": "smollm2-draft-model",
    "device": "auto",
    "dtype": "auto",
    "temperature": 1.0,
    "prompts": "builtin",
    "limit": 12,
    "max_new_tokens": 32,
    "batch_size": 4,
}


def arguments(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A parser of `DEFAULTS`, with other ``defaults``; those that are None are left out."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (DEFAULTS | defaults).items():
        if value is not None:
            parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    return parser


class Pair:
    """A loaded target, prompts, and decoders for them with a drafter of ``args.model``."""

    def __init__(self, args: argparse.Namespace):
        self.args, self.target = args, load_model(args.target, device=args.device, dtype=args.dtype)
        prompts = load_prompts(args.prompts)[: args.limit]
        self.prompts = [encode(self.target.tokenizer, prompt.turns[:1]) for prompt in prompts]

    def decoder(self, drafter: Mapping[str, Any], verifier: str, **options: Any) -> Decoder:
        args, longest = self.args, max(map(len, self.prompts)) + self.args.max_new_tokens
        options.setdefault("batch_size", min(getattr(args, "batch_size", 1), len(self.prompts)))
        sampling = Sampling(temperature=args.temperature)
        return pair_decoder(
            self.target, drafter, verifier, longest, sampling=sampling, max_new_tokens=args.max_new_tokens, **options
        )
