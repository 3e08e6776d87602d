"""A small language model drafts a chain, token by token.

Y. Leviathan, M. Kalman, Y. Matias, "Fast Inference from Transformers via Speculative Decoding", ICML 2023;
C. Chen et al., "Accelerating Large Language Model Decoding with Speculative Sampling", 2023. Any model that
shares the target's tokenizer will do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from ..framework.decoding.sampling import Sampling
from ..framework.draft import Draft, Scores, Sequences, Verdict, on_device
from ..framework.drafter import DraftContext, Drafter, DraftTraits, StrategyConfig
from ..framework.errors import NumericalError
from ..framework.rng import RoundRng


class SmallLM(Drafter):
    """Autoregressive drafting with gamma forward passes of a cheaper model.

    At temperature 0 it takes the argmax and reports a point mass, otherwise it samples and reports the law it
    sampled from, warped like the target's.
    """

    name = "small-lm"
    #: Is the draft length settled before the first token is drawn?
    fixed_length: ClassVar[bool] = True

    class Config(StrategyConfig):
        model: str = Field(description="name, directory or Hub id of a model that shares the target's tokenizer")
        gamma: int = Field(default=5, ge=0, description="draft length")
        temperature: float | None = Field(None, ge=0, description="drafting temperature; default: the target's")

    config: Config

    def __init__(self, config: StrategyConfig, context: DraftContext):
        super().__init__(config, context)
        self.lm = context.load_lm(self.config.model)
        self.sampling = context.sampling.at(self.config.temperature)

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        point_mass = sampling.at(config.temperature).temperature == 0
        return DraftTraits(drawn="chain", point_mass=point_mass, nodes=config.gamma, replayable=cls.fixed_length)

    @property
    def passes(self) -> int:
        return self.lm.passes

    def begin(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.lm.begin(row, prompt)

    def retire(self, row: int) -> None:
        self.lm.retire(row)

    def propose(self, sequences: Sequences, rng: RoundRng) -> Draft:
        steps = min(self.config.gamma, max(sequences.limit))
        self._pending, self._fed = [0] * sequences.batch_size, 0
        sampled = self.sampling.temperature > 0
        one_more = sampled and self.context.final_law and self._any_short(sequences)
        if steps == 0 and not one_more:
            return Draft.empty(sequences.batch_size, sequences.device)
        length = on_device(sequences.limit, sequences.device).clamp(max=steps)
        going = torch.ones_like(length, dtype=torch.bool)
        logits = self._catch_up(sequences)
        drafted, laws = [], []
        for i in range(steps + one_more):
            q = self._law(logits, sequences, i)
            laws.append(q)
            if i == steps:
                break
            token = rng.draw(q, "draft", i) if sampled else q.argmax(-1)
            drafted.append(token)
            going = going & self.goes_on(logits, q, token)
            # A row that stops here keeps this token: dropping a token after looking at it is not lossless.
            length = torch.where(going, length, length.clamp(max=i + 1))
            if i + 1 == steps + one_more or self._all_stopped(going):
                break
            logits = self.lm.grow(token[:, None])[0][:, 0]
            self._fed += 1
        tokens = torch.stack(drafted, 1) if drafted else sequences.tokens[:, :0]
        return Draft.chain(tokens, length.clamp(max=len(drafted)), torch.stack(laws, 1) if sampled else None)

    def _any_short(self, sequences: Sequences) -> bool:
        """Must some sequence draft less than gamma tokens?"""
        return any(h and limit < self.config.gamma for h, limit in zip(sequences.history, sequences.limit, strict=True))

    def goes_on(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        """``[B]`` bool: draft another one after ``token [B]``, drawn from ``q [B, V]``? A static gamma always does."""
        return torch.ones_like(token, dtype=torch.bool)

    def _all_stopped(self, going: Tensor) -> bool:
        return False  # a static draft length never asks the device

    def _catch_up(self, sequences: Sequences) -> Tensor:
        """Feed what was committed since this model last looked; logits ``[B, V]`` after the last token."""
        missing = [h[held:] for h, held in zip(sequences.history, self.lm.lengths, strict=True)]
        self._pending = [len(tokens) for tokens in missing]  # 0 for a free slot
        width = max(self._pending)
        padded = [tokens + [0] * (width - len(tokens)) for tokens in missing]
        if width == min(self._pending):
            return self.lm.grow(on_device(padded, sequences.device))[0][:, -1]
        # Ragged: commit the new tokens at once, so that the draft's nodes start at each row's own end.
        logits, _ = self.lm.grow(on_device(padded, sequences.device))
        self.lm.keep(self._pending)
        last = on_device(self._pending, sequences.device) - 1
        self._pending = [0] * len(missing)
        return logits[torch.arange(len(missing), device=sequences.device), last]

    def observe(
        self, sequences: Sequences, draft: Draft, verdict: Verdict, accepted: Sequence[int], scores: Scores
    ) -> None:
        # The last drafted token is fed only for `final_law`; otherwise it is caught up once it was accepted.
        if self._fed or any(self._pending):
            self.lm.keep([p + min(tau, self._fed) for p, tau in zip(self._pending, accepted, strict=True)])

    # -- for drafters that grow trees with the same model ---------------------------------------------------

    def _root(self, sequences: Sequences) -> Tensor:
        """Commit what is missing; logits ``[B, V]`` after the last token. Nodes grown next count from 0."""
        logits = self._catch_up(sequences)
        if any(self._pending):
            self.lm.keep(self._pending)
            self._pending = [0] * sequences.batch_size
        return logits

    def _keep(self, place: Tensor, verdict: Verdict, counts: Sequence[int]) -> None:
        """Commit the first ``counts[b]`` accepted nodes; ``place [B, N]`` is where each was fed, -1 = never."""
        if verdict.path is None:  # a chain was grown in its own order
            self.lm.keep(counts)
            return
        path = place.gather(1, verdict.path.clamp(min=0))
        wanted = on_device(list(counts), path.device)[:, None]
        order = torch.arange(path.shape[1], device=path.device)
        self.lm.keep(counts, torch.where(order < wanted, path, -1)[:, : max(counts)])

    def _law(self, logits: Tensor, sequences: Sequences, step: int) -> Tensor:
        """Logits ``[B, .., V]`` -> the law that tokens are drawn from; raises NumericalError where it can see a NaN."""
        q, finite = self.sampling.checked_law(logits)
        self._check(finite, sequences, step)
        return q

    def _check(self, finite: Tensor, sequences: Sequences, step: int) -> None:
        finite = finite.view(finite.shape[0], -1).all(1)
        if finite.device.type == "cpu" and not finite.all():
            row = (
                next(i for i, h in enumerate(sequences.history) if h and not finite[i]) if any(sequences.history) else 0
            )
            raise NumericalError(
                f"drafter model '{self.config.model}' produced NaN logits in slot {row}, draft position {step}; "
                "try dtype float32 or check the weights"
            )
