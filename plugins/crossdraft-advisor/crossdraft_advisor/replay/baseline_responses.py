"""Responses of a target by plain decoding, cached on disk."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crossdraft import UsageError
from crossdraft.commands import replace_text
from crossdraft.framework.util.releases import release
from crossdraft.runs import duration

from ..report import log

if TYPE_CHECKING:
    from crossdraft import Sampling

#: Distributions whose code determines the responses.
_RELEASES = ("crossdraft", "torch", "transformers", "tokenizers")
#: Batch size, and the tokens per response that are decoded to estimate the duration.
BATCH_SIZE, TIMED_TOKENS = 8, 4


def baseline_responses(
    target: str,
    prompts: str,
    sampling: Sampling,
    *,
    limit: int,
    maximum: int,
    chat: bool | None = None,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
) -> Path:
    """Return a JSONL file of the target's responses to the first ``limit`` prompts of a source, decoded if not cached.

    Cached ones are of the same model, options and `_RELEASES`, and their file is as it was written: its name ends with
    its digest. ``maximum``: new tokens per response; ``chat``: see `models.chat.encode`. Raises UsageError for prompts
    that cannot be read, or a file that cannot be written.
    """
    from crossdraft import cache_dir, load_prompts
    from crossdraft.models import model_sha256, pick_device, pick_dtype, resolve, settings_sha256, weights_sha256
    from crossdraft.runs import refuse_constraints

    rows = load_prompts(prompts, limit=limit)
    refuse_constraints(rows, "plain decoding by this command")
    texts = [prompt.turns[0] for prompt in rows]
    names = [{"id": str(prompt.question_id), "category": prompt.category} for prompt in rows]
    resolved = resolve(target)
    key_parts = [
        model_sha256(resolved),
        settings_sha256(resolved.path),
        texts,
        names,
        sampling.model_dump(),
        maximum,
        [str(pick_device(device)), str(pick_dtype(dtype, pick_device(device)))],
        {name: release(name) for name in _RELEASES},
        chat,
    ]
    key, folder = _digest(json.dumps(key_parts, sort_keys=True).encode()), cache_dir() / "responses"
    for path in folder.glob(f"{key}-*.jsonl"):
        if weights_sha256(path)[:16] == path.stem.partition("-")[2]:
            log(f"using {len(rows)} cached responses of {target}: {path}")
            return path
        log(f"the cached responses {path} are damaged; decoding them again")
    log(
        f"decoding {len(rows)} responses of at most {maximum} tokens ({len(rows) * maximum} in total) with "
        f"{target}, temperature {sampling.temperature:g}, without drafting"
    )
    options = {"dtype": dtype, "device": device, "trust_remote_code": trust_remote_code}
    responses = _decode(target, texts, sampling, maximum, chat, options)
    for response, name in zip(responses, names, strict=True):
        response |= name
    text = "".join(json.dumps(response) + "\n" for response in responses)
    path = folder / f"{key}-{_digest(text.encode())}.jsonl"
    try:
        replace_text(path, text)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    log(f"saved: {path}")
    return path


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def _decode(
    name: str, texts: Sequence[str], sampling: Sampling, maximum: int, chat: bool | None, options: dict[str, Any]
) -> list[dict[str, Any]]:
    from crossdraft import generate, load_model
    from crossdraft.models import encode

    target, settings = load_model(name, **options), sampling.model_dump()
    ids = [encode(target.tokenizer, [text], chat=chat) for text in texts]

    decode = partial(generate, target, drafter="none", batch_size=BATCH_SIZE, **settings)

    def seconds(tokens: int) -> float:
        """Seconds of the first batch."""
        start = time.perf_counter()
        decode(ids[:BATCH_SIZE], max_new_tokens=tokens)
        return time.perf_counter() - start

    seconds(1)  # warm up
    short, long = (seconds(tokens) for tokens in (1, 1 + TIMED_TOKENS))
    expected = -(-len(ids) // BATCH_SIZE) * (short + max(long - short, 0.0) / TIMED_TOKENS * (maximum - 1))
    log(f"estimated time: {duration(expected)} or less (from {TIMED_TOKENS} timed tokens)")
    responses = decode(ids, max_new_tokens=maximum)
    return [
        {
            "prompt": list(prompt),
            "tokens": response.tokens,
            "finish_reason": response.finish_reason,
            "logprobs": response.logprobs,
            "max_tokens": maximum,
            **settings,
        }
        for prompt, response in zip(ids, responses, strict=True)
    ]
