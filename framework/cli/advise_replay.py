"""Acceptance for ``crossdraft advise`` from responses: recorded ones, or decoded here, replayed with every drafter."""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..contracts.errors import UsageError

if TYPE_CHECKING:
    from ..advise.acceptance import Acceptance
    from ..advise.remarks import Remarks
    from ..contracts.sampling import Sampling
    from ..replay.replay import Candidate
    from ..replay.response import Response

#: Draft lengths that are replayed, from 1 on, and prompts whose responses are decoded at once.
DEEPEST, ROWS = 16, 8
#: Tokens of the responses that the timed start decodes.
START = 4
#: Fewer tokens than this are few.
_FEW_TOKENS = 1000


def acceptances(args: argparse.Namespace, remarks: Remarks) -> list[Acceptance]:
    """Of every drafter with every rule that has an identity, at every draft length up to `DEEPEST`.

    Raises:
        UsageError: responses, drafters or rules that cannot be replayed.
    """
    from ..contracts.sampling import Sampling
    from ..replay.replay import replay
    from ..replay.responses import Reader
    from .replay import alike
    from .replay_candidates import candidates_of

    sampling = None if args.temperature is None else Sampling(temperature=args.temperature)
    name = " and ".join(args.replay or [])
    sources = list(args.replay or [])
    if args.prompts:
        if sampling is None:
            sampling = Sampling()
            remarks.assume("responses are sampled at temperature 1; say --temperature for another")
        sources.append(str(_decoded(args, sampling)))
        name = f"responses of {args.target} to {args.prompts}"
    # What was decoded here was kept with the log P of the law that it was sampled from.
    reader = Reader(target=args.target or "", sampling=sampling, processed=not args.replay)
    responses = reader.read(sources)
    first = next(responses, None)
    if first is None:
        raise UsageError(f"{name}: there is no response to replay")
    sampling = sampling or first.sampling
    candidates = candidates_of(
        args.drafter, args.verifier or [], range(1, DEEPEST + 1), sampling=sampling, target=args.target or reader.target
    )
    rules = sum(len(candidate.rules) for candidate in candidates)
    _say(f"replaying {len(candidates)} drafters, {rules} pairs, gamma 1 to {DEEPEST}; nothing is decoded for that")
    seen = _Seen()
    found = replay(seen.along(alike(chain([first], responses), sampling)), candidates, by_prompt=True)
    for count, what in ((v, k) for k, v in reader.assumed.items()):
        remarks.assume(f"{count} responses {what}")
    if found.tokens < _FEW_TOKENS:
        remarks.warn(f"{name}: {found.tokens} tokens are few; replay more before deciding")
    if seen.cut == found.responses:
        remarks.warn(f"{name}: no response reached its end; with a greater length acceptance may differ")
    if seen.random:
        remarks.warn(f"{name}: prompts look like random tokens: what follows them is no text, and no guide")
    temperature = None if sampling is None else sampling.temperature
    return [one for candidate in found.candidates for one in _of(candidate, name, temperature, sampling, remarks)]


def _of(
    candidate: Candidate, name: str, temperature: float | None, sampling: Sampling | None, remarks: Remarks
) -> Iterator[Acceptance]:
    from ..advise.acceptance import Acceptance
    from ..contracts.sampling import Sampling

    cls, config = candidate.drafter
    traits = cls.traits(config, sampling or Sampling())
    options = config.model_dump(exclude_unset=True, mode="json")
    for (rule, k), tally in candidate.tallies.items():
        if k > 1:
            remarks.warn(f"{candidate.title} × {rule}: several sequences are replayed, and not priced here; run them")
            continue
        for gamma in candidate.gammas:
            rows = tally.by_prompt(gamma)
            if not rows[:, 0].sum():
                remarks.warn(f"{name}: no response is long enough for drafts of {gamma} tokens")
                break
            yield Acceptance.from_rows(
                rows.tolist(),
                name,
                drafter=cls.name,
                verifier=rule,
                model=str(options.get("model", "")),
                temperature=temperature,
                point_mass=traits.point_mass,
                options={key: value for key, value in options.items() if key not in ("model", "gamma")},
            )


class _Seen:
    """What is to be known of the responses, seen while they go by."""

    def __init__(self) -> None:
        self.cut = self._repeated = self._prompt = 0

    def along(self, responses: Iterator[Response]) -> Iterator[Response]:
        for response in responses:
            self.cut += not response.ended
            self._prompt += len(response.prompt)
            self._repeated += len(response.prompt) - len(set(response.prompt))
            yield response

    @property
    def random(self) -> bool:
        """A text of hundreds of tokens says some of them again and again; tokens drawn from a vocabulary hardly."""
        return self._prompt >= 500 and self._repeated < 0.05 * self._prompt


# -- responses that are decoded here -----------------------------------------------------------------------------


def _decoded(args: argparse.Namespace, sampling: Sampling) -> Path:
    """A file of the target's responses to the prompts by plain decoding; made once for the same question."""
    from ..models.device import cache_dir
    from ..models.digests import weights_sha256
    from ..models.resolve import resolve
    from ..runs.prompts import load_prompts

    prompts = load_prompts(args.prompts, limit=args.responses)
    asked = [prompt.turns[0] for prompt in prompts]
    facts = [weights_sha256(resolve(args.target).path), asked, sampling.model_dump(), args.max_new_tokens, 1]
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    path = cache_dir() / "responses" / f"{key}.jsonl"
    if path.is_file():
        _say(f"the {len(prompts)} responses of {args.target} were decoded before and kept: {path}")
        return path
    most = len(prompts) * args.max_new_tokens
    _say(
        f"decoding {len(prompts)} responses of at most {args.max_new_tokens} tokens ({most} in all) with "
        f"{args.target}, temperature {sampling.temperature:g}, no drafts"
    )
    rows = _responses(args.target, asked, sampling, args.max_new_tokens)
    for row, prompt in zip(rows, prompts, strict=True):
        row |= {"id": str(prompt.question_id), "category": prompt.category}
    aside = path.with_name(f".{path.name}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        aside.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        aside.replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror or error}") from None
    _say(f"kept: {path}")
    return path


def _responses(name: str, asked: Sequence[str], sampling: Sampling, most: int) -> list[dict[str, Any]]:
    from ..contracts.rounds import raise_failed
    from ..decoding.generate import pair_decoder
    from ..models.chat import encode
    from ..models.load import load_model

    target = load_model(name)
    ids = [encode(target.tokenizer, [text], []) for text in asked]

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
    _say(f"that takes about {_duration(seconds)}, less where responses end before (timed: {START} tokens)")
    found = decode(ids, most)
    settings = sampling.model_dump()
    return [
        {
            "prompt": list(prompt),
            "tokens": response.tokens,
            "finish": response.finish,
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


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} minutes"


def _say(sentence: str) -> None:
    print(f"crossdraft: {sentence}", file=sys.stderr, flush=True)
