"""The batched decode loop: one step is draft, score, verify, commit; every row has its own length.

The loop knows the target as an :class:`~crossdraft.framework.contracts.lm.LM`, the drafter and the verifier by their
contracts, and nothing about models, recipes or files. A row that finishes hands its slot to the next prompt,
so a run "at batch size B" really runs B rows while prompts remain. There is one host synchronisation a step.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ..contracts.draft import Draft, Scores, Sequences, Verdict, on_device
from ..contracts.drafter import Drafter
from ..contracts.lm import LM
from ..contracts.rng import CounterRng, RngSource, StepRng
from ..contracts.sampling import Sampling
from ..contracts.steps import Request, Response, SequenceStep, StepEvent
from ..contracts.verifier import Verifier
from ..errors import ContractError, ModelError, NumericalError, UsageError
from ..util.limits import PREFILL_TOKENS
from .compiled_verifier import CompiledVerifier
from .host_sync import Row, check_rows, failures, kept_path, to_host
from .logits_processors import LogitsProcessors
from .prefill import Prefill
from .sequence import SequenceState
from .stopwatch import Stopwatch
from .structural_checks import MutationGuard, check_draft, check_prompt, check_verdict
from .validation import validate_draft, validate_verdict
from .verify_step import make_scores, needs_chunks, verify

#: ``validate="sampled"``: these first steps of a decoder, and every so many-th one, are validated.
FIRST, EVERY = 8, 64
#: When drafts and verdicts are validated, and what happens to the others where a row's numbers cannot be right.
VALIDATE, ON_ERROR = ("sampled", "always", "never"), ("raise", "finish")


@dataclass
class Step:
    """State of one step; each phase of `Decoder.round` sets the fields below it.

    Attributes:
        rng: random numbers of the step.
        validated: all values of the draft and of the verdict are checked, not only their structure.
        proposed: what the drafter returned.
        draft: the nodes to score: ``proposed`` without the columns of a chain that no row has room for.
        candidates: the nodes to verify: ``draft`` without probes.
        scores, verdict: of the target and the verifier.
        finite: whether the target's logits are finite, see `make_scores` and `verify`.
        rows: the outcome of each row, on the host.
        active: rows with a sequence that did not fail.
        committed: new tokens of each row.
    """

    rng: StepRng
    validated: bool
    proposed: Draft = field(init=False)
    draft: Draft = field(init=False)
    candidates: Draft = field(init=False)
    scores: Scores = field(init=False)
    finite: Tensor | None = field(init=False)
    verdict: Verdict = field(init=False)
    rows: list[Row] = field(init=False)
    active: list[int] = field(init=False)
    committed: list[list[int]] = field(init=False)


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
        on_step: called after every step with a `StepEvent`; what it raises ends the run.
        compile_verifier: compile the verify step, see `CompiledVerifier`, if the verifier can be compiled.
        processors: what the target's logits go through before they become p, see `LogitsProcessors`.
        validate: in which steps every value of drafts and verdicts is checked (`validation`), which waits for the
            device: ``"sampled"``, the decoder's first 8 and every 64th after; ``"always"``; ``"never"``. Their form,
            NaN, counts and emitted tokens are checked in every step, for nothing.
        prefill_tokens: most tokens of a prefill pass. Prompts that begin together share passes, longer ones go in
            pieces, one between two steps. They then change each other by rounding; 0 = each goes by itself, at once.

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
        on_step: Callable[[StepEvent], None] | None = None,
        compile_verifier: bool = False,
        processors: LogitsProcessors | None = None,
        validate: str = "sampled",
        prefill_tokens: int = PREFILL_TOKENS,
    ):
        if validate not in VALIDATE:
            raise UsageError(f"validate is one of {', '.join(VALIDATE)}, not {validate!r}")
        self.target, self.drafter, self.verifier = target, drafter, verifier
        self.sampling, self.eos, self.max_new_tokens = sampling, frozenset(eos), max_new_tokens
        self.rng = rng if rng is not None else CounterRng(0)
        self.stopwatch = stopwatch or Stopwatch(target.device)
        self.on_step, self.processors, self.validate = on_step, processors, validate
        self.traits = drafter.traits(drafter.config, sampling)
        promised = verifier.traits(verifier.config)
        self._lossless, self._stateful = promised.lossless, promised.stateful
        self.compiled_verifier = (
            CompiledVerifier(verifier) if compile_verifier and CompiledVerifier.takes(verifier) else None
        )
        self._claimed, self._claim = (drafter, verifier), object()
        drafter.claim = verifier.claim = self._claim
        #: What the drafter reads of the target, which other decoders may use for drafters that read something else.
        self.hidden_layers = self.traits.hidden_layers
        b, length = target.batch_size, drafter.context.max_length
        self.sequences = Sequences(
            history=[[] for _ in range(b)],
            tokens=torch.zeros(b, length, dtype=torch.long, device=target.device),
            limit=[0] * b,
            stream=[0] * b,
        )
        self._slots: list[SequenceState | None] = [None] * b
        self._prefill = Prefill(target, drafter, self.stopwatch, prefill_tokens)
        self._started, self._on_error = 0, "raise"
        #: Steps made by the whole batch, and target positions evaluated in them (rows x (nodes + 1)).
        self.batch_steps = 0
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
        with closing(self.steps(waiting, on_error)) as steps:
            for finished in steps:
                yield from finished

    def steps(
        self, waiting: Iterable[Request | None], on_error: str = "raise", interleaved: Callable[[], bool] = bool
    ) -> Generator[list[Response], None, None]:
        """Round after step, with what finished in each: free slots take what is ``waiting`` and passed `check_prompt`.

        ``None`` in it: none at the moment, ask again after the next step (at once where no slot is occupied).
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
                    self._prefill.start(self.start, waited_for=self.occupied > 0 or interleaved())
                if self.occupied or self._prefill.rows:
                    yield self.step() if self.occupied else []
                elif request is last:
                    return
        finally:  # a caller that stops early, or an error inside a step, leaves the slots clean
            self.abandon()

    def abandon(self) -> None:
        """Give up every sequence that is not finished: all slots are free again, as in a new decoder."""
        self._on_error = "raise"
        rows = [row for row, history in enumerate(self.sequences.history) if history]
        for row in rows:  # before anybody is told, who might raise
            self._free(row)
        self.target.commit([0] * self.target.batch_size)
        self._prefill.give_up()
        for row in rows:
            self._freed(row)

    @torch.inference_mode()
    def start(
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
        hidden = self.target.start(row, prompt)
        self.sequences.history[row] = []
        self.sequences.append(row, prompt)
        self.sequences.stream[row] = stream
        self.verifier.start(row)
        sequence = self._slots[row] = SequenceState(
            index,
            name,
            len(prompt),
            max_new_tokens=self.max_new_tokens if most is None else most,
            eos=self.eos if eos is None else eos,
            context=self.target.context_length,
            logprobs=[] if self.sampling.temperature else None,
        )
        self.sequences.limit[row] = sequence.max_draft_len
        self.stopwatch.mark("prefill")
        self.drafter.start(row, prompt, hidden)
        self.stopwatch.mark("draft_prefill")

    # -- one step -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Response]:
        """Draft, score, verify and commit once for every slot; returns the sequences that finished."""
        step = self._start_step()
        self._propose(step)
        with self._draft_faults_first(step):
            self._score(step)
            self._verify(step)
        self._sync(step)
        self._commit(step)
        self._notify(step)
        return self._retire_finished()

    def _start_step(self) -> Step:
        self._check_claim()
        self.stopwatch.start()
        sampled = self.validate == "sampled" and (self._started < FIRST or not self._started % EVERY)
        self._started += 1
        lengths = [len(history) for history in self.sequences.history]
        rng = self.rng.for_step(self.sequences.stream, lengths, self.target.device)
        self.stopwatch.mark("rest")
        return Step(rng, validated=sampled or self.validate == "always")

    def _propose(self, step: Step) -> None:
        """Request a draft and check it: its structure, and in a validated step its values."""
        sequences = self.sequences
        watch = MutationGuard(sequences, step.validated)
        try:
            step.proposed = self.drafter.propose(sequences, step.rng)
        except ModelError as error:  # slots have room for traits.nodes behind the longest sequence
            raise ContractError(
                f"{self._drafter} could not draft: {error}; it must not go deeper than sequences.limit, nor feed more "
                "nodes than traits.nodes and the room that it asked for"
            ) from error
        self.stopwatch.mark("draft")
        watch.check(self._drafter)
        if step.validated:
            self._validate_draft(step.proposed, finite=False)
            self.stopwatch.mark("rest")
        else:
            check_draft(step.proposed, self.traits, sequences, self.target.vocab_size, drafter=self._drafter)
        step.draft = step.proposed.trimmed(max(sequences.limit))
        step.candidates = step.draft.candidates

    def _score(self, step: Step) -> None:
        """One forward pass of the target over the root and all nodes."""
        draft, histories = step.draft, self.sequences.history
        root = on_device([[history[-1] if history else 0] for history in histories], self.target.device)
        tokens = torch.cat([root, draft.tokens], 1)
        # Node 0 of the scored tree is the root.
        parents = None if draft.is_chain else functional.pad(draft.parents + 1, (1, 0), value=-1)
        resumed: dict[str, Any] = {}
        resume_matches = None
        if draft.resume_from is not None and (fed := draft.resume_from.fed) is not None:
            width = min(fed.shape[1], tokens.shape[1])
            resumed = {"resume_from": draft.resume_from}
            same = fed[:, :width] == tokens[:, :width]
            resume_matches = same[:, 0] & (same[:, 1:] | ~draft.valid[:, : width - 1]).all(1)
        logits, hidden = self.target.forward(tokens, parents, **resumed)
        if self.processors is not None:
            indices = [sequence and sequence.index for sequence in self._slots]
            logits = self.processors(logits, draft, histories, indices, step.validated)
        chunked = needs_chunks(logits, step.rng, stateful=self._stateful)
        step.scores, step.finite = make_scores(logits, hidden, resume_matches, self.sampling, chunked=chunked)
        self.stopwatch.mark("target")

    def _verify(self, step: Step) -> None:
        verify_function = self.compiled_verifier or self.verifier.verify
        step.verdict, step.finite = verify(
            verify_function,
            self._verifier,
            step.draft,
            step.candidates,
            step.scores,
            step.finite,
            step.rng,
            self.sampling,
        )
        self.stopwatch.mark("verify")
        check_verdict(step.candidates, step.verdict, verifier=self._verifier)

    def _sync(self, step: Step) -> None:
        """The one device-to-host copy of a step, and the checks on it; failed rows accept nothing."""
        sequences, finite = self.sequences, step.finite
        assert finite is not None
        # At temperature 0 the log probability of every emitted token is 0.
        logprobs = self.sampling.temperature > 0
        proposed = step.candidates if step.draft is step.proposed else step.proposed.candidates
        step.rows = to_host(proposed, step.candidates, step.scores, finite, step.verdict, logprobs=logprobs)
        where = {
            row: f"{sequence.name} at position {len(sequences.history[row])}"
            for row, sequence in enumerate(self._slots)
            if sequence
        }
        failed = failures(step.rows, where, self._drafter)
        if failed and self._on_error == "raise":
            raise NumericalError(next(iter(failed.values())))
        where = {row: place for row, place in where.items() if row not in failed}
        vocab_size = self.target.vocab_size
        check_rows(step.rows, where, sequences.limit, vocab_size, self._drafter, self._verifier)
        if step.validated:
            validate_verdict(
                step.candidates,
                step.verdict,
                vocab_size,
                verifier=self._verifier,
                prompts=self._prompts,
                rows=where,
                prob_of=step.scores.prob_of if self._lossless else None,
            )
        for row, error in failed.items():
            sequence = self._slots[row]
            assert sequence is not None
            sequence.error = error
            step.rows[row] = step.rows[row]._replace(tau=0, nodes=0)
        step.active = list(where)

    def _commit(self, step: Step) -> None:
        """Keep the accepted nodes in the target's cache and append their tokens; free the slots of failed rows."""
        sequences, rows = self.sequences, step.rows
        keep = [0] * len(rows)
        for row in step.active:
            keep[row] = rows[row].tau + 1
        self.target.commit(keep, kept_path(step.candidates, step.verdict))
        self.batch_steps += 1
        self.target_rows += self.occupied * (step.draft.width + 1)
        step.committed = [[] for _ in rows]
        for row, sequence in enumerate(self._slots):
            if sequence is None:
                continue
            if row not in step.active:
                sequences.history[row], sequences.limit[row] = [], 0
                continue
            found = rows[row]
            new = step.committed[row] = sequence.until_eos(found.tokens[: found.tau + 1])
            sequences.append(row, new)
            sequence.tokens += new
            if sequence.logprobs is not None:
                sequence.logprobs += found.logprobs[: len(new)]
            survival = found.survival if step.verdict.survival is not None else None
            tau, limit = min(found.tau, len(new)), sequences.limit[row]
            sequence.steps.append(SequenceStep(tau, len(new), found.nodes, step.draft.width, limit, survival))
            sequences.limit[row] = sequence.max_draft_len

    def _notify(self, step: Step) -> None:
        """Report the outcome to the drafter, the verifier and `on_step`."""
        accepted = [row.tau for row in step.rows]
        watch = MutationGuard(self.sequences, step.validated)
        self.stopwatch.mark("rest")
        self.drafter.observe(self.sequences, step.draft, step.verdict, accepted, step.scores)
        watch.check(self._drafter)
        self.stopwatch.mark("draft")
        self.verifier.observe(accepted, [row.nodes for row in step.rows])
        if self.on_step is not None:
            prompts = [
                sequence.index if sequence and row in step.active else None for row, sequence in enumerate(self._slots)
            ]
            logprobs = [row.logprobs[: len(new)] for row, new in zip(step.rows, step.committed, strict=True)]
            self.on_step(StepEvent(step.draft, step.scores, step.verdict, prompts, accepted, step.committed, logprobs))

    def _retire_finished(self) -> list[Response]:
        responses = []
        for row, sequence in enumerate(self._slots):
            if sequence is not None and (finish_reason := sequence.finish_reason):
                responses.append(sequence.response(finish_reason))
                self._free(row)
                self._freed(row, finish_reason)
        self.stopwatch.mark("rest")
        return responses

    def end(self, index: int, finish_reason: str) -> None:
        """End the sequence of prompt ``index`` with the step that `on_step` reports."""
        for sequence in self._slots:
            if sequence is not None and sequence.index == index:
                sequence.ended = finish_reason

    def _free(self, row: int) -> None:
        self.sequences.history[row] = []
        self.sequences.limit[row] = 0
        self._slots[row] = None

    def _freed(self, row: int, finish_reason: str | None = None) -> None:
        self.target.free(row)
        self.drafter.free(row, finish_reason)
        self.verifier.free(row)

    # -- checks -------------------------------------------------------------------------------------------

    @contextmanager
    def _draft_faults_first(self, step: Step) -> Iterator[None]:
        """Validate the draft if scoring or verifying raises: an invalid draft is then the error that is raised."""
        try:
            yield
        except ContractError:
            raise
        except Exception:
            self._validate_draft(step.proposed, finite=True)
            raise

    def _validate_draft(self, draft: Draft, finite: bool) -> None:
        validate_draft(
            draft,
            self.traits,
            self.sequences,
            self.target.vocab_size,
            drafter=self._drafter,
            prompts=self._prompts,
            final_q=self.drafter.context.final_q,
            finite=finite,
        )

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
