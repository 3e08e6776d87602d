"""The batched decode loop: one round is draft, score, verify, commit; every row has its own length.

The loop knows the target as an :class:`~crossdraft.framework.contracts.lm.LM`, the drafter and the verifier by their
contracts, and nothing about models, recipes or files. A row that finishes hands its slot to the next prompt,
so a run "at batch size B" really runs B rows while prompts remain. There is one host synchronisation a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..contracts.draft import Draft, Scores, Sequences, Verdict, on_device
from ..contracts.drafter import Drafter
from ..contracts.errors import ContractError, NumericalError, UsageError
from ..contracts.lm import LM
from ..contracts.rng import CounterRng, RngSource
from ..contracts.rounds import Response, Round, RoundEvent
from ..contracts.sampling import Sampling
from ..contracts.verifier import Verifier
from .stopwatch import Stopwatch


@dataclass
class _Slot:
    index: int
    name: str
    prompt_length: int
    wanted: int  # tokens still to generate
    rounds: list[Round] = field(default_factory=list)


class Decoder:
    """B slots, a target, a drafter and a verifier.

    Args:
        target: the model whose distribution the output follows.
        drafter: proposes; built with the same sampling parameters and batch size.
        verifier: decides.
        sampling: turns the target's logits into its law p.
        eos: ids that end a sequence; any of them, wherever it is accepted.
        max_new_tokens: most tokens a sequence may generate.
        rng: the source of randomness; equal seeds give equal random numbers whatever B is.
        stopwatch: phase timer, or None for a fresh one.
        on_round: called after every round with a `RoundEvent`; what it raises ends the run.

    Raises:
        NumericalError: the target or the drafter produced NaN; names the sequence and position.
        ContractError: the drafter returned a draft that breaks the contract.
        UsageError: a prompt is empty or leaves no room in the context.
    """

    def __init__(
        self,
        target: LM,
        drafter: Drafter,
        verifier: Verifier,
        *,
        sampling: Sampling,
        eos: Iterable[int] = (),
        max_new_tokens: int = 128,
        rng: RngSource | None = None,
        stopwatch: Stopwatch | None = None,
        on_round: Callable[[RoundEvent], None] | None = None,
    ):
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.sampling, self.eos, self.max_new_tokens = sampling, frozenset(eos), max_new_tokens
        self.rng = rng if rng is not None else CounterRng(0)
        self.stopwatch = stopwatch or Stopwatch(target.device)
        self.on_round = on_round
        #: What the drafter reads of the target, which other decoders may use for drafters that read something else.
        self.hidden_layers = drafter.traits(drafter.config, sampling).hidden_layers
        b = target.batch_size
        length = drafter.context.max_length
        self.sequences = Sequences(
            history=[[] for _ in range(b)],
            tokens=torch.zeros(b, length, dtype=torch.long, device=target.device),
            limit=[0] * b,
            stream=[0] * b,
        )
        self._slots: list[_Slot | None] = [None] * b
        #: Rounds made by the whole batch, and target positions evaluated in them (rows x (nodes + 1)).
        self.batch_rounds = 0
        self.target_rows = 0

    @property
    def occupied(self) -> int:
        """Slots that hold a sequence."""
        return sum(slot is not None for slot in self._slots)

    def run(
        self,
        prompts: Iterable[Sequence[int]],
        streams: Sequence[int] | None = None,
        names: Sequence[str] | None = None,
    ) -> Iterator[Response]:
        """Decode all prompts (lists of token ids); responses come as they finish, in no particular order.

        ``streams[i]`` is the random stream of prompt i, its position by default; ``names[i]`` is what error messages
        call it.
        """
        queue = list(prompts)
        names = [f"prompt {i}" for i in range(len(queue))] if names is None else names
        for name, prompt in zip(names, queue, strict=True):
            self._check_prompt(name, prompt)
        waiting = iter(enumerate(queue))
        try:
            while True:
                for row, slot in enumerate(self._slots):
                    if slot is None:
                        nxt = next(waiting, None)
                        if nxt is None:
                            break
                        index, prompt = nxt
                        stream = index if streams is None else streams[index]
                        self.begin(row, prompt, index, stream, names[index])
                if not self.occupied:
                    return
                yield from self.round()
        finally:  # a caller that stops early, or an error inside a round, leaves the slots clean
            self.abandon()

    def abandon(self) -> None:
        """Give up every sequence that is not finished: all slots are free again."""
        self.target.keep([0] * self.target.batch_size)
        for row, slot in enumerate(self._slots):
            if slot is not None:
                self._retire(row)

    @torch.inference_mode()
    def begin(self, row: int, prompt: Sequence[int], index: int = 0, stream: int = 0, name: str = "the prompt") -> None:
        """Put a sequence into slot ``row``."""
        self.stopwatch.start()
        prompt = [int(token) for token in prompt]
        self.target.hidden_layers = self.hidden_layers
        hidden = self.target.begin(row, prompt)
        self.sequences.history[row] = []
        self.sequences.append(row, prompt)
        self.sequences.stream[row] = stream
        self.verifier.begin(row)
        self._slots[row] = _Slot(index, name, len(prompt), self.max_new_tokens)
        self._set_limit(row)
        self.stopwatch.mark("prefill")
        self.drafter.begin(row, prompt, hidden)
        self.stopwatch.mark("draft_prefill")

    @torch.inference_mode()
    def round(self) -> list[Response]:
        """Draft, score, verify and commit once for every slot; returns the sequences that finished."""
        clock, seqs = self.stopwatch, self.sequences
        clock.start()
        rng = self.rng.round(seqs.stream, [len(h) for h in seqs.history], self.target.device)
        clock.mark("rest")
        draft = self.drafter.propose(seqs, rng)
        clock.mark("draft")
        scores = self._score(draft)
        clock.mark("target")
        judged = draft.candidates
        verdict = self.verifier.verify(judged, scores.p[:, : judged.width + 1], rng)
        clock.mark("verify")

        accepted, emitted, nodes, depths, finite, honest, survival = self._to_host(judged, scores, verdict)
        self._check_numbers(finite, honest)
        self._check_depth(depths)
        kept = [tau + 1 if slot else 0 for tau, slot in zip(accepted, self._slots, strict=True)]
        self.target.keep(kept, self._kept_path(draft, verdict))
        self.batch_rounds += 1
        self.target_rows += self.occupied * (draft.width + 1)
        finished, committed = [], [[] for _ in self._slots]
        for row, slot in enumerate(self._slots):
            if slot is None:
                continue
            new = committed[row] = self._until_eos(emitted[row][: accepted[row] + 1])
            seqs.append(row, new)
            slot.wanted -= len(new)
            tau, limit = min(accepted[row], len(new)), seqs.limit[row]
            slot.rounds.append(Round(tau, len(new), nodes[row], draft.width, limit, survival[row]))
            self._set_limit(row)
        clock.mark("rest")
        self.drafter.observe(seqs, draft, verdict, accepted, scores)
        clock.mark("draft")
        self.verifier.observe(accepted, nodes)
        if self.on_round is not None:
            prompts = [slot.index if slot else None for slot in self._slots]
            self.on_round(RoundEvent(draft, scores, verdict, prompts, accepted, committed))
        for row, slot in enumerate(self._slots):
            if slot is not None and (finish := self._finish(row, slot)):
                tokens = seqs.history[row][slot.prompt_length :]
                finished.append(Response(slot.index, tokens, finish, slot.rounds))
                self._retire(row, finish)
        clock.mark("rest")
        return finished

    # -- pieces of a round --------------------------------------------------------------------------------

    def _score(self, draft: Draft) -> Scores:
        seqs = self.sequences
        if draft.tokens.shape[0] != seqs.batch_size:
            raise ContractError(f"{self._drafter} drafted {draft.tokens.shape[0]} rows for {seqs.batch_size} slots")
        root = on_device([[h[-1] if h else 0] for h in seqs.history], self.target.device)
        tokens = torch.cat([root, draft.tokens], 1)
        if draft.is_chain:
            parents = None
        else:  # node 0 of the grown tree is the root
            parents = torch.cat([torch.full_like(root, -1), draft.parents + 1], 1)
        logits, hidden = self.target.grow(tokens, parents)
        p, finite = self.sampling.checked_law(logits)
        # Rows that are padded past their own draft compute something there that nobody reads.
        inside = torch.cat([torch.ones_like(root, dtype=torch.bool), draft.valid], 1)
        return Scores(p, (finite | ~inside).all(1), logits, hidden)

    def _to_host(
        self, draft: Draft, scores: Scores, verdict: Verdict
    ) -> tuple[list[int], list[list[int]], list[int], list[int], list[bool], list[bool], list[float | None]]:
        """The round's one synchronisation: per row tau, emitted tokens, nodes, depth, sanity of target and drafter,
        and survival."""
        if draft.width:
            order = torch.arange(draft.width, device=draft.tokens.device).expand_as(draft.tokens)
            path = order if verdict.path is None else verdict.path.clamp(min=0)
            along = draft.tokens.gather(1, path)
        else:
            along = draft.tokens
        emitted = torch.cat([along, torch.zeros_like(verdict.token)[:, None]], 1)
        emitted.scatter_(1, verdict.length[:, None], verdict.token[:, None])
        depth = draft.count if draft.is_chain or not draft.width else torch.where(draft.valid, draft.depth, 0).amax(1)
        known = verdict.survival is not None
        survival = verdict.survival.sum(1) if verdict.survival is not None else torch.zeros_like(depth)
        drafter_finite = torch.ones_like(scores.finite) if draft.finite is None else draft.finite
        # float64 holds every token id exactly.
        meta = [verdict.length, draft.count, depth, scores.finite, drafter_finite, survival]
        host = torch.cat([torch.stack(meta, 1).double(), emitted.double()], 1).tolist()
        return (
            [int(r[0]) for r in host],
            [[int(token) for token in r[6:]] for r in host],
            [int(r[1]) for r in host],
            [int(r[2]) for r in host],
            [bool(r[3]) for r in host],
            [bool(r[4]) for r in host],
            [r[5] if known else None for r in host],
        )

    def _kept_path(self, draft: Draft, verdict: Verdict) -> Tensor | None:
        """Indices, in the grown tree, of the root and the accepted nodes; None if they are its first ones."""
        if verdict.path is None:
            return None
        root = torch.zeros_like(verdict.token)[:, None]
        return torch.cat([root, torch.where(verdict.path >= 0, verdict.path + 1, -1)], 1)

    def _until_eos(self, new: list[int]) -> list[int]:
        for i, token in enumerate(new):
            if token in self.eos:
                return new[: i + 1]
        return new

    def _finish(self, row: int, slot: _Slot) -> str | None:
        history = self.sequences.history[row]
        if history[-1] in self.eos and len(history) > slot.prompt_length:
            return "eos"
        if slot.wanted <= 0:
            return "length"
        if self.target.context_length is not None and len(history) >= self.target.context_length:
            return "context"
        return None

    def _set_limit(self, row: int) -> None:
        slot = self._slots[row]
        assert slot is not None
        room = slot.wanted
        if self.target.context_length is not None:
            # The deepest draft token is fed at position length - 1 + depth, which must stay inside the context.
            room = min(room, self.target.context_length - len(self.sequences.history[row]))
        self.sequences.limit[row] = max(room - 1, 0)

    def _retire(self, row: int, finish: str | None = None) -> None:
        self.target.retire(row)
        self.drafter.retire(row, finish)
        self.verifier.retire(row)
        self.sequences.history[row] = []
        self.sequences.limit[row] = 0
        self._slots[row] = None

    # -- checks -------------------------------------------------------------------------------------------

    @property
    def _drafter(self) -> str:
        return f"drafter '{getattr(self.drafter, 'name', type(self.drafter).__name__)}'"

    def _check_prompt(self, name: str, prompt: Sequence[int]) -> None:
        if not len(prompt):
            raise UsageError(f"{name} is empty; a prompt needs at least one token")
        room = self.target.context_length
        if room is not None and len(prompt) >= room:
            raise UsageError(
                f"{name} has {len(prompt)} tokens, but the target's context is {room} tokens; "
                "shorten the prompt or take a target with a longer context"
            )

    def _check_numbers(self, target: list[bool], drafter: list[bool]) -> None:
        for row, slot in enumerate(self._slots):
            if slot is None or (target[row] and drafter[row]):
                continue
            who = self._drafter if target[row] else "the target"
            position = len(self.sequences.history[row])
            raise NumericalError(
                f"{who} produced NaN or infinite logits for {slot.name} at position {position}; "
                "try dtype float32, another attention implementation, or check the weights"
            )

    def _check_depth(self, depths: list[int]) -> None:
        for row, (depth, limit) in enumerate(zip(depths, self.sequences.limit, strict=True)):
            if self._slots[row] is not None and depth > limit:
                raise ContractError(
                    f"{self._drafter} drafted {depth} tokens deep in slot {row}, but sequences.limit allows {limit}; "
                    "propose() must not exceed the limit of each row"
                )
