"""A target's own responses to some prompts, by plain decoding: made once, and kept beside the models."""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UsageError
from ..util.output_files import replace_text

if TYPE_CHECKING:
    from ..contracts.sampling import Sampling

#: Prompts whose responses are decoded at once, and tokens of the responses that the timed start decodes.
ROWS, START = 8, 4


def decoded(
    target: str,
    prompts: str,
    sampling: Sampling,
    *,
    limit: int,
    most: int,
    chat: bool | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Path:
    """A file of the target's responses, of at most ``most`` tokens, to the first ``limit`` prompts of a source.

    ``chat``: see `models.chat.encode`; ``dtype``, ``device`` and ``trust_remote_code``: `load_model`. Raises UsageError
    where it cannot be written, or prompts cannot be read.
    """
    from ..models.device import pick_device, pick_dtype
    from ..models.digests import model_sha256
    from ..models.resolve import resolve
    from ..recipe.prompts import load_prompts
    from ..util.output_files import cache_dir

    found = load_prompts(prompts, limit=limit)
    asked = [prompt.turns[0] for prompt in found]
    facts = [
        model_sha256(resolve(target)),
        asked,
        sampling.model_dump(),
        most,
        str(pick_dtype(dtype, pick_device(device))),
        *([] if chat is None else [chat]),
    ]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir() / "responses" / f"{key}.jsonl"
    if path.is_file():
        say(f"the {len(found)} responses of {target} were decoded before and kept: {path}")
        return path
    say(
        f"decoding {len(found)} responses of at most {most} tokens ({len(found) * most} in all) with "
        f"{target}, temperature {sampling.temperature:g}, no drafts"
    )
    options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    rows = _responses(target, asked, sampling, most, chat, options)
    for row, prompt in zip(rows, found, strict=True):
        row |= {"id": str(prompt.question_id), "category": prompt.category}
    try:
        replace_text(path, "".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    say(f"kept: {path}")
    return path


def _responses(
    name: str, asked: Sequence[str], sampling: Sampling, most: int, chat: bool | None, options: dict[str, Any]
) -> list[dict[str, Any]]:
    from ..api.generate import pair_decoder
    from ..contracts.steps import raise_failed
    from ..models.chat import encode
    from ..models.load import load_model

    target = load_model(name, **options)
    ids = [encode(target.tokenizer, [text], chat=chat) for text in asked]

    def decode(some: Sequence[Sequence[int]], tokens: int) -> list[Any]:
        longest, rows = max(map(len, some)) + tokens, min(ROWS, len(some))
        decoder = pair_decoder(target, "none", None, longest, sampling=sampling, batch_size=rows, max_new_tokens=tokens)
        found = sorted(decoder.run(some, on_error="finish"), key=lambda response: response.index)
        raise_failed(found)
        return found

    first = ids[:ROWS]
    decode(first, 1)  # what is done once does not count
    short, long = (_timed(lambda n=n: decode(first, n)) for n in (1, 1 + START))
    batches = -(-len(ids) // ROWS)
    seconds = batches * (short + max(long - short, 0.0) / START * (most - 1))
    say(f"that takes about {duration(seconds)}, less where responses end before (timed: {START} tokens)")
    found = decode(ids, most)
    settings = sampling.model_dump()
    return [
        {
            "prompt": list(prompt),
            "tokens": response.tokens,
            "finish_reason": response.finish_reason,
            "logprobs": response.logprobs,
            "max_tokens": most,
            **settings,
        }
        for prompt, response in zip(ids, found, strict=True)
    ]


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def duration(seconds: float) -> str:
    """For people."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def say(sentence: str) -> None:
    """Tell on standard error what a command does."""
    print(f"crossdraft: {sentence}", file=sys.stderr, flush=True)
