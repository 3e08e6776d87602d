"""Build a datastore for the drafter ``rest``.

python -m crossdraft_rest build --tokenizer MODEL --corpus FILE|DIRECTORY|hf:org/name --out DIR
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from crossdraft import CrossdraftError, UsageError

from . import corpus
from .datastore import build, tokenizer_sha256


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m crossdraft_rest", description="datastores for the drafter 'rest'")
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "build", help="index a corpus", description="Write the tokens of a corpus and their suffix array into DIR."
    )
    command.add_argument("--tokenizer", metavar="MODEL", help="the target model")
    command.add_argument("--corpus", required=True, help="a text or JSON Lines file, a directory, or hf:org/name")
    command.add_argument("--out", required=True, type=Path, metavar="DIR", help="new directory for the datastore")
    command.add_argument(
        "--column", default="text", help="column of a row with a text, texts or messages (default: text)"
    )
    command.add_argument("--split", default="train", help="split of a data set (default: train)")
    command.add_argument("--tokens", type=int, metavar="N", help="stop after N tokens")
    command.add_argument("--ids", action="store_true", help="rows hold token ids, a list 'tokens'; no tokenizer")
    args = parser.parse_args(argv)
    try:
        print(_build(args))
    except CrossdraftError as error:
        print(f"crossdraft_rest: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _build(args: argparse.Namespace) -> str:
    if args.ids == (args.tokenizer is not None):
        raise UsageError("give --tokenizer MODEL for texts, or --ids if rows hold token ids")
    if args.tokens is not None and args.tokens < 1:
        raise UsageError(f"--tokens {args.tokens}: must be at least 1")
    about = {"corpus": args.corpus, "column": args.column, "split": args.split, "tokenizer": args.tokenizer}
    if args.ids:
        digest, documents = "", corpus.ids(args.corpus, args.split)
    else:
        from crossdraft import load_tokenizer

        tokenizer = load_tokenizer(args.tokenizer).tokenizer
        digest = tokenizer_sha256(tokenizer)
        documents = _encoded(tokenizer, corpus.texts(args.corpus, args.column, args.split))
    n = build(_first(documents, args.tokens), args.out, tokenizer=digest, about=about)
    size = sum(file.stat().st_size for file in args.out.iterdir())
    return f"{n:,} tokens in {args.out}, {size / 2**20:.1f} MiB"


def _encoded(tokenizer: Any, texts: Iterable[tuple[str, str]]) -> Iterator[list[int]]:
    for place, text in texts:
        try:
            yield tokenizer(text, add_special_tokens=False)["input_ids"]
        except Exception as error:  # e.g. half a surrogate pair
            raise UsageError(f"{place}: the text cannot be tokenized: {type(error).__name__}: {error}") from None


def _first(documents: Iterable[Sequence[int]], maximum: int | None) -> Iterator[Sequence[int]]:
    """Yield documents up to ``maximum`` tokens; None = all."""
    count = 0
    for document in documents:
        if maximum is not None and count + len(document) >= maximum:
            yield document[: maximum - count]
            return
        count += len(document)
        yield document


if __name__ == "__main__":
    raise SystemExit(main())
