"""Acceptance for ``crossdraft advise`` from responses: recorded ones, or decoded here, replayed with every drafter."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING

from ...errors import UsageError
from ..baseline_responses import decoded, say
from ..trust_args import trusted_beside

if TYPE_CHECKING:
    from ...advise.acceptance import Acceptance
    from ...advise.caveats import Remarks
    from ...contracts.sampling import Sampling
    from ...replay.replay import Candidate
    from ...replay.response import Response

#: Draft lengths that are replayed, from 1 on.
DEEPEST = 16
#: Fewer tokens than this are few.
_FEW_TOKENS = 1000


def acceptances(args: argparse.Namespace, remarks: Remarks) -> list[Acceptance]:
    """Of every drafter with every rule that has an identity, at every draft length up to `DEEPEST`.

    Raises:
        UsageError: responses, drafters or rules that cannot be replayed.
    """
    from ...contracts.sampling import Sampling
    from ...replay.replay import replay
    from ...replay.responses import Reader
    from ..replay.candidates import candidates_of
    from ..replay.command import alike

    consent = trusted_beside(args, args.target)
    sampling = None if args.temperature is None else Sampling(temperature=args.temperature)
    name = " and ".join(args.replay or [])
    sources = list(args.replay or [])
    if args.prompts:
        if sampling is None:
            sampling = Sampling()
            remarks.assume("responses are sampled at temperature 1; say --temperature for another")
        path = decoded(
            args.target,
            args.prompts,
            sampling,
            limit=args.responses,
            most=args.max_new_tokens,
            trust_remote_code=args.target in consent,
        )
        sources.append(str(path))
        name = f"responses of {args.target} to {args.prompts}"
    # What was decoded here was kept with the log P of the law that it was sampled from.
    reader = Reader(
        target=args.target or "",
        sampling=sampling,
        processed=not args.replay,
        trust_remote_code=args.target in consent,
    )
    responses = reader.read(sources)
    first = next(responses, None)
    if first is None:
        raise UsageError(f"{name}: there is no response to replay")
    sampling = sampling or first.sampling
    candidates = candidates_of(
        args.drafter,
        args.verifier or [],
        range(1, DEEPEST + 1),
        sampling=sampling,
        target=args.target or reader.target,
        trust_remote_code=consent,
    )
    rules = sum(len(candidate.verifiers) for candidate in candidates)
    say(f"replaying {len(candidates)} drafters, {rules} pairs, gamma 1 to {DEEPEST}; nothing is decoded for that")
    seen = _Seen()
    found = replay(seen.along(alike(chain([first], responses), sampling)), candidates, by_prompt=True)
    for count, what in ((v, k) for k, v in reader.assumed.items()):
        remarks.assume(f"{count} responses {what}")
    if found.log_p.warning:
        remarks.warn(f"{name}: {found.log_p.warning}")
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
    from ...advise.acceptance import Acceptance
    from ...contracts.sampling import Sampling

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
