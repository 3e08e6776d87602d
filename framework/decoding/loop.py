"""The batched decode loop: one round is draft, score, verify, commit; every row has its own length.

The loop knows the target as an :class:`~crossdraft.framework.contracts.lm.LM`, the drafter and the verifier by their
contracts, and nothing about models, recipes or files. A row that finishes hands its slot to the next prompt,
so a run "at batch size B" really runs B rows while prompts remain. There is one host synchronisation a round.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch.nn import functional

from ..contracts.draft import Draft, Scores, Sequences, Verdict, on_device
from ..contracts.drafter import Drafter
from ..contracts.errors import ContractError, ModelError, NumericalError, UsageError
from ..contracts.limits import PREFILL_TOKENS
from ..contracts.lm import LM
from ..contracts.rng import CounterRng, RngSource, RoundRng
from ..contracts.rounds import Request, Response, Round, RoundEvent
from ..contracts.sampling import Sampling
from ..contracts.verifier import Verifier
from .forms import Watch, check_draft, check_prompt, check_verdict
from .fused import Fused
from .judging import judge, scored
from .prefill import Prefill
from .processors import Processors
from .slots import Slot
from .stopwatch import Stopwatch
from .transfer import check_rows, failures, kept_path, to_host
from .validation import validate_draft, validate_verdict

#: ``validate="sampled"``: these first rounds of a decoder, and every so many-th one, are validated.
FIRST, EVERY = 8, 64
#: When drafts and verdicts are validated, and what happens to the others where a row's numbers cannot be right.
VALIDATE, ON_ERROR = ("sampled", "always", "never"), ("raise", "finish")


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
        processors: what the target's logits go through before they become p, see `Processors`.
        validate: in which rounds every value of drafts and verdicts is checked (`validation`), which waits for the
            device: ``"sampled"``, the decoder's first 8 and every 64th after; ``"always"``; ``"never"``. Their form,
            NaN, counts and emitted tokens are checked in every round, for nothing.
        prefill_tokens: most tokens of a prefill pass. Prompts that begin together share passes, longer ones go in
            pieces, one between two rounds. They then change each other by rounding; 0 = each goes by itself, at once.

    Raises:
        NumericalError: the target or the drafter produced NaN, or a q is no law; names the sequence and position.
        ContractError: the drafter returned a draft, or the verifier a verdict, that breaks the contract.
        UsageError: a prompt is empty or leaves no room in the context; an option that there is not.
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
        processors: Processors | None = None,
        validate: str = "sampled",
        prefill_tokens: int = PREFILL_TOKENS,
    ):
        if validate not in VALIDATE:
            raise UsageError(f"validate is one of {', '.join(VALIDATE)}, not {validate!r}")
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.sampling, self.eos, self.max_new_tokens = sampling, frozenset(eos), max_new_tokens
        self.rng = rng if rng is not None else CounterRng(0)
        self.stopwatch = stopwatch or Stopwatch(target.device)
        self.on_round, self.processors, self.validate = on_round, processors, validate
        self.traits = drafter.traits(drafter.config, sampling)
        rule = verifier.rule if isinstance(verifier, Fused) else verifier  # of compiled code, what was compiled
        promised = rule.traits(rule.config)
        self._lossless, self._stateful = promised.lossless, promised.stateful
        self._claimed, self._claim = (drafter, rule), object()
        drafter.claim = rule.claim = self._claim
        #: What the drafter reads of the target, which other decoders may use for drafters that read something else.
        self.hidden_layers = self.traits.hidden_layers
        b, length = target.batch_size, drafter.context.max_length
        self.sequences = Sequences(
            history=[[] for _ in range(b)],
            tokens=torch.zeros(b, length, dtype=torch.long, device=target.device),
            limit=[0] * b,
            stream=[0] * b,
        )
        self._slots: list[Slot | None] = [None] * b
        self._prefill = Prefill(target, drafter, self.stopwatch, prefill_tokens)
        self._made, self._on_error = 0, "raise"  # rounds that were started
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
        on_error: str = "raise",
    ) -> Iterator[Response]:
        """Decode all prompts (lists of token ids); responses come as they finish, in no particular order.

        ``streams[i]`` is the random stream of prompt i, its position by default; ``names[i]`` is what error messages
        call it. Where the numbers of one sequence cannot be right (NaN), ``on_error="raise"`` raises NumericalError at
        once; ``"finish"`` ends that sequence with ``Response.error``, and the others go on.
        """
        queue = list(prompts)
        streams = range(len(queue)) if streams is None else streams
        names = [f"prompt {i}" for i in range(len(queue))] if names is None else names
        for name, prompt in zip(names, queue, strict=True):
            check_prompt(name, prompt, self.target.context_length)
        waiting = (Request(prompt, i, streams[i], names[i]) for i, prompt in enumerate(queue))
        with closing(self.rounds(waiting, on_error)) as rounds:
            for finished in rounds:
                yield from finished

    def rounds(
        self, waiting: Iterable[Request | None], on_error: str = "raise", interleaved: Callable[[], bool] = bool
    ) -> Generator[list[Response], None, None]:
        """Round after round, with what finished in each: free slots take what is ``waiting`` and passed `check_prompt`.

        ``None`` in it: none at the moment, ask again after the next round (at once where no slot is occupied).
        ``interleaved``: do other decoders wait for a turn (by default none)? Then a prefill pass is a step, too.
        """
        if on_error not in ON_ERROR:
            raise UsageError(f"on_error is one of {', '.join(ON_ERROR)}, not {on_error!r}")
        if self.occupied:
            raise UsageError("this decoder is in the middle of other sequences; finish that run, or abandon() it")
        self._on_error, source, last = on_error, iter(waiting), Request(())
        try:
            while True:
                request, taken = None, self._prefill.rows
                for row in [row for row, slot in enumerate(self._slots) if slot is None and row not in taken]:
                    request = next(source, last)
                    if request is None or request is last:
                        break
                    self._prefill.add(row, request)
                if self._prefill.rows:
                    self._check_claim()
                    self.target.hidden_layers = self.hidden_layers
                    self._prefill.begin(self.begin, waited_for=self.occupied > 0 or interleaved())
                if self.occupied or self._prefill.rows:
                    yield self.round() if self.occupied else []
                elif request is last:
                    return
        finally:  # a caller that stops early, or an error inside a round, leaves the slots clean
            self.abandon()

    def abandon(self) -> None:
        """Give up every sequence that is not finished: all slots are free again, as in a new decoder."""
        self._on_error = "raise"
        rows = [row for row, history in enumerate(self.sequences.history) if history]
        for row in rows:  # before anybody is told, who might raise
            self._free(row)
        self.target.keep([0] * self.target.batch_size)
        self._prefill.give_up()
        for row in rows:
            self._retired(row)

    @torch.inference_mode()
    def begin(
        self,
        row: int,
        prompt: Sequence[int],
        index: int = 0,
        stream: int = 0,
        name: str = "the prompt",
        most: int | None = None,
        eos: Collection[int] | None = None,
    ) -> None:
        """Put a sequence into slot ``row``; ``most`` tokens and ``eos`` of its own, or the decoder's."""
        self._check_claim()
        self.stopwatch.start()
        prompt = [int(token) for token in prompt]
        self.target.hidden_layers = self.hidden_layers
        hidden = self.target.begin(row, prompt)
        self.sequences.history[row] = []
        self.sequences.append(row, prompt)
        self.sequences.stream[row] = stream
        self.verifier.begin(row)
        logprobs = [] if self.sampling.temperature else None
        wanted, eos = self.max_new_tokens if most is None else most, self.eos if eos is None else eos
        slot = Slot(index, name, len(prompt), wanted, eos, self.target.context_length, logprobs)
        self._slots[row], self.sequences.limit[row] = slot, slot.limit(len(prompt))
        self.stopwatch.mark("prefill")
        self.drafter.begin(row, prompt, hidden)
        self.stopwatch.mark("draft_prefill")

    @torch.inference_mode()
    def round(self) -> list[Response]:
        """Draft, score, verify and commit once for every slot; returns the sequences that finished."""
        clock, seqs = self.stopwatch, self.sequences
        self._check_claim()
        clock.start()
        sampled = self.validate == "sampled" and (self._made < FIRST or not self._made % EVERY)
        full, self._made = sampled or self.validate == "always", self._made + 1
        rng = self.rng.round(seqs.stream, [len(h) for h in seqs.history], self.target.device)
        clock.mark("rest")
        drafted = self._propose(rng, full)
        draft = drafted.trimmed(max(seqs.limit))
        judged = draft.candidates
        with self._explained(drafted):
            scores = self._score(draft, full, rng)
            clock.mark("target")
            verdict = judge(self.verifier, self._verifier, draft, scores, rng, self.sampling)
        clock.mark("verify")

        check_verdict(judged, verdict, verifier=self._verifier)
        # At temperature 0 every log p of what is said is 0.
        rows = to_host(drafted.candidates, judged, scores, verdict, logprobs=self.sampling.temperature > 0)
        where = {
            row: f"{slot.name} at position {len(seqs.history[row])}" for row, slot in enumerate(self._slots) if slot
        }
        failed = failures(rows, where, self._drafter)
        if failed and self._on_error == "raise":
            raise NumericalError(next(iter(failed.values())))
        where = {row: place for row, place in where.items() if row not in failed}
        check_rows(rows, where, seqs.limit, self.target.vocab_size, self._drafter, self._verifier)
        if full:
            self._validate_verdict(judged, scores, verdict, where)
        for row in failed:
            rows[row] = rows[row]._replace(tau=0, nodes=0)
        busy = [slot is not None and row not in failed for row, slot in enumerate(self._slots)]
        accepted, nodes = [row.tau for row in rows], [row.nodes for row in rows]
        kept = [tau + 1 if on else 0 for tau, on in zip(accepted, busy, strict=True)]
        self.target.keep(kept, kept_path(judged, verdict))
        self.batch_rounds += 1
        self.target_rows += self.occupied * (draft.width + 1)
        finished, committed = [], [[] for _ in self._slots]
        for row, slot in enumerate(self._slots):
            if slot is None:
                continue
            if not busy[row]:  # its slot looks free from here on, and is, once the round is over
                tokens = seqs.history[row][slot.prompt_length :]
                more = {"error": failed[row], "logprobs": slot.logprobs}
                finished.append(Response(slot.index, tokens, "error", slot.rounds, **more))
                seqs.history[row], seqs.limit[row] = [], 0
                continue
            new = committed[row] = slot.until_eos(rows[row].tokens[: accepted[row] + 1])
            seqs.append(row, new)
            slot.wanted -= len(new)
            if slot.logprobs is not None:
                slot.logprobs += rows[row].logprobs[: len(new)]
            tau, limit = min(accepted[row], len(new)), seqs.limit[row]
            survival = rows[row].survival if verdict.survival is not None else None
            slot.rounds.append(Round(tau, len(new), nodes[row], draft.width, limit, survival))
            seqs.limit[row] = slot.limit(len(seqs.history[row]))
        watch = Watch(seqs, full)
        clock.mark("rest")
        self.drafter.observe(seqs, draft, verdict, accepted, scores)
        watch.check(self._drafter)
        clock.mark("draft")
        self.verifier.observe(accepted, nodes)
        if self.on_round is not None:
            prompts = [slot.index if slot and on else None for slot, on in zip(self._slots, busy, strict=True)]
            logprobs = [row.logprobs[: len(new)] for row, new in zip(rows, committed, strict=True)]
            self.on_round(RoundEvent(draft, scores, verdict, prompts, accepted, committed, logprobs))
        for row, slot in enumerate(self._slots):
            finish = "error" if row in failed else slot and slot.finish(seqs.history[row])
            if slot is None or not finish:
                continue
            if row not in failed:
                tokens = seqs.history[row][slot.prompt_length :]
                finished.append(Response(slot.index, tokens, finish, slot.rounds, logprobs=slot.logprobs))
            self._free(row)
            self._retired(row, finish)
        clock.mark("rest")
        return finished

    def end(self, index: int, finish: str) -> None:
        """The sequence of prompt ``index`` ends with the round that `on_round` is told about; ``finish`` says how."""
        for slot in self._slots:
            if slot is not None and slot.index == index:
                slot.ended = finish

    # -- pieces of a round --------------------------------------------------------------------------------

    def _propose(self, rng: RoundRng, full: bool) -> Draft:
        """The drafter's draft, checked: its form, and in a validated round all that it holds."""
        seqs = self.sequences
        watch = Watch(seqs, full)
        try:
            draft = self.drafter.propose(seqs, rng)
        except ModelError as error:  # slots have room for traits.nodes behind the longest sequence
            raise ContractError(
                f"{self._drafter} could not draft: {error}; it must not go deeper than sequences.limit, nor feed more "
                "nodes than traits.nodes and the room that it asked for"
            ) from error
        self.stopwatch.mark("draft")
        watch.check(self._drafter)
        if full:
            self._validate_draft(draft, finite=False)
            self.stopwatch.mark("rest")
        else:
            check_draft(draft, self.traits, seqs, self.target.vocab_size, drafter=self._drafter)
        return draft

    @contextmanager
    def _explained(self, draft: Draft) -> Iterator[None]:
        """What is raised while a draft is scored and judged may have its reason in the draft: then that is raised."""
        try:
            yield
        except ContractError:
            raise
        except Exception:
            self._validate_draft(draft, finite=True)
            raise

    def _validate_draft(self, draft: Draft, finite: bool) -> None:
        validate_draft(
            draft,
            self.traits,
            self.sequences,
            self.target.vocab_size,
            drafter=self._drafter,
            prompts=self._prompts,
            final_law=self.drafter.context.final_law,
            finite=finite,
        )

    def _validate_verdict(self, draft: Draft, scores: Scores, verdict: Verdict, rows: Collection[int]) -> None:
        validate_verdict(
            draft,
            verdict,
            self.target.vocab_size,
            verifier=self._verifier,
            prompts=self._prompts,
            rows=rows,
            said=scores.said if self._lossless else None,
        )

    def _score(self, draft: Draft, full: bool, rng: RoundRng) -> Scores:
        seqs = self.sequences
        root = on_device([[h[-1] if h else 0] for h in seqs.history], self.target.device)
        tokens = torch.cat([root, draft.tokens], 1)
        # Node 0 of the grown tree is the root.
        parents = None if draft.is_chain else functional.pad(draft.parents + 1, (1, 0), value=-1)
        begun: dict[str, Any] = {}
        taken_up = None
        if draft.begun is not None and (fed := draft.begun.fed) is not None:
            width = min(fed.shape[1], tokens.shape[1])
            begun = {"begun": draft.begun}
            same = fed[:, :width] == tokens[:, :width]
            taken_up = same[:, 0] & (same[:, 1:] | ~draft.valid[:, : width - 1]).all(1)
        logits, hidden = self.target.grow(tokens, parents, **begun)
        if self.processors is not None:
            logits = self.processors(logits, draft, seqs.history, [slot and slot.index for slot in self._slots], full)
        return scored(logits, hidden, taken_up, draft, self.sampling, self._stateful, rng)

    def _free(self, row: int) -> None:
        self.sequences.history[row] = []
        self.sequences.limit[row] = 0
        self._slots[row] = None

    def _retired(self, row: int, finish: str | None = None) -> None:
        self.target.retire(row)
        self.drafter.retire(row, finish)
        self.verifier.retire(row)

    # -- checks -------------------------------------------------------------------------------------------

    @property
    def _drafter(self) -> str:
        return f"drafter '{getattr(self.drafter, 'name', type(self.drafter).__name__)}'"

    @property
    def _verifier(self) -> str:
        return f"verifier '{getattr(self.verifier, 'name', type(self.verifier).__name__)}'"

    @property
    def _prompts(self) -> list[str | None]:
        return [slot.name if slot else None for slot in self._slots]

    def _check_claim(self) -> None:
        if any(strategy.claim is not self._claim for strategy in self._claimed):  # instances that their user holds
            raise UsageError("a drafter or verifier of this run was given to another; give each run one of its own")
