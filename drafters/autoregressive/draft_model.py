"""A language model while it drafts: it catches up with what was committed, grows nodes, and keeps what was accepted.

Drafters hold one (`crossdraft.DraftModel`) rather than inherit: a chain, K sequences and trees differ in what they
grow, not in how their model follows the text.
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


class DraftModel:
    """B slots of an autoregressive model that follow the loop's sequences.

    Per slot `start`, then per step `root`, `forward` as often as wanted, and `keep`; then `free`.

    Args:
        lm: of `DraftContext.load_lm`, or a fork of the target.
    """

    def __init__(self, lm: LM):
        self.lm = lm
        #: Nodes fed since the root, of every row; those of `forward` count from 0 in the order they are fed.
        self.fed = 0

    @property
    def passes(self) -> int:
        """Forward passes made so far, prefill not counted."""
        return self.lm.passes

    def prefill(self, prompts: Mapping[int, Sequence[int]]) -> None:
        """Feed the first tokens of prompts whose slots begin soon, see `Prefills.prefill`."""
        if (feed := getattr(self.lm, "prefill", None)) is not None:
            feed(prompts)

    def start(self, row: int, prompt: Sequence[int]) -> None:
        self.lm.start(row, prompt)

    def free(self, row: int) -> None:
        self.lm.free(row)

    def root(self, sequences: Sequences) -> Tensor:
        """Feed and keep what was committed since this model last looked; logits ``[B, V]`` after the last token.

        The logits of a free slot mean nothing.
        """
        missing = [h[held:] for h, held in zip(sequences.history, self.lm.lengths, strict=True)]
        counts = [len(tokens) for tokens in missing]  # 0 for a free slot
        width = max(counts)
        # The last column says where a row ends: one copy to the device.
        padded = [[*tokens, *[0] * (width - len(tokens)), max(len(tokens) - 1, 0)] for tokens in missing]
        fed = on_device(padded, sequences.device)
        logits, _ = self.lm.forward(fed[:, :-1])
        self.lm.commit(counts)
        self.fed = 0
        if width == min(counts):
            return logits[:, -1]
        return take_rows(logits, fed[:, -1])

    def forward(self, tokens: Tensor, parents: Tensor | None = None) -> Tensor:
        """Feed nodes ``[B, W]``, see `LM.forward`; logits ``[B, W, V]`` after each of them."""
        self.fed += tokens.shape[1]
        return self.lm.forward(tokens, parents)[0]

    def chain(self, sequences: Sequences, gamma: int, sampling: Sampling, rng: StepRng) -> Draft:
        """The whole of ``propose`` for a drafter of plain chains: gamma tokens for every row that has room for them.

        Drawn from the law that ``sampling`` makes of this model's logits; at temperature 0 the argmax, a point mass.
        """
        policy = LengthPolicy(gamma, sequences.batch_size)
        wanted = policy.wanted(sequences.limit, sequences.occupied)
        if not max(wanted):
            return Draft.empty(sequences.batch_size, sequences.device)
        return grow_chain(self.root(sequences), self.forward, wanted, policy, sampling, rng)

    def commit(
        self, verdict: Verdict, accepted: Sequence[int], place: Tensor | None = None, depth: int | None = None
    ) -> None:
        """Keep the accepted nodes that were fed, and drop the others.

        Args:
            accepted: tau of every row, on the host.
            place: ``[B, N]`` of a tree, in which order each node of the draft was fed, -1 = never; ``None`` = a chain,
                whose nodes were fed in their own order.
            depth: levels of a tree that were fed for certain; a chain's are counted.
        """
        if not self.fed:
            return
        counts = [min(tau, self.fed if depth is None else depth) for tau in accepted]
        if place is None or verdict.path is None:
            self.lm.commit(counts)
            return
        path = functional.pad(place, (1, 0), value=-1).gather(1, verdict.path + 1)
        self.lm.commit(counts, path[:, : max(counts)])
