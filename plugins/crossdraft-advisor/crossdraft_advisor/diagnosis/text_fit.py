"""Fit of recorded responses to a target: the probability with which it generates them for their prompts.

At temperature 0 each token should be the target's choice, up to rounding; otherwise the log-probability of the tokens
should be near its expectation, minus the entropy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from crossdraft.models import TRANSFORMERS

from ..replay.response import Response
from ..replay.teacher_forcing.lazy_models import Target
from ..replay.teacher_forcing.scoring import prefill_chunks

_ROWS, _CHUNK = 16, 64  # responses in a pass, and tokens
#: Share of tokens that rounding may change, and the least probability of a token, for truncations that differ.
_ROUNDING, _LEAST = 0.01, 1e-6
#: Share of tokens at temperature 0, and standard errors above it, from which on responses are of another target.
_FOREIGN_SHARE, _FOREIGN_ERRORS = 0.9, 5.0
_CLEARLY = math.log(10.0)  # difference of log-likelihoods from which on another dtype fits better


@dataclass(frozen=True)
class TextFit:
    """Fit of responses to a target."""

    log_likelihood: float  # of all tokens
    share: float | None  # of the tokens that are the target's choice; None above temperature 0
    errors: float = 0.0  # standard errors by which the log-likelihood is below its expectation, above temperature 0

    @property
    def foreign(self) -> bool:
        """True if another target, or this one with other prompts, has generated the responses."""
        return self.errors > _FOREIGN_ERRORS if self.share is None else self.share < _FOREIGN_SHARE


@torch.inference_mode()
def fit_texts(target: Target, responses: Sequence[Response]) -> TextFit:
    """Run the target over the responses."""
    sampling = target.sampling
    longest = max(len(response.prompt) + len(response.tokens) for response in responses)
    lm = target.make(_ROWS, longest, _CHUNK + 1).target
    assert lm is not None
    same, tokens, log_p, expected, variance = 0, 0, 0.0, 0.0, 0.0
    for start in range(0, len(responses), _ROWS):
        batch = responses[start : start + _ROWS]
        for number, logits in enumerate(prefill_chunks(lm, batch, _CHUNK)):
            p = sampling.probs(logits)
            for row, response in enumerate(batch):
                part = torch.tensor(response.tokens[number * _CHUNK :][: p.shape[1]], device=p.device)
                at, probs = torch.arange(len(part), device=p.device), p[row, : len(part)].double()
                tokens += len(part)
                if not sampling.temperature:
                    same += int(probs[at, part].sum())
                    continue
                logs = probs.clamp_min(_LEAST).log()
                mean = (probs * logs).sum(-1)
                log_p += float(logs[at, part].sum())
                expected += float(mean.sum())
                variance += float(((probs * logs**2).sum(-1) - mean**2).sum())
    if not sampling.temperature:
        log_likelihood = same * math.log(1 - _ROUNDING) + (tokens - same) * math.log(_ROUNDING)
        return TextFit(log_likelihood, same / max(tokens, 1))
    return TextFit(log_p, None, (expected - log_p) / math.sqrt(variance + 1.0))


def in_dtype_of_responses(
    name: str, target: Target, responses: Sequence[Response], options: dict[str, Any]
) -> tuple[Target, list[str]]:
    """The target in the dtype that fits the responses better: its default, or another; and the reason for another."""
    default = str(target.loaded.model.dtype).removeprefix("torch.") if target.loaded.backend == TRANSFORMERS else ""
    fit = fit_texts(target, responses)
    if not default or fit.share == 1:
        return target, []
    dtype = "bfloat16" if default == "float32" else "float32"
    other = Target(name, target.sampling, dtype=dtype, **options)
    other_fit = fit_texts(other, responses)
    if other_fit.log_likelihood - fit.log_likelihood <= _CLEARLY:
        return target, []
    shares = "" if fit.share is None else f" ({100 * other_fit.share:.1f} % of the tokens, not {100 * fit.share:.1f} %)"  # type: ignore[operator]
    return other, [f"the server computes in {dtype}: {name} generates the responses in it, not in {default}{shares}"]
