"""The batched decode loop: one step is draft, score, verify, commit; every row has its own length.

The target is an :class:`~crossdraft.framework.contracts.lm.LM`; the loop does not depend on models, recipes or files.
When a row finishes, the next prompt takes its slot (continuous batching), so B rows run while prompts remain. Each step
synchronises with the device once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from random import Random

import torch

from ..contracts.constraint import Grammar
from ..contracts.draft import Draft, Sequences, on_device
from ..contracts.drafter import Drafter
from ..contracts.lm import LM
from ..contracts.rng import CounterRng, RngSource
from ..contracts.sampling import Sampling
from ..contracts.steps import Request, Response, StepEvent
from ..contracts.verifier import Verifier
from ..errors import ContractError, ModelError, UsageError
from ..util.limits import PREFILL_TOKENS
from .checks import check_draft, check_prompt, check_rows, check_unchanged, check_verdict, snapshot
from .compiled_verifier import CompiledVerifier
from .constraints import Constraints, mask_logits
from .logits_processors import LogitsProcessors
from .prefill import Prefill
from .sequence import RowOutcome, SequenceState
from .step import Step, draft_forward, make_scores, path_in_scored_tree, to_host, verify
from .stopwatch import StepTiming, Stopwatch
from .validation import validate_draft, validate_verdict

#: ``validate="sampled"`` validates the first `FIRST` steps of a decoder and every `EVERY`-th one after.
FIRST, EVERY = 8, 64
#: Allowed values of ``validate`` (steps to validate) and ``on_error`` (treatment of rows with invalid numbers).
VALIDATE, ON_ERROR = ("sampled", "always", "never"), ("raise", "finish")
#: Steps of a warm-up, the period of the random tokens of its prompts, so that drafters that copy from the prompt draft,
#: too, and its first random stream, beyond those of all prompts.
WARM_UP, WARM_UP_PERIOD, WARM_UP_STREAM = 4, 8, 1 << 40


class Decoder:
    """B slots, a target, a drafter and a verifier.

    Args:
        target: the model whose distribution the output follows.
        drafter: proposes drafts; built with the same sampling parameters and batch size.
        verifier: accepts or rejects drafted tokens.
        sampling: sampling parameters, which turn the target's logits into p.
        eos: end-of-sequence ids.
        max_new_tokens: maximum number of tokens that a sequence generates.
        rng: source of random numbers; equal seeds give equal random numbers at any batch size.
        stopwatch: phase timer; None makes one.
        on_step: called after every step with a `StepEvent`; an exception ends the run.
        compile_verifier: compile the verify step, see `CompiledVerifier`, if the verifier can be compiled.
        processors: functions applied to the target's logits before p is computed, see `LogitsProcessors`.
        constraint: language of the responses of requests that have none of their own.
        constraints: constraints of the slots, for drafters that read them; None makes them.
        validate: steps in which the values of drafts and verdicts are checked (`validation`), which waits for the
            device: ``"sampled"``, the first 8 and every 64th after; ``"always"``; ``"never"``. Shapes, NaN, counts
            and emitted tokens are checked in every step, at no extra synchronisation.
        prefill_tokens: maximum number of tokens of a prefill pass. Prompts that start at the same time share passes,
            and longer prompts are fed in chunks between steps, so they affect each other by rounding; 0 = each
            prompt is fed separately, in full.

    Raises:
        NumericalError: the target or the drafter produced NaN, or q is not a distribution; names the sequence and
            position.
        ContractError: a draft or a verdict breaks the contract.
        UsageError: an empty prompt, a prompt that fills the context, or an invalid option.
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
        constraint: Grammar | None = None,
        constraints: Constraints | None = None,
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
        self.constraint = constraint
        self.constraints = Constraints(target.vocab_size) if constraints is None else constraints
        self.traits = drafter.traits(drafter.config, sampling)
        verifier_traits = verifier.traits(verifier.config)
        self._lossless, self._stateful = verifier_traits.lossless, verifier_traits.stateful
        self.compiled_verifier = (
            CompiledVerifier(verifier) if compile_verifier and CompiledVerifier.supports(verifier) else None
        )
        self._claim = drafter.claim = verifier.claim = object()
        #: Names in messages.
        self._drafter = f"drafter '{getattr(drafter, 'name', type(drafter).__name__)}'"
        self._verifier = f"verifier '{getattr(verifier, 'name', type(verifier).__name__)}'"
        #: Hidden layers for the drafter; set before each use, as decoders may share the target.
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
        #: Steps of the whole batch, and target positions evaluated in them (rows x (nodes + 1)).
        self.batch_steps = 0
        self.target_rows = 0
        #: Timings of the steps, added by each step unless None.
        self.timings: list[StepTiming] | None = None

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
        constraints: Sequence[Grammar | None] | None = None,
    ) -> Iterator[Response]:
        """Decode all prompts (lists of token ids); yield responses in the order in which they finish.

        ``streams[i]`` is the random stream of prompt i (default: i); ``names[i]`` its name in error messages;
        ``constraints[i]`` the language of its response (None: the decoder's). If the numbers of a sequence are invalid
        (NaN), ``on_error="raise"`` raises NumericalError; ``"finish"`` ends that sequence with ``Response.error`` and
        continues with the others, as a constraint that cannot be satisfied always does.
        """
        queue = list(prompts)
        streams = range(len(queue)) if streams is None else streams
        names = [f"prompt {i}" for i in range(len(queue))] if names is None else names
        for name, prompt in zip(names, queue, strict=True):
            check_prompt(name, prompt, self.target.context_length)
        grammars = [None] * len(queue) if constraints is None else constraints
        waiting = (Request(prompt, i, streams[i], names[i], constraint=grammars[i]) for i, prompt in enumerate(queue))
        with closing(self.steps(waiting, on_error)) as steps:
            for finished in steps:
                yield from finished

    def steps(
        self, waiting: Iterable[Request | None], on_error: str = "raise", interleaved: Callable[[], bool] = bool
    ) -> Generator[list[Response], None, None]:
        """Run steps and yield the responses finished in each, possibly none.

        ``waiting``: requests that passed `check_prompt`; a ``None`` item means "no request is ready; poll again after
        the next step" (immediately if no slot is occupied). ``interleaved``: returns True if other decoders wait for
        their turn, in which case a prefill pass counts as a step.
        """
        if on_error not in ON_ERROR:
            raise UsageError(f"on_error is one of {', '.join(ON_ERROR)}, not {on_error!r}")
        if self.occupied:
            raise UsageError("this decoder is running other sequences; finish that run, or call abandon()")
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
                    for row, started in self._prefill.run(waited_for=self.occupied > 0 or interleaved()):
                        self.start(row, **started._asdict())
                if self.occupied or self._prefill.rows:
                    yield self.step() if self.occupied else []
                elif request is last:
                    return
        finally:  # also if the caller stops early or a step raises
            self.abandon()

    def warm_up(self, length: int, seed: int = 0) -> Iterator[None]:
        """Run a few steps in every slot and discard them, so that one-time costs are not measured; yield after each.

        Prompts are ``length`` random tokens on separate random streams, so that a drafter with memory does not see
        later prompts; it is reset afterwards. A last step in every slot starts from one token and generates one.
        """
        random, compiled = Random(seed), self.compiled_verifier
        kept = self.eos, self.constraint, self.max_new_tokens
        self.eos, self.constraint = frozenset(), None
        if compiled is None:  # enough for a draft of full depth; a compiled verifier needs whole sequences
            self.max_new_tokens = min(WARM_UP + self.traits.depth, self.max_new_tokens)
        requests = []
        for i in range(self.target.batch_size):
            phrase = [random.randrange(self.target.vocab_size) for _ in range(min(WARM_UP_PERIOD, length))]
            prompt = [phrase[k % len(phrase)] for k in range(length)]
            requests.append(Request(prompt, i, WARM_UP_STREAM + i, "warm-up prompt"))
        for waiting in (
            requests,
            [request._replace(prompt=request.prompt[:1], max_new_tokens=1) for request in requests],
        ):
            with closing(self.steps(waiting)) as steps:
                for count, _ in enumerate(steps, 1):
                    yield
                    if compiled is None and count == WARM_UP:
                        break
        self.eos, self.constraint, self.max_new_tokens = kept
        if compiled is not None:
            compiled.compiling = False
        self.drafter.reset()
        self.batch_steps = self.target_rows = 0

    def abandon(self) -> None:
        """Abort all unfinished sequences and free all slots."""
        self._on_error = "raise"
        # The history of a failed row is empty; a row without a slot was interrupted while it started.
        rows = [row for row, slot in enumerate(self._slots) if slot is not None or self.sequences.history[row]]
        for row in rows:  # before free() of the strategies, which may raise
            self._clear(row)
        self.target.commit([0] * self.target.batch_size)
        self._prefill.abort()
        for row in rows:
            self._free(row)

    @torch.inference_mode()
    def start(
        self,
        row: int,
        prompt: Sequence[int],
        index: int = 0,
        stream: int = 0,
        name: str = "the prompt",
        max_new_tokens: int | None = None,
        eos: Collection[int] | None = None,
        constraint: Grammar | None = None,
    ) -> None:
        """Start a sequence in slot ``row``; ``max_new_tokens``, ``eos``, ``constraint`` replace the decoder's."""
        self._check_claim()
        self.stopwatch.mark()
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
            max_new_tokens=self.max_new_tokens if max_new_tokens is None else max_new_tokens,
            eos=self.eos if eos is None else eos,
            context=self.target.context_length,
            logprobs=[] if self.sampling.temperature else None,
        )
        self.sequences.limit[row] = sequence.max_draft_len
        if (grammar := self.constraint if constraint is None else constraint) is not None:
            self.constraints.start(row, grammar, sequence.eos)
        self.stopwatch.mark("prefill")
        self.drafter.start(row, prompt, hidden)
        self.stopwatch.mark("draft_prefill")

    # -- one step -----------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> list[Response]:
        """Draft, score, verify and commit once for every slot; returns the sequences that finished."""
        step = self._start_step()
        self._propose(step)
        try:
            self._score(step)
            self._verify(step)
        except ContractError:
            raise
        except Exception:
            self._validate_draft(step.proposed, finite=True)  # a fault of the draft is raised first
            raise
        self._sync(step)
        self._commit(step)
        self._notify(step)
        return self._retire_finished()

    def _start_step(self) -> Step:
        self._check_claim()
        self.stopwatch.mark()
        sampled = self.validate == "sampled" and (self._started < FIRST or not self._started % EVERY)
        self._started += 1
        lengths = list(map(len, self.sequences.history))
        rng = self.rng.for_step(self.sequences.stream, lengths, self.target.device)
        self.stopwatch.mark("rest")
        return Step(rng, validated=sampled or self.validate == "always")

    def _propose(self, step: Step) -> None:
        """Request a draft and check it: its structure, and in a validated step its values."""
        sequences = self.sequences
        before = snapshot(sequences, step.validated)
        try:
            step.proposed = self.drafter.propose(sequences, step.rng)
        except ModelError as error:  # slots hold traits.nodes tokens beyond the longest sequence
            raise ContractError(
                f"{self._drafter} could not draft: {error}; draft no deeper than sequences.limit, and feed at most "
                "traits.nodes nodes and the extra_tokens requested from load_lm()"
            ) from error
        self.stopwatch.mark("draft")
        check_unchanged(sequences, before, self._drafter, step.validated)
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
        # Processors and constraints read the draft: it is copied before the pass, and read while the device works.
        copy = draft.start_copy() if self.processors is not None or self.constraints.matchers else None
        logits, hidden, resume_matches = draft_forward(self.target, root, draft)
        if copy is not None:
            nodes = copy()
            forbidden = self.constraints.forbidden(nodes) if self.constraints.matchers else None
            if self.processors is not None:
                indices = [sequence and sequence.index for sequence in self._slots]
                logits = self.processors(logits, nodes, histories, indices, step.validated)
            if forbidden is not None:
                logits = mask_logits(logits, forbidden)
        step.scores, step.finite = make_scores(
            logits, hidden, resume_matches, self.sampling, step.rng, stateful=self._stateful
        )
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
        places = {
            row: f"{sequence.name} at position {len(sequences.history[row])}"
            for row, sequence in enumerate(self._slots)
            if sequence
        }
        vocab_size = self.target.vocab_size
        failed = check_rows(
            step.rows,
            places,
            sequences.limit,
            vocab_size,
            drafter=self._drafter,
            verifier=self._verifier,
            on_error=self._on_error,
        )
        places = {row: place for row, place in places.items() if row not in failed}
        if self.constraints.matchers:
            failed |= self._advance_constraints(step.rows, places)
            places = {row: place for row, place in places.items() if row not in failed}
        if step.validated:
            validate_verdict(
                step.candidates,
                step.verdict,
                vocab_size,
                verifier=self._verifier,
                prompts=self._prompts,
                rows=places,
                prob_of=step.scores.prob_of if self._lossless else None,
            )
        for row, error in failed.items():
            sequence = self._slots[row]
            assert sequence is not None
            sequence.error = error
            step.rows[row] = step.rows[row]._replace(tau=0, nodes=0)
        step.active = list(places)

    def _advance_constraints(self, rows: list[RowOutcome], places: dict[int, str]) -> dict[int, str]:
        """Append the emitted tokens to the constraints of ``places``; an error message per row that cannot go on."""
        errors = {}
        for row, place in places.items():
            emitted = rows[row].tokens[: rows[row].tau + 1]
            if (error := self.constraints.advance(row, emitted, place, self._verifier)) is not None:
                errors[row] = error
        return errors

    def _commit(self, step: Step) -> None:
        """Commit the accepted nodes to the target's cache and append their tokens; clear the slots of failed rows."""
        sequences, rows = self.sequences, step.rows
        counts = [0] * len(rows)
        for row in step.active:
            counts[row] = rows[row].tau + 1
        path = step.verdict.path
        self.target.commit(counts, None if path is None else path_in_scored_tree(path, step.candidates.width))
        self.batch_steps += 1
        self.target_rows += sum(map(bool, self._slots)) * (step.draft.width + 1)
        step.committed = [[] for _ in rows]
        for row, sequence in enumerate(self._slots):
            if sequence is None:
                continue
            if row not in step.active:
                sequences.history[row], sequences.limit[row] = [], 0
                continue
            survival = step.verdict.survival is not None
            new = sequence.commit(rows[row], step.draft.width, sequences.limit[row], survival)
            sequences.append(row, new)
            step.committed[row], sequences.limit[row] = new, sequence.max_draft_len

    def _notify(self, step: Step) -> None:
        """Report the outcome to the drafter, the verifier and `on_step`."""
        accepted = [row.tau for row in step.rows]
        before = snapshot(self.sequences, step.validated)
        self.stopwatch.mark("rest")
        self.drafter.observe(self.sequences, step.draft, step.verdict, accepted, step.scores)
        check_unchanged(self.sequences, before, self._drafter, step.validated)
        self.stopwatch.mark("draft")
        if self._stateful:
            self.verifier.observe(accepted, [row.nodes for row in step.rows])
        if self.on_step is None and self.timings is None:
            return
        prompts = [
            sequence.index if sequence and row in step.active else None for row, sequence in enumerate(self._slots)
        ]
        if self.timings is not None:
            lengths = [len(history) for history in self.sequences.history]
            emitted, resumed = [len(new) for new in step.committed], step.draft.resume_from is not None
            seconds = self.stopwatch.snapshot()
            self.timings.append(StepTiming(step.draft.width, resumed, prompts, emitted, lengths, seconds))
        if self.on_step is not None:
            logprobs = [row.logprobs[: len(new)] for row, new in zip(step.rows, step.committed, strict=True)]
            self.on_step(StepEvent(step.draft, step.scores, step.verdict, prompts, accepted, step.committed, logprobs))

    def _retire_finished(self) -> list[Response]:
        responses = []
        for row, sequence in enumerate(self._slots):
            if sequence is not None and (finish_reason := sequence.finish_reason):
                responses.append(sequence.response(finish_reason))
                self._clear(row)
                self._free(row, finish_reason)
        self.stopwatch.mark("rest")
        return responses

    def end(self, index: int, finish_reason: str) -> None:
        """End the sequence of prompt ``index`` after the current step; called by `on_step`."""
        for sequence in self._slots:
            if sequence is not None and sequence.index == index:
                sequence.ended = finish_reason

    def _clear(self, row: int) -> None:
        self.sequences.history[row] = []
        self.sequences.limit[row] = 0
        self._slots[row] = None
        self.constraints.free(row)

    def _free(self, row: int, finish_reason: str | None = None) -> None:
        self.target.free(row)
        self.drafter.free(row, finish_reason)
        self.verifier.free(row)

    # -- checks -------------------------------------------------------------------------------------------

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
    def _prompts(self) -> list[str | None]:
        return [slot.name if slot else None for slot in self._slots]

    def _check_claim(self) -> None:
        if self.drafter.claim is not self._claim or self.verifier.claim is not self._claim:
            raise UsageError("a drafter or verifier of this run is used by another run; give each run its own")
