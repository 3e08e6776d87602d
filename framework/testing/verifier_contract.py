"""Contract tests of verifiers: `VerifierContract`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..api.build import build_decoder
from ..certificate.certify import check_wide
from ..certificate.drafts import DRAFTS, AnyDrafter
from ..certificate.faults import Verification, check_fully
from ..certificate.rows import CannotRun, Row, certify_row, diagnosed
from ..certificate.table_lm import Toy
from ..certificate.toys import built_in_toys
from ..contracts.draft import DenseScores, Draft, Verdict
from ..contracts.rng import CounterRng, StepRng
from ..contracts.sampling import Sampling
from ..contracts.steps import StepEvent
from ..contracts.verifier import Verifier, VerifierTraits, incompatible
from ..engine.decoder import Decoder
from ..engine.validation import validate_verdict
from ..plugins import get, traits_of
from .settings import OneThread, Toys, device_comparison, no_waits

#: Draft length.
GAMMA = 3
#: Exact models for enumeration.
TOYS, DEEP = ("G1", "G2"), "D6"
ROWS = 4
#: Recorded steps of each draft; limits are ragged in the last one.
STEPS = 3


@cache
def _recorded_steps(label: str, sampling: Sampling, final_q: bool) -> list[tuple[Draft, Tensor]]:
    """Drafts of `STEPS` real steps and their p."""
    events: list[StepEvent] = []
    context = Toys().context(ROWS, sampling)
    match = get("verifiers", "greedy" if sampling.temperature == 0 else "sample-match")
    context.final_q = final_q
    drafter = partial(DRAFTS[label].build, gamma=GAMMA)
    decoder = build_decoder(context, drafter, match(match.Config()), on_step=events.append)
    for row in range(ROWS):
        decoder.start(row, Toys.prompts[row], row, row)
    for position in range(STEPS):
        if position == STEPS - 1:
            decoder.sequences.limit[:] = [2, 0, 1, 3]
        decoder.step()
    return [(event.draft, event.scores.p) for event in events]


def assert_certified(rows: Sequence[Row], toys: Sequence[Toy], drafts: Mapping[str, AnyDrafter], who: str) -> None:
    """Raise AssertionError, with the diagnosis, if a certified row has an error, or is not lossless."""
    for row in rows:
        assert row.error is None, f"{who} raised on toy {row.toy}, '{row.draft}' drafts: {row.error}"
    if any(row.failed for row in rows):
        row = diagnosed(rows, toys, drafts)
        assert row.fault is None, row.fault
        assert row.diagnosis is not None
        explanation = "\n".join(["Fix it, or declare a verifier lossless=False", *row.diagnosis.lines()])
        raise AssertionError(
            f"{who} is not lossless: for '{row.draft}' drafts the output is {row.tv:.3g} away from the target's "
            f"distribution (total variation, toy {row.toy}). {explanation}"
        )


class VerifierContract(OneThread):
    """Base class of a verifier's contract tests; subclass it, set the verifier, and run pytest.

    Attributes:
        verifier: the class, or the name of a registered one.
        options: of its ``Config``.
    """

    verifier: ClassVar[type[Verifier] | str]
    options: ClassVar[Mapping[str, Any]] = {}

    # -- setup ------------------------------------------------------------------------------------------------

    @property
    def rule(self) -> type[Verifier]:
        return get("verifiers", self.verifier) if isinstance(self.verifier, str) else self.verifier

    def make(self) -> Verifier:
        """The verifier under test."""
        return self.rule(self.rule.Config(**self.options))

    @property
    def traits(self) -> VerifierTraits:
        return traits_of("verifiers", self.rule, self.rule.Config(**self.options))

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=0.0 if self.traits.temperature_zero_only else 1.0)

    def labels(self) -> list[str]:
        """Draft labels of ``crossdraft certify`` that are compatible with the verifier."""
        labels = []
        for label, kind in DRAFTS.items():
            drafter, config = kind.config(GAMMA)
            draft = drafter.traits(config, self.sampling)
            if incompatible(kind.drafter, draft, self.rule.name, self.traits, self.sampling) is None:
                labels.append(label)
        return labels

    def recorded(self, steps: int = STEPS) -> Iterator[tuple[str, Draft, Tensor, CounterRng, list[int], int]]:
        """Yield drafts of real steps: label, draft, p, and the random source, streams and position of the step."""
        for label in self.labels():
            events = _recorded_steps(label, self.sampling, self.traits.modifies_target)  # type: ignore[arg-type]
            for position, (draft, p) in enumerate(events[:steps]):
                yield label, draft.map_rows(Tensor.clone), p.clone(), CounterRng(3), list(range(ROWS)), position

    def verdict_of(self, verifier: Verifier, draft: Draft, p: Tensor, rng: StepRng) -> Verdict:
        for row in range(draft.batch_size):
            verifier.start(row)
        with torch.inference_mode():
            return verifier.verify(draft, p, rng)

    # -- the tests --------------------------------------------------------------------------------------------

    def test_traits(self) -> None:
        assert isinstance(self.rule.name, str) and self.rule.name, "the class needs a name"
        traits = self.traits
        assert traits == self.traits, "traits() must return equal values for equal configs"
        assert self.labels(), f"'{self.rule.name}' does not accept any known draft: traits.accepts is {traits.accepts}"

    def test_lossless_by_enumeration(self) -> None:
        """The joint distribution of the output is exactly the target's, for all compatible drafts.

        One step suffices for a stateless verifier; a stateful one is enumerated over two. One draft is six tokens deep.
        """
        toys, rows = {toy.name: toy for toy in built_in_toys()}, []
        for number, label in enumerate(self.labels()):
            for toy in (toys[name] for name in (TOYS if number else (*TOYS, DEEP))):
                try:
                    options = self.rule.Config(**self.options)
                    rows.append(certify_row(toy, label, DRAFTS[label], self.rule, options=options))
                except CannotRun:
                    continue
        assert_certified(rows, list(toys.values()), DRAFTS, f"verifier '{self.rule.name}'")

    def test_verdicts_keep_the_contract(self) -> None:
        """Every verdict passes `validate_verdict`: tau, path and tokens."""
        for label, draft, p, numbers, streams, position in self.recorded():
            verdict = self.verdict_of(self.make(), draft, p, numbers.for_step(streams, [position] * ROWS, p.device))
            prob_of = DenseScores(p, p).prob_of if self.traits.lossless else None
            name = f"on '{label}' drafts, verifier '{self.rule.name}'"
            validate_verdict(draft, verdict, p.shape[2], verifier=name, prob_of=prob_of)

    def test_rows_do_not_share_state(self) -> None:
        """A verdict depends on its row and rng only, and its inputs are not modified.

        It is the same again, by itself, and beside a longer draft.
        """
        for _, draft, p, numbers, streams, position in self.recorded():

            def rng(rows: Sequence[int], numbers: Any = numbers, streams: Any = streams, at: int = position) -> StepRng:
                return numbers.for_step([streams[row] for row in rows], [at] * len(rows), torch.device("cpu"))

            check_fully(self.make, Verification(draft, p, rng), padding=True)

    def test_large_vocabulary(self) -> None:
        """In a vocabulary of `WIDE` tokens, most of which are impossible, verdicts have the same distribution."""
        for label, draft, p, *_ in self.recorded(1):
            check_wide(self.make, draft, p, f"'{self.rule.name}' on '{label}' drafts")

    def test_empty_draft(self) -> None:
        """An empty draft yields a token with p > 0."""
        target = Toys().context(ROWS, self.sampling).target
        assert target is not None
        p = self.sampling.probs(target.forward(torch.tensor([[0], [1], [2], [3]]))[0])
        rng = CounterRng(0).for_step(range(ROWS), [0] * ROWS, p.device)
        verdict = self.verdict_of(self.make(), Draft.empty(ROWS), p, rng)
        assert verdict.length.tolist() == [0] * ROWS
        assert bool((p[:, 0].gather(1, verdict.token[:, None]) > 0).all()), "an impossible token was emitted"

    def test_no_device_synchronization(self) -> None:
        """verify() does not synchronise with the device: it runs on the meta device, where reading a value raises."""
        for label, draft, p, _, streams, position in self.recorded(1):
            on_meta = draft.map_rows(lambda t: t.to("meta"))
            rng = CounterRng(0).for_step(streams, [position] * ROWS, torch.device("meta"))
            with no_waits(f"'{self.rule.name}'", f" on '{label}' drafts"), NoMask():
                self.verdict_of(self.make(), on_meta, p.to("meta"), rng)

    def test_on_cuda(self) -> None:
        """Decoding on CUDA equals that on the CPU, and verify() does not wait for it."""
        compare_devices = device_comparison().compare_devices
        for label in self.labels():
            drafter, config = DRAFTS[label].config(GAMMA)

            def build(place: str, label: str = label, **loop: Any) -> Decoder:
                context = Toys().context(ROWS, self.sampling, place)
                return build_decoder(context, partial(DRAFTS[label].build, gamma=GAMMA), self.make(), **loop)

            waits = drafter.traits(config, self.sampling).waits
            compare_devices(f"'{self.rule.name}' on '{label}' drafts", build, Toys.prompts, self.rule, waits)

    def test_state_can_be_put_back(self) -> None:
        """snapshot() and restore() of a stateful verifier round-trip; equal states have equal snapshots."""
        if not self.traits.stateful:
            for row in range(ROWS):
                assert self.make().snapshot(row) is None, "it has state: set stateful=True in its traits"
            return
        for _, draft, p, numbers, streams, position in self.recorded():
            verifier, restored = self.make(), self.make()
            self.verdict_of(verifier, draft, p, numbers.for_step(streams, [position] * ROWS, p.device))
            verifier.observe([0] * ROWS, draft.count.tolist())
            for row in range(ROWS):
                snapshot = verifier.snapshot(row)
                hash(snapshot)
                restored.start(row)
                restored.restore(row, snapshot)
                assert restored.snapshot(row) == snapshot, "restore() does not restore the state of snapshot()"


class NoMask(TorchDispatchMode):
    """Mode that rejects assignment by a mask, which synchronises on a device."""

    PUTS = (torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in self.PUTS and any(
            i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1]
        ):
            raise RuntimeError("a mask on the meta device has no entries")
        return func(*args, **(kwargs or {}))
