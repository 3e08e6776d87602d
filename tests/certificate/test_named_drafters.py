"""``crossdraft certify --drafter``: one drafter lives through all steps of a path, and what it learns counts."""

import json
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from strategies import Frequent

from crossdraft.framework import plugins
from crossdraft.framework.certificate import rows
from crossdraft.framework.certificate.certify import Certificate, certify
from crossdraft.framework.certificate.drafts import DRAFTS, named_drafter
from crossdraft.framework.certificate.table_lm import Toy
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.draft import Draft
from crossdraft.framework.contracts.draft_kind import CHAIN
from crossdraft.framework.contracts.drafter import Drafter, DraftTraits, StrategyConfig
from crossdraft.framework.errors import UsageError


class Counts(Drafter):
    """Draws from token frequencies of each sequence, without a model; q is correct."""

    name = "counts"

    class Config(StrategyConfig):
        gamma: int = 2

    config: Config

    def __init__(self, config: StrategyConfig, context: Any):
        super().__init__(config, context)
        self.probs: dict[int, torch.Tensor] = {}
        self.proposed = 0

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=False, nodes=config.gamma)

    def start(self, row: int, prompt: Any, hidden: Any = None) -> None:
        self.probs[row] = torch.ones(self.context.vocab_size, dtype=torch.float64)

    def propose(self, sequences: Any, rng: Any) -> Draft:
        self.proposed += 1
        steps = min(self.config.gamma, max(sequences.limit))
        if not steps:
            return Draft.empty(sequences.batch_size, sequences.device)
        q = torch.stack([probs / probs.sum() for _, probs in sorted(self.probs.items())])
        tokens = torch.stack([rng.draw(self.drawn_from(q), "draft", i) for i in range(steps)], 1)
        length = torch.tensor(sequences.limit).clamp(max=steps)
        return Draft.chain(tokens, length, self.reported(q, sequences)[:, None].expand(-1, steps, -1).contiguous())

    def observe(self, sequences: Any, draft: Any, verdict: Any, accepted: Any, scores: Any) -> None:
        for row, history in enumerate(sequences.history):
            for token in history[-accepted[row] - 1 :]:
                self.probs[row] = self.probs[row].index_add(
                    0, torch.tensor([token]), torch.ones(1, dtype=torch.float64)
                )

    def drawn_from(self, q: torch.Tensor) -> torch.Tensor:
        return q

    def reported(self, q: torch.Tensor, sequences: Any) -> torch.Tensor:
        return q


class LiesOnceItLearnt(Counts):
    """Drafter that reports its initial distribution although it has changed."""

    name = "lies-once-it-learnt"

    def reported(self, q: torch.Tensor, sequences: Any) -> torch.Tensor:
        return torch.full_like(q, 1 / q.shape[1])


class LiesTheSecondTime(Counts):
    """Counts its own steps; nothing is observed."""

    name = "lies-the-second-time"
    observe = Drafter.observe

    def drawn_from(self, q: torch.Tensor) -> torch.Tensor:
        return q if self.proposed == 1 else torch.nn.functional.one_hot(q.argmax(-1), q.shape[1]).double()


class LiesAboutHistory(Counts):
    """Drafter that reports a wrong distribution after two equal tokens of its own step."""

    name = "lies-about-history"

    def reported(self, q: torch.Tensor, sequences: Any) -> torch.Tensor:
        double = torch.tensor([len(h) > 6 and h[-1] == h[-2] for h in sequences.history])
        return torch.where(double[:, None], q.flip(-1), q)


class SharedCounts(Counts):
    """All sequences it has seen share a memory."""

    name = "shared-counts"
    batches: list[int] = []  # noqa: RUF012 - all instances write here

    def __init__(self, config: StrategyConfig, context: Any):
        super().__init__(config, context)
        self.batches.append(context.batch_size)
        self.reset()

    def reset(self) -> None:
        self.shared = torch.ones(self.context.vocab_size, dtype=torch.float64)

    def start(self, row: int, prompt: Any, hidden: Any = None) -> None:
        self.probs[row] = self.shared

    def observe(self, sequences: Any, draft: Any, verdict: Any, accepted: Any, scores: Any) -> None:
        super().observe(sequences, draft, verdict, accepted, scores)
        self.shared = self.probs[0]
        self.probs = dict.fromkeys(self.probs, self.shared)


class SharedLie(SharedCounts):
    name = "shared-lie"
    reported = LiesOnceItLearnt.reported


class Shy(Counts):
    """After two steps it has learnt too little to draft."""

    name = "shy"

    def propose(self, sequences: Any, rng: Any) -> Draft:
        return Draft.empty(sequences.batch_size, sequences.device)


def certificate_of(toy: Toy, drafter: type[Drafter], steps: int, **options: Any) -> Certificate:
    rule = plugins.get("verifiers", options.pop("rule", "token"))
    build = lambda context, gamma: drafter(drafter.Config(), context)  # noqa: E731
    return certify(toy, build, rule, steps=steps, **options)


# -- one drafter through all steps --------------------------------------------------------------------------


@pytest.mark.parametrize("drafter", [Counts, SharedCounts])
@pytest.mark.parametrize("rule", ["token", "block"])
def test_honest_learner_passes(toys: dict[str, Toy], drafter: type, rule: str) -> None:
    two = certificate_of(toys["T0"], drafter, 2, rule=rule, gamma=1)
    assert two.lossless and two.coverage.drafted
    # T0's target does not depend on the context: a drafter that had learnt nothing would accept as much again.
    assert two.expected_tau[1] > two.expected_tau[0] + 0.01


def test_learning_from_outputs(toys: dict[str, Toy]) -> None:
    """T0 with drafts of one token, by hand: E[tau] of step two is the mean over the outputs of step one."""
    p = (1 / 3, 2 / 3)

    def accepted(counts: tuple[float, float]) -> float:
        total = sum(counts)
        return sum(min(p[x], counts[x] / total) for x in (0, 1))

    # q = (1/2, 1/2): token 1 is accepted always, token 0 with probability 2/3; a rejection emits 1.
    after = {(0, 0): 1 / 9, (0, 1): 2 / 9, (1, 0): 1 / 6, (1, 1): 1 / 3, (1,): 1 / 6}
    second = sum(w * accepted((1 + outputs.count(0), 1 + outputs.count(1))) for outputs, w in after.items())
    two = certificate_of(toys["T0"], Counts, 2, gamma=1)
    assert two.expected_tau == pytest.approx([5 / 6, second], abs=1e-12)


@pytest.mark.parametrize("drafter", [LiesOnceItLearnt, LiesTheSecondTime, LiesAboutHistory, SharedLie])
@pytest.mark.parametrize("toy", ["T0", "G2"])
def test_learners_that_cheat_are_caught(toys: dict[str, Toy], drafter: type, toy: str) -> None:
    assert certificate_of(toys[toy], drafter, 1, gamma=1).lossless  # so far all is well
    assert certificate_of(toys[toy], drafter, 2, gamma=1).tv > 1e-3


def test_memory_of_all_sequences_sees_one_path_at_time(toys: dict[str, Toy]) -> None:
    SharedCounts.batches.clear()
    two = certificate_of(toys["T0"], SharedCounts, 2, gamma=1)
    assert set(SharedCounts.batches) == {1} and len(SharedCounts.batches) == two.paths
    assert two.expected_tau == pytest.approx(certificate_of(toys["T0"], Counts, 2, gamma=1).expected_tau, abs=1e-12)


def test_somebody_elses_learner(toys: dict[str, Toy]) -> None:
    """It drafts what followed most often: nothing in the first step, something in the second."""
    one, two = certificate_of(toys["G2"], Frequent, 1), certificate_of(toys["G2"], Frequent, 2)
    assert one.lossless and not one.coverage.drafted
    assert two.lossless and two.coverage.drafted and two.expected_tau[1] > 0


def test_replayed_steps_agree_with_merged_ones(toys: dict[str, Toy]) -> None:
    chain = DRAFTS["chain"].build
    for rule in ("token", "greedy-block"):
        replayed, merged = (
            certify(toys["G2"], chain, plugins.get("verifiers", rule), steps=2, gamma=[3, 1], markov=markov)
            for markov in (False, True)
        )
        assert replayed.expected_tau == pytest.approx(merged.expected_tau, abs=1e-12)
        assert replayed.tv < 1e-12 and merged.tv < 1e-12


# -- the command ---------------------------------------------------------------------------------------------


@pytest.fixture
def small(tmp_path: Path) -> list[str]:
    """The option for T0 alone."""
    built_in = json.loads(Path(rows.__file__).with_name("toys.json").read_text(encoding="utf-8"))
    path = tmp_path / "T0.json"
    path.write_text(json.dumps({"T0": built_in["T0"]}), encoding="utf-8")
    return ["--toy", str(path)]


def run(capsys: Any, *options: str) -> tuple[int, str, str]:
    code = cli.main(["certify", *options])
    out, err = capsys.readouterr()
    return code, out, err


def test_every_compatible_verifier(capsys: Any, small: list[str]) -> None:
    code, out, _ = run(capsys, "--drafter", "{name: draft-model, temperature: 0}", "--json", "--gamma", "1", *small)
    table = json.loads(out)
    assert code == 0 and {row["verifier"] for row in table} == {*plugins.entries("verifiers")}
    assert {(row["toy"], row["draft"], row["steps"], row["gamma"]) for row in table} == {("T0", "draft-model", 2, 1)}
    assert all(row["lossless"] and row["drafted"] for row in table if row["verifier"] in ("token", "block"))


@pytest.mark.parametrize("drafter", [LiesOnceItLearnt, SharedLie])
def test_cheat_is_exit_code_1(capsys: Any, install: Callable, small: list[str], drafter: Any) -> None:
    install("drafters", (drafter.name, drafter))
    options = ("-v", "--drafter", drafter.name, "--verifier", "token", "--gamma", "1", *small)
    code, out, _ = run(capsys, *options)
    assert code == 1 and next(line for line in out.splitlines() if drafter.name in line).endswith("NO")
    assert out.splitlines()[-1].startswith(
        f"FAILED: drafter '{drafter.name}' with verifier 'token' changes the target's"
    )
    # One step from the prompt shows nothing, but one from a filled memory does.
    code, out, _ = run(capsys, *options, "--steps", "1")
    assert code == 1 and out.splitlines()[-1].startswith(f"FAILED: drafter '{drafter.name}': q is not the distribution")


@pytest.mark.parametrize("drafter", ["none", "shy"])
def test_certificate_without_drafts_does_not_pass(
    capsys: Any, install: Callable, small: list[str], drafter: str
) -> None:
    install("drafters", (Shy.name, Shy))
    options = ("--drafter", drafter, "--verifier", "token", *small)
    code, out, _ = run(capsys, *options)
    assert code == 1 and out.splitlines()[-3].endswith("nothing was drafted")
    assert out.splitlines()[-1].startswith(
        f"not exercised: 1 pair with 'token', so nothing is proved (draft '{drafter}'"
    )
    code, out, _ = run(capsys, *options, "--json")
    (row,) = json.loads(out)
    assert code == 1 and row["lossless"] is True and row["drafted"] is False


def test_plain_decoding_is_reported_and_accepted(capsys: Any, small: list[str]) -> None:
    code, out, _ = run(capsys, "--draft", "chain", "--verifier", "token", "--gamma", "0", *small)
    assert code == 0 and out.splitlines()[-3].endswith("nothing was drafted")


def test_options_are_spelt_as_in_recipes(capsys: Any, small: list[str], golden: dict) -> None:
    mapping, settings = "{name: draft-model-tree, branching: [2, 1]}", ["branching=[2,1]", "siblings=greedy"]
    whole = named_drafter(mapping[:-1] + ", siblings: greedy}")
    assert whole == named_drafter("draft-model-tree", settings) == named_drafter(mapping, settings[1:])
    options = ("--drafter", mapping, "--drafter-option", settings[1])
    code, out, _ = run(capsys, *options, "--json", "--verifier", "greedy-draft-optimal", *small)
    (row,) = json.loads(out)
    want = golden["expected_tau"]["greedy-draft-optimal"]["tree-greedy-2-1"]["T0"][0]
    assert code == 0 and row["draft"] == "draft-model-tree" and row["gamma"] == 2
    assert row["expected_tau"][0] == pytest.approx(float(Fraction(want)), abs=1e-9)


def test_label_matches_tables(capsys: Any, small: list[str]) -> None:
    mapping = "{name: draft-model, label: two, gamma: 2, temperature: 0}"
    code, out, _ = run(capsys, "-v", "--drafter", mapping, "--verifier", "token", "--gamma", "1", *small)
    assert code == 0 and out.splitlines()[-3].split()[:5] == ["T0", "two", "token", "1", "2"]


def test_bounds_of_named_drafter(toys: dict[str, Toy]) -> None:
    row = rows.Row("T0", "draft-model", plugins.get("verifiers", "block"), (2, 2), 1.0)
    result = rows.row_bounds(toys["T0"], named_drafter("{name: draft-model, gamma: 2}"), row, {})
    assert not result.missing and result.lp == pytest.approx(11 / 9)
    assert (result.single_draft, result.full_information, result.optimal_transport) == pytest.approx(
        (11 / 9, 4 / 3, 2 / 3)
    )


class NeedsLayers(Counts):
    name = "needs-layers"

    def __init__(self, config: StrategyConfig, context: Any):
        super().__init__(config, context)
        self.depth = context.target_model.config.num_hidden_layers


class NeedsHeads(Counts):
    name = "needs-heads"

    def __init__(self, config: StrategyConfig, context: Any):
        super().__init__(config, context)
        context.load_heads("mine")


@pytest.mark.parametrize(
    "options, sentence",
    [
        (["nobody"], "there is no drafter named 'nobody'"),
        (["draft-modle"], "did you mean 'draft-model'?"),
        (["eagle3"], "'eagle3' cannot be enumerated .* it reads the target's hidden states"),
        (["medusa"], "'medusa' cannot be enumerated"),
        (["needs-layers"], "'needs-layers' cannot be enumerated .* AttributeError: 'NoneType'"),
        (["needs-heads"], "'needs-heads' cannot be enumerated .* needs to load heads, which target 'toy' does not"),
        (["{name: draft-model, gama: 2}"], "drafter 'draft-model', key 'gama'"),
        (["draft-model", "--drafter-option", "gamma=[1"], "this is not YAML"),
        (["draft-model", "--drafter-option", "gamma"], "write key=value"),
        (["draft-model", "--drafter-option", "gamma=-1"], "key 'gamma'"),
        (["draft-model", "--drafter-option", "name=[1]"], "--drafter: key 'name'"),
        (["{gamma: 2}"], "a mapping needs a name"),
        (["{name: draft-model"], "this is not YAML"),
        (
            ["{name: draft-model-iid, K: 200, gamma: 20}"],
            "T0, draft-model-iid: there may be about 10.122 decision paths",
        ),
    ],
)
def test_refusals_are_one_sentence(capsys: Any, install: Callable, options: list[str], sentence: str) -> None:
    install("drafters", (NeedsLayers.name, NeedsLayers))
    install("drafters", (NeedsHeads.name, NeedsHeads))
    code, out, err = run(capsys, "--verifier", "specinfer", "--drafter", *options)
    assert code == 2 and not out and err.count("\n") == 1
    assert re.search(sentence.replace("10^2", r"10\^2").replace("?", r"\?"), err)


def test_models_that_were_not_named_are_toys() -> None:
    assert named_drafter("draft-model").options.model == "toy"
    assert named_drafter("{name: draft-model, model: mine}").options.model == "mine"
    with pytest.raises(UsageError, match="cannot be enumerated"):
        named_drafter("eagle")
