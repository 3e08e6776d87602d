"""A drafting language model, and chains that are drawn from one under a length policy.

The model feeds committed tokens, computes logits of drafted nodes and commits the accepted ones. Drafters hold one
(`crossdraft.DraftModel`) instead of inheriting from it: chains, K sequences and trees differ in their drafts, not in
how their model follows the sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...framework.contracts.draft import Draft, Sequences, Verdict, on_device, take_rows
from ...framework.contracts.drafter import DraftContext, Drafter
from ...framework.contracts.lm import LM
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from ...framework.util.tensors import Gathered


def fed_before(missing: Sequence[int], lengths: Sequence[int], max_length: int) -> list[int]:
    """Tokens of each row to feed in a pass of their own before the others; empty if one pass over all of them fits.

    After steps without drafts, a row may lack many tokens. A pass is as wide as its widest row, and lies behind the
    longest sequence in slots of ``max_length`` tokens. Every row keeps its last token for the last pass.

    Args:
        missing: number of committed tokens that each row lacks; ``lengths``: number that it holds.
    """
    free = max(max_length - max(lengths), 1)
    return [] if max(missing) <= free else [min(max(n - 1, 0), free) for n in missing]


class DraftModel:
    """B slots of an autoregressive model that follow the sequences of the decoder.

    Per slot: `start`, then per step `root`, any number of `forward`, and `commit`; then `free`.

    Args:
        lm: from `DraftContext.load_lm`, or a fork of the target.
    """

    def __init__(self, lm: LM):
        self.lm = lm
        #: Nodes fed to every row since the root; `forward` numbers nodes from 0 in the order they are fed.
        self.fed = 0

    @property
    def passes(self) -> int:
        """Forward passes so far, without prefill."""
        return self.lm.passes

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Feed the first tokens of prompts before their slots `start`, see `Prefills.prefill`."""
        if (feed := getattr(self.lm, "prefill", None)) is not None:
            feed(prompts)

    def start(self, row: int, prompt: Sequence[int]) -> None:
        self.lm.start(row, prompt)

    def free(self, row: int) -> None:
        self.lm.free(row)

    def root(self, sequences: Sequences) -> Tensor:
        """Feed and commit the tokens committed since the last call; return logits ``[B, V]`` after the last token.

        The logits of a free slot are meaningless.
        """
        missing = [h[length:] for h, length in zip(sequences.history, self.lm.lengths, strict=True)]
        while counts := fed_before(list(map(len, missing)), self.lm.lengths, sequences.max_length):
            width = max(counts)
            self.lm.forward(on_device([(tokens + [0] * width)[:width] for tokens in missing], sequences.device))
            self.lm.commit(counts)
            missing = [tokens[n:] for tokens, n in zip(missing, counts, strict=True)]
        counts = list(map(len, missing))  # 0 for a free slot
        width = max(counts)
        # The last column holds the last index of a row: one copy to the device.
        padded = [[*tokens, *[0] * (width - len(tokens)), max(len(tokens) - 1, 0)] for tokens in missing]
        fed = on_device(padded, sequences.device)
        logits, _ = self.lm.forward(fed[:, :-1])
        self.lm.commit(counts)
        self.fed = 0
        if width == min(counts):
            return logits[:, -1]
        return take_rows(logits, fed[:, -1])

    def forward(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Feed nodes ``[B, W]``, see `LM.forward`; return logits ``[B, W, V]`` after each of them."""
        self.fed += tokens.shape[1]
        return self.lm.forward(tokens, parents)[0]

    def chain(self, sequences: Sequences, gamma: int, sampling: Sampling, rng: StepRng) -> Draft:
        """Draft a chain of gamma tokens per row, or its limit: a complete ``propose`` for a plain chain drafter.

        Tokens are drawn from ``sampling.probs`` of this model's logits; at temperature 0 the argmax, a point mass.
        """
        policy = LengthPolicy(gamma, sequences.batch_size)
        lengths = policy.draft_lengths(sequences.limit, sequences.occupied)
        if not max(lengths):
            return Draft.empty(sequences.batch_size, sequences.device)
        return grow_chain(self.root(sequences), self.forward, lengths, policy, sampling, rng)

    def commit(
        self, verdict: Verdict, accepted: Sequence[int], fed_index: Tensor | None = None, depth: int | None = None
    ) -> None:
        """Commit the accepted nodes that were fed, and drop the others.

        Args:
            accepted: tau of every row, on the host.
            fed_index: ``[B, N]`` for a tree, the position of each node in the order of feeding, -1 = not fed;
                ``None`` = a chain, fed in its own order.
            depth: number of levels of a tree that were fed completely; counted for a chain.
        """
        if not self.fed:
            return
        counts = [min(tau, self.fed if depth is None else depth) for tau in accepted]
        if fed_index is None or verdict.path is None:
            self.lm.commit(counts)
            return
        path = functional.pad(fed_index, (1, 0), value=-1).gather(1, verdict.path + 1)
        self.lm.commit(counts, path[:, : max(counts)])


class ModelDrafter(Drafter):
    """Base of the drafters that hold a model, and perhaps a length policy."""

    model: DraftModel
    policy: LengthPolicy | None = None

    @property
    def passes(self) -> int:
        return self.model.passes

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        self.model.prefill(prompts)

    def start(self, row: int, prompt: Sequence[int], hidden: Tensor | None = None) -> None:
        self.model.start(row, prompt)
        if self.policy is not None:
            self.policy.start(row)

    def free(self, row: int, finish_reason: str | None = None) -> None:
        self.model.free(row)


class LengthPolicy:
    """Draft lengths of one drafter, with per-slot state if a subclass needs it. The base class is ``static``.

    Args:
        gamma: maximum draft length.
        batch_size: B.

    Attributes:
        fixed: True if gamma and the row's limit determine the length, so that drafts are replayable.
        stops_early: True if `should_continue` can return False.
        keeps_last: True if the token at which a row stops stays in the draft.
        position_free: True if `should_continue` depends on logits, q and token only, not on the position in the draft.
        adapts: True if the length depends on earlier steps or on the other rows.
        remembers: True if other sequences change the lengths, earlier ones (until `reset`) or those in the batch.
    """

    fixed, stops_early, keeps_last, position_free, adapts, remembers = True, False, True, True, False, False

    def __init__(self, gamma: int, batch_size: int):
        self.gamma, self.batch_size = gamma, batch_size

    @property
    def waits(self) -> int:
        """Waits for the device: after every token but the last one, and for the length of a draft without its last."""
        return max(self.gamma - self.keeps_last, 0) if self.stops_early else 0

    def load(self, context: DraftContext) -> None:
        """Load what the policy needs beside its options, once. Raises UsageError if it cannot be loaded."""

    def start(self, row: int) -> None:
        """Start a new sequence in slot ``row``."""

    def reset(self) -> None:
        """Forget state learnt from earlier sequences, see `Drafter.reset`."""

    def draft_lengths(self, limit: Sequence[int], rows: int) -> list[int]:
        """Maximum draft length of each row in this step.

        Args:
            limit: ``sequences.limit``.
            rows: number of occupied slots.
        """
        return [min(self.gamma, bound) for bound in limit]

    def should_continue(self, logits: Tensor, q: Tensor, token: Tensor) -> Tensor:
        """``[B]`` bool: True to draft another token after ``token [B]``, drawn from ``q [B, V]``.

        ``q`` was computed from ``logits [B, V]``; at temperature 0 it is their softmax.
        """
        raise NotImplementedError("this policy does not stop early")

    def observe(self, accepted: Sequence[int], lengths: Sequence[int]) -> None:
        """Update the state after a step, given tau of each slot and the `draft_lengths` of the step."""


def grow_chain(
    root: Tensor,
    expand: Callable[[Tensor], Tensor],
    lengths: Sequence[int],
    policy: LengthPolicy,
    sampling: Sampling,
    rng: StepRng,
    *,
    final_q: bool = False,
) -> Draft:
    """Draft a chain for every row, token by token; at temperature 0 the argmax, as a point mass.

    Args:
        root: ``[B, V]`` logits after the last committed token.
        expand: feeds ``tokens [B, 1]`` after the previous ones and returns logits ``[B, 1, V]``.
        lengths: maximum draft length of each row, see `LengthPolicy.draft_lengths`.
        sampling: warps logits into the distribution q that tokens are drawn from.
        final_q: append the distribution after the last token, see `DraftContext.final_q`.
    """
    steps, sampled = max(lengths), sampling.temperature > 0
    length = on_device(list(lengths), root.device)
    going = torch.ones_like(length, dtype=torch.bool) if policy.stops_early else None
    logits, drafted, q_rows = root, [], Gathered(steps + final_q)
    finite: list[Tensor] = []  # at temperature 0; otherwise q is checked
    for i in range(steps + final_q):
        if sampled:
            q = sampling.probs(logits)
            q_rows.add(q[:, None])
        else:
            q, is_finite = sampling.checked_probs(logits)
            finite.append(is_finite)
        if i == steps:
            break
        token = rng.draw(q, "draft", i) if sampled else q.argmax(-1)
        drafted.append(token)
        if going is not None:
            # At temperature 0 q is one-hot; the confidence is the softmax of the logits.
            going = going & policy.should_continue(logits, q if sampled else logits.float().softmax(-1), token)
            # A token whose value decided must stay. A token drawn after its row had stopped can be dropped.
            length = torch.where(going, length, length.clamp(max=i + policy.keeps_last))
            if i + 1 < steps + final_q and not bool(going.any()):
                break
        if i + 1 < steps + final_q:
            logits = expand(token[:, None])[:, 0]
    width = len(drafted)
    if width < steps:
        length = length.clamp(max=width)
    if policy.stops_early and not policy.keeps_last and width:
        width = int(length.max())  # one more host sync, fewer target rows
    tokens = torch.stack(drafted, 1)[:, :width] if drafted else length.new_empty(len(length), 0)
    q = q_rows.tensor() if sampled else None
    sound = (sampling.sound(q) if q is not None else torch.stack(finite, 1)).all(1)
    q = None if q is None else q[:, : width + final_q]
    return Draft.chain(tokens, length, q, finite=sound)
