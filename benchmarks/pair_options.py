"""Options of a target, its draft model and prompts; used by other benchmarks."""

import argparse


def pair_options(description: str | None, dtype: str = "auto") -> argparse.ArgumentParser:
    """A parser of these options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default="smollm2-135m-instruct")
    parser.add_argument("--model", default="smollm2-draft-model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default=dtype)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--prompts", default="builtin")
    return parser
