"""``crossdraft export-model KIND MODEL``: write a trained drafter as a checkpoint that serving engines load."""

from __future__ import annotations

import argparse
from pathlib import Path

from .. import plugins
from ..errors import UsageError
from ..util.input_files import path_of
from .options.run import output_folder


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", metavar="KIND", help="kind of drafter, as in crossdraft train")
    parser.add_argument("model", metavar="MODEL", help="registered name, directory or Hub id of the trained drafter")
    parser.add_argument("--target", required=True, help="name, directory or Hub id of its target")
    parser.add_argument("--out", required=True, type=Path, help="new or empty directory for the checkpoint")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16", help="dtype of the written weights"
    )
    parser.add_argument("--force", action="store_true", help="replace files of a directory that is not empty")


def main(args: argparse.Namespace) -> int:
    """Return 0. Raises UsageError for a kind without such a checkpoint or a directory that is not empty."""
    config = plugins.get("trainers", args.kind)
    out = path_of(args.out)
    if out.is_dir() and any(out.iterdir()) and not args.force:
        raise UsageError(f"--out {out}: is not empty; use a new directory, or add --force to replace its files")

    from ..models.load import load_model
    from ..models.resolve import resolve
    from ..training.files import staged

    heads = resolve(args.model, heads=True).path
    for name, path in ((args.model, heads), (args.target, resolve(args.target).path)):
        if path.resolve() == out.resolve():
            raise UsageError(f"--out {out}: is the directory of {name}; use another one")
    target = load_model(args.target, dtype=args.dtype, device="cpu")
    with staged(output_folder(out)) as directory:
        note = config.export_servable(args.model, target, directory)
    print(f"{args.kind} written to {out}; {note}")
    return 0
