"""A drafting language model: feeds committed tokens, computes logits of drafted nodes, commits the accepted ones.

Drafters hold one (`crossdraft.DraftModel`) instead of inheriting from it: chains, K sequences and trees differ in
their drafts, not in how their model follows the sequence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor
from torch.nn import functional

from ...framework.contracts.draft import Draft, Sequences, Verdict, on_device, take_rows
from ...framework.contracts.lm import LM
from ...framework.contracts.rng import StepRng
from ...framework.contracts.sampling import Sampling
from .chains import grow_chain
from .length_policy import LengthPolicy


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
        while counts := fed_before([len(tokens) for tokens in missing], self.lm.lengths, sequences.max_length):
            width = max(counts)
            self.lm.forward(on_device([(tokens + [0] * width)[:width] for tokens in missing], sequences.device))
            self.lm.commit(counts)
            missing = [tokens[n:] for tokens, n in zip(missing, counts, strict=True)]
        counts = [len(tokens) for tokens in missing]  # 0 for a free slot
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
