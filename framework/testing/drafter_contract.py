"""Contract tests of drafters: `DrafterContract`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, get_args

import pytest
import torch
from torch.nn.functional import one_hot

from ..api.build import build_decoder
from ..certificate.draft_faults import check_independence, repeated_texts
from ..certificate.drafts import NamedDrafter
from ..certificate.drawn_tokens import check_mean
from ..certificate.faults import FaultError
from ..certificate.rows import certify_row
from ..contracts.draft import Draft, Sequences, Verdict
from ..contracts.drafter import DraftContext, Drafter, TextDistribution
from ..contracts.rng import CounterRng
from ..contracts.sampling import Sampling
from ..contracts.steps import Response, StepEvent
from ..contracts.verifier import incompatible
from ..engine.decoder import Decoder, Step
from ..engine.validation import validate_draft
from ..plugins import get, traits_of
from .interruptions import Interrupted, Place, interrupted
from .settings import OneThread, Setting, Toys, device_comparison, no_waits
from .verifier_contract import assert_certified

#: Verifiers that use q in different ways; those compatible with the drafter are used.
RULES = ("token", "block", "specinfer", "traversal", "sample-match")
NEW_TOKENS = 12
#: Batch size and length of texts in the count of drawn tokens, for models that are not tables.
ROWS, LONG = 128, 96

#: Responses of `DrafterContract.decode`.
_DECODED: dict[Any, dict[int, Response]] = {}


@dataclass(frozen=True)
class _Made(NamedDrafter):
    """The drafter of a test class, which may build it in a way of its own."""

    make: Callable[[DraftContext], Drafter] = field(kw_only=True)

    def build(self, context: DraftContext, gamma: int) -> Drafter:
        return self.make(context)


class DrafterContract(OneThread):
    """Base class of a drafter's contract tests; subclass it, set the drafter, and run pytest.

    Attributes:
        drafter: the class, or the name of a registered one.
        options: of its ``Config``.
        setting: `Toys`, or `TinyModel` for drafters that read hidden states or run the target's layers.
        temperatures: of the target.
        remembers: drafts depend on earlier sequences, until `Drafter.reset`.
    """

    drafter: ClassVar[type[Drafter] | str]
    options: ClassVar[Mapping[str, Any]] = {}
    setting: ClassVar[Setting] = Toys()
    temperatures: ClassVar[Sequence[float]] = (1.0, 0.0)
    remembers: ClassVar[bool] = False

    # -- setup ------------------------------------------------------------------------------------------------

    @property
    def drafting(self) -> type[Drafter]:
        return get("drafters", self.drafter) if isinstance(self.drafter, str) else self.drafter

    @property
    def config(self) -> Any:
        return self.drafting.Config(**self.options)

    def make(self, context: DraftContext) -> Drafter:
        """The drafter under test."""
        return self.drafting(self.config, context)

    def rules(self, sampling: Sampling, names: Iterable[str] = RULES) -> list[type[Any]]:
        """Verifiers of these names that are compatible with the drafter."""
        own, draft = self.drafting.name, traits_of("drafters", self.drafting, self.config, sampling)
        rules = map(partial(get, "verifiers"), names)
        return [v for v in rules if not incompatible(own, draft, v.name, v.traits(v.Config()), sampling)]

    def decoder(self, batch_size: int, temperature: float, drafter: Any = None, **loop: Any) -> Decoder:
        sampling = Sampling(temperature=temperature)
        context = self.setting.context(batch_size, sampling)
        verifier = self.rules(sampling)[0]
        options = {"rng": CounterRng(7), "validate": "always", **loop}
        return build_decoder(context, drafter or self.make, verifier(verifier.Config()), **options)

    def decode(self, batch_size: int, temperature: float, prompts: Sequence[int] | None = None, **loop: Any) -> Any:
        """Responses by prompt, decoded by a new drafter once per class; ``prompts`` are indices into the setting's."""
        chosen = list(range(len(self.setting.prompts))) if prompts is None else list(prompts)
        key = (type(self), self.drafting, repr((self.config, batch_size, temperature, chosen, loop)))
        if key not in _DECODED:
            decoder = self.decoder(batch_size, temperature, **{"max_new_tokens": NEW_TOKENS, **loop})
            _DECODED[key] = _by_index(decoder.run([self.setting.prompts[i] for i in chosen], chosen), chosen)
        return _DECODED[key]

    def deterministic_temperatures(self) -> list[float]:
        """Temperatures at which the text of a sequence depends on its prompt and random numbers only.

        With a drafter that remembers other sequences, samples depend on these too.
        """
        return [t for t in self.each_temperature() if t == 0 or not self.remembers]

    def each_temperature(self) -> list[float]:
        zero_only = self.drafting.traits(self.config, Sampling(temperature=0)).temperature_zero_only
        return [t for t in self.temperatures if t == 0 or not zero_only]

    # -- the tests --------------------------------------------------------------------------------------------

    @pytest.fixture(autouse=True)
    def _memory_first(self, request: pytest.FixtureRequest) -> None:
        for name in request.fixturenames:
            if name != "_memory_first":
                request.getfixturevalue(name)  # fixtures of a test class may complete its options
        self.skip_after_wrong_memory(request.node.name)

    def skip_after_wrong_memory(self, test: str) -> None:
        """Skip all tests but the one that names the cure: with a wrong `remembers` others fail for no other reason."""
        if self.drafting.remembers(self.config) != self.remembers and "test_remembers" not in test:
            pytest.skip(f"remembers = {self.remembers} is wrong; see test_remembers")

    def test_remembers(self) -> None:
        """`Drafter.remembers` returns the value of the test class; replay and the bench rely on it."""
        assert (remembered := self.drafting.remembers(self.config)) == self.remembers, (
            f"remembers(config) is {remembered} for {self.config!r}, but the test class has remembers = "
            f"{self.remembers}. A class that defines reset() remembers other sequences: set remembers = True "
            "in the test class. If options turn the memory off, define the classmethod remembers(config), or replay "
            "rejects the drafter; a class without memory defines neither"
        )

    def test_traits(self) -> None:
        """Traits are valid and depend on the config only."""
        assert isinstance(self.drafting.name, str) and self.drafting.name, "the class needs a name"
        for temperature in self.each_temperature():
            sampling = Sampling(temperature=temperature)
            traits = self.drafting.traits(self.config, sampling)
            repeated = self.drafting.traits(self.config, sampling)
            assert traits == repeated, "traits() must return equal values for equal configs"
            assert isinstance(traits.nodes, int) and traits.nodes >= 0, f"traits.nodes is {traits.nodes!r}, not a count"
            assert traits.kind is None or self.rules(sampling), (
                f"no lossless verifier accepts '{traits.kind}' drafts at temperature {temperature:g}"
            )

    def test_every_draft_keeps_the_contract(self) -> None:
        """Every draft of some dozens of steps passes `validate_draft`."""
        for temperature in self.each_temperature():
            widths: list[int] = []
            watched = {"on_step": lambda event, widths=widths: widths.append(event.draft.width)}
            decoder = self.decoder(3, temperature, max_new_tokens=NEW_TOKENS, eos=[self.setting.eos], **watched)
            list(decoder.run(self.setting.prompts))
            if self.drafting.traits(self.config, Sampling(temperature=temperature)).kind is not None:
                assert any(widths), "nothing was drafted: choose options or prompts with which it drafts"

    def test_q_is_the_draft_distribution(self) -> None:
        """Over thousands of drafts, token frequencies match the reported q, in long texts and in those that repeat."""
        sampling, name = Sampling(temperature=1.0), f"drafter '{self.drafting.name}'"
        if 1.0 not in self.each_temperature() or self.drafting.traits(self.config, sampling).point_mass:
            return  # point masses have no q
        if type(self.setting) is Toys:
            return  # part of test_output_follows_the_target, unless there are two vocabularies
        try:
            context = self.setting.context(ROWS, sampling)
            prompts = [*self.setting.prompts, *repeated_texts(context.vocab_size)]
            check_mean(context, self.make, prompts, ROWS, LONG, name)
        except FaultError:  # a q that depends on the batch deviates, too
            self._check_independence(1.0)
            raise

    def test_output_follows_the_target(self) -> None:
        """With lossless verifiers the joint distribution of two steps is the target's, by enumeration on exact models.

        As by `crossdraft certify --drafter`, also from starts at which the drafter's memory has filled.
        """
        if not isinstance(self.setting, Toys):
            pytest.skip("exact enumeration needs a target that is a table; the histogram and the greedy test remain")
        toys, sampling = self.setting.toys, Sampling(temperature=self.each_temperature()[0])
        if self.drafting.traits(self.config, sampling).kind is None:
            return
        kind = _Made(self.drafting.name, self.drafting, self.config, make=self.make)
        for verifier in self.rules(sampling)[:2]:
            rows = [certify_row(toy, kind.label, kind, verifier) for toy in toys]
            assert_certified(rows, toys, {kind.label: kind}, f"drafter '{kind.label}' with '{verifier.name}'")

    def test_drafts_depend_on_sequences_and_rng_only(self) -> None:
        """Equal sequences and random numbers give equal drafts, whatever `sequences.tokens` hold beyond it."""
        for temperature in self.each_temperature():
            self._check_independence(temperature)

    def test_rows_do_not_share_state(self) -> None:
        """A sequence has the same tokens and acceptance by itself and in a ragged batch, in any slot."""
        for temperature in self.deterministic_temperatures():
            batched = self.decode(3, temperature)
            for i, response in batched.items():
                single = self.decode(1, temperature, [i])[i]
                assert single.tokens == response.tokens, (
                    f"rows share state: at temperature {temperature:g} prompt {i} yields {response.tokens} in a batch "
                    f"and {single.tokens} by itself"
                )
                if not self.remembers:
                    assert [r.tau for r in single.steps] == [r.tau for r in response.steps], (
                        f"rows share state: at temperature {temperature:g} prompt {i} has other drafts in a batch than "
                        "by itself"
                    )

    def test_limits(self) -> None:
        """Drafts respect the limit of each row, including 0."""
        decoder = self.decoder(3, self.each_temperature()[0], max_new_tokens=NEW_TOKENS)
        for row in range(3):
            decoder.start(row, self.setting.prompts[row], row, row)
        for limits in ([0, 0, 0], [1, 0, 2], [0, 3, 1]):
            decoder.sequences.limit[:] = limits
            draft = self._propose(decoder)
            self._validate(draft, decoder)
            decoder.drafter.observe(decoder.sequences, draft, *self._reject_all(decoder, draft))

    def test_end_of_sequence_inside_draft(self) -> None:
        """Tokens after an end-of-sequence token are removed, without effect on the next sequence."""
        for temperature in self.deterministic_temperatures():
            ended = self.decode(2, temperature, eos=[self.setting.eos])
            whole = self.decode(2, temperature)
            for i, response in ended.items():
                tokens = whole[i].tokens
                cut = tokens[: tokens.index(self.setting.eos) + 1] if self.setting.eos in tokens else tokens
                assert response.tokens == cut, f"prompt {i} ends as {response.tokens}, not as {cut}"

    def test_greedy_decoding_is_targets_own(self) -> None:
        """At temperature 0 the output equals decoding without drafts."""
        if 0.0 not in self.each_temperature():
            return
        none = get("drafters", "none")
        decoder = self.decoder(1, 0.0, drafter=(none, none.Config()), max_new_tokens=NEW_TOKENS)
        single = _by_index(decoder.run(self.setting.prompts))
        for i, response in self.decode(3, 0.0).items():
            assert response.tokens == single[i].tokens, (
                f"at temperature 0 prompt {i} yields {response.tokens}, and without drafts {single[i].tokens}"
            )

    def test_reset_forgets_what_was_learnt(self) -> None:
        """After reset() a drafter equals a new one: results do not depend on the warm-up."""
        temperature = self.each_temperature()[0]
        decoder = self.decoder(2, temperature, max_new_tokens=NEW_TOKENS)
        list(decoder.run(self.setting.prompts))
        decoder.drafter.reset()
        repeated = _by_index(decoder.run(self.setting.prompts))
        fresh = self.decode(2, temperature)
        for i, response in repeated.items():
            assert _taus(response) == _taus(fresh[i]), (
                f"{'reset() is incomplete' if self.remembers else 'start() keeps state'}: prompt {i} has "
                f"{_taus(response)} accepted tokens after a warm-up and {_taus(fresh[i])} without one; "
                + (
                    "clear all memory in reset()"
                    if self.remembers
                    else "clear the state of a slot in start() or free()"
                )
            )

    def test_interrupted_step_leaves_no_state(self) -> None:
        """After an error in the drafter, the target or the verifier a decoder equals a new one."""
        temperature, prompts, short = self.each_temperature()[0], self.setting.prompts[:2], {"max_new_tokens": 8}
        fresh = self.decode(2, temperature, [0, 1], **short)
        decoder = self.decoder(2, temperature, **short)
        for place in get_args(Place):
            with interrupted(decoder, place), pytest.raises(Interrupted):
                list(decoder.run(prompts))
            decoder.drafter.reset()
            for i, response in _by_index(decoder.run(prompts)).items():
                same = response.tokens == fresh[i].tokens and _taus(response) == _taus(fresh[i])
                assert same, (
                    f"an error in the {place}, in the middle of a step, leaves state behind: prompt {i} has "
                    f"{_taus(response)} accepted tokens afterwards and {_taus(fresh[i])} in a new decoder; clear it in "
                    "start()"
                )

    def test_free_receives_the_finish_reason(self) -> None:
        """free(row, finish_reason) is called once for every sequence, and may be called for an aborted one."""
        decoder = self.decoder(2, self.each_temperature()[0], max_new_tokens=NEW_TOKENS)
        reasons: list[Any] = []
        free = decoder.drafter.free

        def record(row: int, finish_reason: str | None = None) -> None:
            reasons.append(finish_reason)
            free(row, finish_reason)

        decoder.drafter.free = record  # type: ignore[method-assign]
        list(decoder.run(self.setting.prompts))
        assert reasons == ["length"] * len(self.setting.prompts)
        decoder.start(0, self.setting.prompts[0])
        decoder.step()
        decoder.abandon()
        assert reasons[-1] is None
        list(decoder.run(self.setting.prompts))  # the slots are reusable

    def test_no_device_synchronization(self) -> None:
        """propose() runs on the meta device, where reading a value raises, unless `DraftTraits.waits` declares it."""
        for temperature in self.each_temperature():
            sampling = Sampling(temperature=temperature)
            if self.drafting.traits(self.config, sampling).waits:
                continue
            context = self.setting.context(2, sampling, "meta")
            try:
                drafter = self.make(context)
            except Exception as error:
                pytest.skip(f"it cannot be built on the meta device: {error}")
            sequences = Sequences([[], []], torch.zeros(2, 64, dtype=torch.long, device="meta"), [4, 2], [0, 1])
            assert context.target is not None
            context.target.hidden_layers = drafter.traits(drafter.config, sampling).hidden_layers
            with torch.inference_mode():
                for row in range(2):
                    prompt = self.setting.prompts[row]
                    hidden = context.target.start(row, prompt)
                    sequences.history[row] = list(prompt)
                    drafter.start(row, prompt, hidden)
                rng = CounterRng(0).for_step([0, 1], [9, 9], torch.device("meta"))
                with no_waits("propose()", "", ". Declare DraftTraits.waits if it must"):
                    drafter.propose(sequences, rng)

    def test_on_cuda(self) -> None:
        """Decoding on CUDA equals that on the CPU; a step waits as often as `DraftTraits.waits`."""
        compared = device_comparison()
        for sampling in compared.SAMPLINGS:
            for verifier in self.rules(sampling)[:1]:
                for batch_size in compared.BATCH_SIZES:
                    compared.compare_drafter(self, verifier.name, sampling, batch_size)

    def test_text_distribution(self) -> None:
        """`text_distribution` yields the same probabilities as drafts at each of their tokens."""
        for temperature in self.each_temperature():
            sampling = Sampling(temperature=temperature)
            distribution = self.make(self.setting.context(1, sampling)).text_distribution()
            if distribution is None or not self.drafting.traits(self.config, sampling).is_chain:
                continue
            events: list[StepEvent] = []
            decoder = self.decoder(1, temperature, max_new_tokens=NEW_TOKENS, on_step=events.append)
            for prompt in self.setting.prompts:
                list(decoder.run([prompt]))
                text = list(prompt)
                for event in events:
                    difference = self._difference(distribution, text, event.draft)
                    assert difference < 1e-3, (
                        f"text_distribution() differs from the drafts by {difference:.3g} in a token's probability. "
                        "Remove it if the distribution depends on more than the preceding tokens"
                    )
                    text += event.emitted[0]
                events.clear()

    # -- pieces -----------------------------------------------------------------------------------------------

    def _check_independence(self, temperature: float) -> None:
        sampling, name = Sampling(temperature=temperature), f"drafter '{self.drafting.name}'"
        contexts = partial(self.setting.context, sampling=sampling)
        prompts = [*self.setting.prompts, *repeated_texts(contexts(1).vocab_size)[1:5:2]]
        check_independence(contexts, self.make, prompts, NEW_TOKENS, name)

    def _validate(self, draft: Draft, decoder: Decoder) -> None:
        vocabulary, name = decoder.target.vocab_size, f"drafter '{self.drafting.name}'"
        validate_draft(draft, decoder.traits, decoder.sequences, vocabulary, drafter=name)

    def _propose(self, decoder: Decoder) -> Draft:
        seqs = decoder.sequences
        rng = decoder.rng.for_step(seqs.stream, [len(h) for h in seqs.history], decoder.target.device)
        with torch.inference_mode():
            return decoder.drafter.propose(seqs, rng)

    def _reject_all(self, decoder: Decoder, draft: Draft) -> tuple[Any, list[int], Any]:
        """Verdict, taus and scores of a step in which nothing is accepted."""
        seqs = decoder.sequences
        with torch.inference_mode():
            step = Step(decoder.rng.for_step([], [], decoder.target.device), validated=True)
            step.draft = draft
            decoder._score(step)
            decoder.target.commit([1] * seqs.batch_size)
        zeros = torch.zeros(seqs.batch_size, dtype=torch.long)
        path = None if draft.is_chain else torch.full((seqs.batch_size, max(draft.width, 1)), -1)
        verdict = Verdict(zeros, zeros.clone(), path)
        for row in range(seqs.batch_size):
            seqs.append(row, [0])
        return verdict, [0] * seqs.batch_size, step.scores

    @staticmethod
    def _difference(distribution: TextDistribution, text: Sequence[int], draft: Draft) -> float:
        """Largest difference of a probability between a drafted chain and the distribution of its tokens."""
        tokens = draft.tokens[:, : int(draft.count[0])]
        if not tokens.numel():
            return 0.0
        with torch.inference_mode():
            distribution.lm.start(0, text)
            logits = distribution.lm.forward(torch.cat([torch.tensor([text[-1:]]), tokens], 1))[0][:, :-1]
            distribution.lm.free(0)
        probs = distribution.sampling.probs(logits)
        drafted = one_hot(tokens, probs.shape[-1]) if draft.q is None else draft.q[:, : tokens.shape[1]]
        return float((probs - drafted).abs().max())


def _by_index(responses: Any, names: Sequence[int] | None = None) -> dict[int, Response]:
    result = {response.index: response for response in responses}
    return {(i if names is None else names[i]): result[i] for i in sorted(result)}


def _taus(response: Response) -> list[int]:
    return [r.tau for r in response.steps]
