"""What every drafter has to keep, as tests: `DrafterContract`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch

from ..api.build import build_decoder
from ..certificate import effort
from ..certificate.certify import TOLERANCE, certify
from ..contracts.draft import Draft, Sequences, Verdict
from ..contracts.drafter import DraftContext, Drafter
from ..contracts.rng import CounterRng
from ..contracts.sampling import Sampling
from ..contracts.steps import Response
from ..contracts.verifier import incompatible
from ..engine.decoder import Decoder, Step
from ..engine.validation import validate_draft
from ..plugins import get
from ..replay.response import Response as Recorded
from ..replay.teacher_forcing.scoring import score_drafter
from .draws import Counted
from .interruptions import Interrupted, Place, interrupted
from .one_thread import OneThread
from .settings import Setting, Toys

#: Rules that look at q in different ways; those that accept a drafter's drafts are used.
RULES = ("token", "block", "specinfer", "traversal", "sample-match")
#: Decision paths of two steps that are enumerated, at most.
PATHS = 2.0**14
#: A mean over steps this many standard deviations away from 0 is no accident: once in a million tests of 100 tokens.
FAR = 6.0
NEW_TOKENS = 12
#: Rows of a batch in which drafts are counted.
ROWS = 128


class DrafterContract(OneThread):
    """Subclass it, name the drafter, and let pytest run what it inherits.

    Attributes:
        drafter: the class; for registered ones a name will do.
        options: of its ``Config``.
        setting: `Toys`, or `TinyModel` for drafters that read hidden states or run the target's layers.
        temperatures: of the target that the drafter is tried at.
        asks_device: it reads values while it drafts (a confidence stop), so that it waits for the device.
        remembers: what it learns from one sequence changes its drafts for the next, until `Drafter.reset`.
    """

    drafter: ClassVar[type[Drafter] | str]
    options: ClassVar[Mapping[str, Any]] = {}
    setting: ClassVar[Setting] = Toys()
    temperatures: ClassVar[Sequence[float]] = (1.0, 0.0)
    asks_device: ClassVar[bool] = False
    remembers: ClassVar[bool] = False

    # -- what it is made of -----------------------------------------------------------------------------------

    @property
    def drafting(self) -> type[Drafter]:
        return get("drafters", self.drafter) if isinstance(self.drafter, str) else self.drafter

    @property
    def config(self) -> Any:
        return self.drafting.Config(**self.options)

    def make(self, context: DraftContext) -> Drafter:
        """The drafter under test."""
        return self.drafting(self.config, context)

    def rules(self, sampling: Sampling) -> list[type[Any]]:
        """Lossless rules that can judge its drafts at these parameters."""
        draft = self.drafting.traits(self.config, sampling)
        rules = [get("verifiers", name) for name in RULES]
        return [
            rule
            for rule in rules
            if incompatible(self.drafting.name, draft, rule.name, rule.traits(rule.Config()), sampling) is None
        ]

    def decoder(self, batch_size: int, temperature: float, **loop: Any) -> Decoder:
        sampling = Sampling(temperature=temperature)
        context = self.setting.context(batch_size, sampling)
        rule = self.rules(sampling)[0]
        options = {"rng": CounterRng(7), "validate": "always", **loop}
        return build_decoder(context, self.make, rule(rule.Config()), **options)

    def decode(self, batch_size: int, temperature: float, prompts: Sequence[int] | None = None, **loop: Any) -> Any:
        """Responses by prompt; ``prompts`` are indices into the setting's."""
        chosen = list(range(len(self.setting.prompts))) if prompts is None else list(prompts)
        decoder = self.decoder(batch_size, temperature, **{"max_new_tokens": NEW_TOKENS, **loop})
        return _by_index(decoder.run([self.setting.prompts[i] for i in chosen], chosen), chosen)

    def where_text_is_settled(self) -> list[float]:
        """Temperatures at which the text of a sequence follows from its prompt and random numbers alone.

        Where a drafter remembers other sequences, its drafts, and with them samples, follow from these too.
        """
        return [t for t in self.each_temperature() if t == 0 or not self.remembers]

    def each_temperature(self) -> list[float]:
        zero_only = self.drafting.traits(self.config, Sampling(temperature=0)).temperature_zero_only
        return [t for t in self.temperatures if t == 0 or not zero_only]

    # -- the tests --------------------------------------------------------------------------------------------

    def test_traits(self) -> None:
        """Traits are decided from the config alone, and are what the loop makes room for."""
        assert isinstance(self.drafting.name, str) and self.drafting.name, "the class needs a name"
        for temperature in self.each_temperature():
            sampling = Sampling(temperature=temperature)
            traits = self.drafting.traits(self.config, sampling)
            again = self.drafting.traits(self.config, sampling)
            assert traits == again, "traits() must say the same for the same config"
            assert isinstance(traits.nodes, int) and traits.nodes >= 0, f"traits.nodes is {traits.nodes!r}, no count"
            assert traits.kind is None or self.rules(sampling), (
                f"no lossless rule judges '{traits.kind}' drafts at temperature {temperature:g}"
            )

    def test_every_draft_keeps_the_contract(self) -> None:
        """Tokens, parents, laws and limits of every draft of some dozens of steps, see `validate_draft`."""
        for temperature in self.each_temperature():
            widths: list[int] = []
            watched = {"on_step": lambda event, widths=widths: widths.append(event.draft.width)}
            decoder = self.decoder(3, temperature, max_new_tokens=NEW_TOKENS, eos=[self.setting.eos], **watched)
            list(decoder.run(self.setting.prompts))
            if self.drafting.traits(self.config, Sampling(temperature=temperature)).kind is not None:
                assert any(widths), "nothing was ever drafted: choose options or prompts that make it draft"

    def test_q_is_the_law_of_the_draw(self) -> None:
        """Over thousands of drafts, tokens come as often as the q that is reported for them says.

        Whatever the draft looks like, given what was drawn before, a token that is one with probability q is on average
        (1 where it was drawn, else 0) - q = 0 away from it. So the mean over steps is tested for every node and token.
        """
        sampling = Sampling(temperature=1.0)
        if 1.0 not in self.each_temperature() or self.drafting.traits(self.config, sampling).point_mass:
            return  # point masses claim nothing
        kept, looked_at = self._bias(sampling)
        if not kept:
            return
        if looked_at is not None and looked_at < FAR <= kept:
            raise AssertionError(
                "a token that was looked at is dropped: tokens that stay in the draft do not follow their q "
                f"({kept:.1f} standard deviations), though all that were drawn do. Keep it, or decide before drawing"
            )
        assert kept < FAR, (
            f"q is not the law that tokens are drawn from: they are off by {kept:.1f} standard deviations. Report the "
            "law after every temperature, top-k and top-p that you applied"
        )

    def test_the_output_keeps_the_targets_law(self) -> None:
        """By enumeration on exact models: with lossless rules the joint law of two steps is the target's.

        One drafter lives through both, so that what it learns in the first counts.
        """
        if not isinstance(self.setting, Toys):
            pytest.skip("exact enumeration needs a target that is a table; the histogram and the greedy test remain")
        for temperature in self.each_temperature():
            for rule in self.rules(Sampling(temperature=temperature))[:2]:
                for toy in self.setting.toys:
                    traits = self.drafting.traits(self.config, Sampling(temperature=temperature))
                    learns = self.drafting.remembers(self.config)
                    lengths = effort.unmerged_lengths(learns, traits, toy.vocab_size, traits.depth, 2, PATHS) or [1, 0]
                    options = {"steps": len(lengths), "gamma": lengths, "temperature": temperature}
                    found = certify(toy, lambda context, _: self.make(context), rule, **options)
                    assert found.tv <= TOLERANCE, (
                        f"with '{rule.name}' at temperature {temperature:g} the output is {found.tv:.3g} away from the "
                        f"target's law (total variation, toy {toy.name}): q is not the law of the draw, a token that "
                        "was looked at is dropped, or siblings are not drawn as traits.kind says"
                    )

    def test_rows_do_not_share_state(self) -> None:
        """A sequence says and accepts the same alone and in a batch of ragged rows, whatever its slot."""
        for temperature in self.where_text_is_settled():
            score_drafters = self.decode(3, temperature)
            for i, response in score_drafters.items():
                alone = self.decode(1, temperature, [i])[i]
                assert alone.tokens == response.tokens, (
                    f"rows share state: at temperature {temperature:g} prompt {i} is answered {response.tokens} in a "
                    f"batch and {alone.tokens} alone"
                )
                if not self.remembers:
                    assert [r.tau for r in alone.steps] == [r.tau for r in response.steps], (
                        f"rows share state: at temperature {temperature:g} prompt {i} has other drafts in a batch than "
                        "alone"
                    )

    def test_a_slot_is_handed_over_clean(self) -> None:
        """A sequence in a slot that another one has left is decoded as in a fresh one."""
        for temperature in self.each_temperature():
            decoder = self.decoder(1, temperature, max_new_tokens=NEW_TOKENS)
            for i in range(len(self.setting.prompts)):
                if self.remembers:
                    decoder.drafter.reset()
                (used,) = decoder.run([self.setting.prompts[i]], [i])
                fresh = self.decode(1, temperature, [i])[i]
                assert used.tokens == fresh.tokens and _taus(used) == _taus(fresh), (
                    f"a slot keeps what its last sequence left there: prompt {i} has drafts of {_taus(used)} accepted "
                    f"tokens in a used slot and {_taus(fresh)} in a fresh one; forget it in start() or free()"
                    + ("; memory across sequences goes in reset()" if self.remembers else "")
                )

    def test_limits(self) -> None:
        """A draft is no deeper than a row's limit, and nothing is drafted for a row that has no room."""
        decoder = self.decoder(3, self.each_temperature()[0], max_new_tokens=NEW_TOKENS)
        for row in range(3):
            decoder.start(row, self.setting.prompts[row], row, row)
        for limits in ([0, 0, 0], [1, 0, 2], [0, 3, 1]):
            decoder.sequences.limit[:] = limits
            draft = self._propose(decoder)
            self._validate(draft, decoder)
            decoder.drafter.observe(decoder.sequences, draft, *self._rejected(decoder, draft))

    def test_an_end_of_sequence_inside_a_draft(self) -> None:
        """What follows an end-of-sequence token is cut, and the next sequence does not notice."""
        for temperature in self.where_text_is_settled():
            ended = self.decode(2, temperature, eos=[self.setting.eos])
            whole = self.decode(2, temperature)
            for i, response in ended.items():
                tokens = whole[i].tokens
                cut = tokens[: tokens.index(self.setting.eos) + 1] if self.setting.eos in tokens else tokens
                assert response.tokens == cut, f"prompt {i} ends as {response.tokens}, not as {cut}"

    def test_greedy_decoding_is_the_targets_own(self) -> None:
        """At temperature 0 the text is what the target says alone, whatever was drafted."""
        if 0.0 not in self.each_temperature():
            return
        alone = self._without_drafter()
        for i, response in self.decode(3, 0.0).items():
            assert response.tokens == alone[i].tokens, (
                f"at temperature 0 prompt {i} is answered {response.tokens}; the target alone says {alone[i].tokens}"
            )

    def test_whether_it_remembers(self) -> None:
        """`Drafter.remembers` says of these options what the test class does; replay and the bench rely on it."""
        assert (said := self.drafting.remembers(self.config)) == self.remembers, (
            f"remembers(config) is {said} for {self.config!r}, and the test class has remembers = {self.remembers}. "
            "By default it is True for a class that defines reset(): if options turn the memory off, define the "
            "classmethod remembers(config), or replay refuses the drafter; if it remembers, set remembers = True"
        )

    def test_reset_forgets_what_was_learnt(self) -> None:
        """After reset() a drafter drafts as a new one: results do not depend on what it was warmed up with."""
        temperature = self.each_temperature()[0]
        decoder = self.decoder(2, temperature, max_new_tokens=NEW_TOKENS)
        list(decoder.run(self.setting.prompts))
        decoder.drafter.reset()
        again = _by_index(decoder.run(self.setting.prompts))
        fresh = self.decode(2, temperature)
        for i, response in again.items():
            assert _taus(response) == _taus(fresh[i]), (
                f"reset() leaves something behind: prompt {i} has drafts of {_taus(response)} accepted tokens after a "
                f"warm-up and {_taus(fresh[i])} without one"
            )

    def test_an_interrupted_step_leaves_nothing(self) -> None:
        """After an error in the drafter, the target or the verifier a decoder drafts as a new one."""
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
                    f"an error in the {place}, in the middle of a step, leaves something behind: prompt {i} has "
                    f"drafts of {_taus(response)} accepted tokens afterwards and {_taus(fresh[i])} in a new decoder; "
                    "forget it in start()"
                )

    def test_retire_is_told_how_a_sequence_ended(self) -> None:
        """retire(row, finish) is called once for every sequence, and may be called for one that is given up."""
        decoder = self.decoder(2, self.each_temperature()[0], max_new_tokens=NEW_TOKENS)
        told: list[Any] = []
        free = decoder.drafter.free

        def listening(row: int, finish_reason: str | None = None) -> None:
            told.append(finish_reason)
            free(row, finish_reason)

        decoder.drafter.free = listening  # type: ignore[method-assign]
        list(decoder.run(self.setting.prompts))
        assert told == ["length"] * len(self.setting.prompts)
        decoder.start(0, self.setting.prompts[0])
        decoder.step()
        decoder.abandon()
        assert told[-1] is None
        list(decoder.run(self.setting.prompts))  # and the slots are clean

    def test_nothing_waits_for_the_device(self) -> None:
        """propose() reads no value: on the meta device, where looking at one raises, it drafts all the same."""
        if self.asks_device:
            return
        for temperature in self.each_temperature():
            sampling = Sampling(temperature=temperature)
            context = self.setting.context(2, sampling, "meta")
            try:
                drafter = self.make(context)
            except Exception as error:
                pytest.skip(f"it cannot be built without values: {error}")
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
                try:
                    drafter.propose(sequences, rng)
                except (NotImplementedError, RuntimeError) as error:
                    if "meta" not in str(error).lower():
                        raise
                    raise AssertionError(
                        "propose() waits for the device: it looks at a value of a tensor (bool(), int(), .item(), "
                        f".tolist(), a mask as an index). Say asks_device = True if it must ({error})"
                    ) from error

    def test_the_law_of_a_text(self) -> None:
        """The distributions of `text_distribution` are those of the drafts from each token of a text."""
        drafts = type("TeacherForced", (self.drafting,), {"text_distribution": Drafter.text_distribution})
        for temperature in self.each_temperature():
            sampling = Sampling(temperature=temperature)
            if (
                type(self).make is not DrafterContract.make
                or self.drafting.text_distribution is Drafter.text_distribution
            ):
                return
            traits = self.drafting.traits(self.config, sampling)
            if not traits.is_chain or traits.adapts:
                continue
            texts = [Recorded("", "", prompt, [*prompt[::-1], *prompt]) for prompt in self.setting.prompts]
            make = partial(lambda sampling, rows, *_: self.setting.context(rows, sampling), sampling)
            both = [list(score_drafter((cls, self.config), texts, make, depth=3)) for cls in (self.drafting, drafts)]
            for told, sample_drafts in zip(*both, strict=True):
                off = abs(np.exp(told.log_q) - np.exp(sample_drafts.log_q)).max()
                assert off < 1e-3, (
                    f"text_distribution() differs from the drafts by {off:.3g} in a token's probability. Leave it out "
                    "if the distribution depends on more than the tokens before"
                )

    # -- pieces -----------------------------------------------------------------------------------------------

    def _validate(self, draft: Draft, decoder: Decoder) -> None:
        vocabulary, name = decoder.target.vocab_size, f"drafter '{self.drafting.name}'"
        validate_draft(draft, decoder.traits, decoder.sequences, vocabulary, drafter=name)

    def _propose(self, decoder: Decoder) -> Draft:
        seqs = decoder.sequences
        rng = decoder.rng.for_step(seqs.stream, [len(h) for h in seqs.history], decoder.target.device)
        with torch.inference_mode():
            return decoder.drafter.propose(seqs, rng)

    def _rejected(self, decoder: Decoder, draft: Draft) -> tuple[Any, list[int], Any]:
        """The verdict, taus and scores of a step in which nothing is accepted."""
        seqs = decoder.sequences
        with torch.inference_mode():
            step = Step(decoder.rng.for_step([], [], decoder.target.device), validated=True)
            step.draft = draft
            decoder._score(step)
            decoder.target.commit([1] * seqs.batch_size)
        nothing = torch.zeros(seqs.batch_size, dtype=torch.long)
        path = None if draft.is_chain else torch.full((seqs.batch_size, max(draft.width, 1)), -1)
        verdict = Verdict(nothing, nothing.clone(), path)
        for row in range(seqs.batch_size):
            seqs.append(row, [0])
        return verdict, [0] * seqs.batch_size, step.scores

    def _without_drafter(self) -> dict[int, Response]:
        sampling, rule = Sampling(temperature=0), get("verifiers", "greedy")
        context = self.setting.context(1, sampling)
        none = get("drafters", "none")
        decoder = build_decoder(context, (none, none.Config()), (rule, rule.Config()), max_new_tokens=NEW_TOKENS)
        return _by_index(decoder.run(self.setting.prompts))

    def _bias(self, sampling: Sampling) -> tuple[float, float | None]:
        """How far, in standard deviations, drawn tokens are from their q: those that count, and all that have a q."""
        counted = Counted()
        rule = self.rules(sampling)[0]
        context = self.setting.context(ROWS, sampling)
        decoder = build_decoder(context, self.make, rule(rule.Config()), on_step=counted, max_new_tokens=96)
        prompts = [self.setting.prompts[i % len(self.setting.prompts)] for i in range(self.setting.drafts)]
        for _ in decoder.run(prompts):
            if counted.drafts >= self.setting.drafts or not counted.drafts:
                break
        return (counted.far("kept"), counted.far("all")) if counted.drafts else (0.0, None)


def _by_index(responses: Any, names: Sequence[int] | None = None) -> dict[int, Response]:
    found = {response.index: response for response in responses}
    return {(i if names is None else names[i]): found[i] for i in sorted(found)}


def _taus(response: Response) -> list[int]:
    return [r.tau for r in response.steps]
