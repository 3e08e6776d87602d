"""What the certificate finds agrees with closed forms, and the certify command reports what it finds.

That every registered verifier has its golden numbers is tests/verifiers/test_golden.py.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from crossdraft.framework import cli, plugins
from crossdraft.framework.certify import TOLERANCE, Certificate, certify
from crossdraft.framework.certify_command import DRAFTS
from crossdraft.framework.draft import Draft, Verdict
from crossdraft.framework.drafter import Drafter, DraftTraits
from crossdraft.framework.hookspecs import hookimpl
from crossdraft.framework.tablelm import Toy
from crossdraft.framework.verifier import Verifier, VerifierTraits

TOYS = ("T0", "G1", "G2", "G3", "G4")
CHAINS = ("chain", "point-mass", "stop-early")
Certified = Callable[[str, str, str], Certificate]


@pytest.fixture(scope="module")
def certified(toys: dict[str, Toy], drafts: dict[str, Callable]) -> Certified:
    """``certified(toy, draft label, verifier)``: two rounds, each pair enumerated once."""
    found: dict[tuple[str, str, str], Certificate] = {}

    def look_up(toy: str, draft: str, verifier: str) -> Certificate:
        key = (toy, draft, verifier)
        if key not in found:
            rule = plugins.get("verifiers", verifier)
            temperature = 0.0 if verifier == "greedy" else 1.0
            found[key] = certify(toys[toy], drafts[draft], rule, rounds=2, temperature=temperature, markov=True)
        return found[key]

    return look_up


def exact(values: Sequence[str]) -> list[float]:
    return [float(Fraction(value)) for value in values]


# -- chains ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verifier", ["token", "block", "greedy"])
@pytest.mark.parametrize("draft", CHAINS)
@pytest.mark.parametrize("toy", TOYS)
def test_two_rounds_are_lossless(certified: Certified, toy: str, draft: str, verifier: str) -> None:
    assert certified(toy, draft, verifier).tv <= TOLERANCE


def closed_form(toy: Toy, draft: str, verifier: str) -> float:
    """E[tau] of the first round without decoding: the sum over prefixes of Pr(drafted) Pr(accepted)."""
    total = 0.0
    for depth in range(1, toy.gamma + 1):
        for prefix in itertools.product(range(toy.vocab_size), repeat=depth):
            drafted = accepted = 1.0
            for i, (last, token) in enumerate(zip((toy.vocab_size, *prefix), prefix, strict=False)):
                p, q = float(toy.target[last, token]), float(toy.drafter[last, token])
                if draft == "point-mass":
                    q = float(token == int(toy.drafter[last].argmax()))
                if q == 0:
                    drafted = 0.0
                    break
                if draft == "stop-early" and q < 0.4 - 1e-9 and i + 1 < depth:
                    drafted = 0.0  # the draft ended with this token
                drafted *= q
                if verifier == "token":
                    accepted *= min(1.0, p / q)
                else:
                    accepted = min(1.0, accepted * p / q)
            total += drafted * accepted
    return total


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize("draft", CHAINS)
@pytest.mark.parametrize("toy", TOYS)
def test_expected_tau_of_every_kind_of_draft(
    certified: Certified, toys: dict[str, Toy], toy: str, draft: str, verifier: str
) -> None:
    want = closed_form(toys[toy], draft, verifier)
    assert certified(toy, draft, verifier).expected_tau[0] == pytest.approx(want, abs=1e-9)


@pytest.mark.parametrize("verifier", ["token", "block", "greedy"])
@pytest.mark.parametrize("toy", TOYS)
def test_stopping_early_accepts_less(certified: Certified, toy: str, verifier: str) -> None:
    early, full = certified(toy, "stop-early", verifier), certified(toy, "chain", verifier)
    assert early.expected_tau[0] < full.expected_tau[0] - 1e-3


@pytest.mark.parametrize("verifier", ["token", "block", "greedy"])
@pytest.mark.parametrize("draft", CHAINS)
def test_gamma_zero_is_plain_decoding(toys: dict[str, Toy], drafts: dict, draft: str, verifier: str) -> None:
    rule = plugins.get("verifiers", verifier)
    temperature = 0.0 if rule.traits.temperature_zero_only else 1.0
    found = certify(toys["G1"], drafts[draft], rule, rounds=3, gamma=0, temperature=temperature)
    assert found.tv <= TOLERANCE
    assert found.expected_tau == [0, 0, 0]
    assert found.first_tau == pytest.approx([1])


class FixedChain(Drafter):
    """Proposes the same tokens every round, as a point mass."""

    name = "fixed-chain"

    def __init__(self, context: Any, tokens: Sequence[int]):
        super().__init__(self.Config(), context)
        self.tokens = tokens

    @classmethod
    def traits(cls, config: Any, sampling: Any) -> DraftTraits:
        return DraftTraits(drawn="chain", point_mass=True, nodes=16)

    def propose(self, sequences: Any, rng: Any) -> Draft:
        b = sequences.batch_size
        tokens = torch.tensor(self.tokens).expand(b, -1)
        return Draft.chain(tokens, torch.tensor(sequences.limit).clamp(max=tokens.shape[1]))


@pytest.mark.parametrize("verifier", ["token", "block"])
@pytest.mark.parametrize(
    "toy, tokens, want",
    [("T0", (1, 1), "10/9"), ("G1", (0, 1), "4/5"), ("G2", (0, 1, 0), "27/16"), ("G3", (0, 2), "5/8")],
)
def test_fixed_chain_as_a_point_mass(
    toys: dict[str, Toy], toy: str, tokens: Sequence[int], want: str, verifier: str
) -> None:
    rule = plugins.get("verifiers", verifier)
    found = certify(toys[toy], lambda context, gamma: FixedChain(context, tokens), rule, rounds=2)
    assert found.tv <= TOLERANCE
    assert found.expected_tau[0] == pytest.approx(float(Fraction(want)), abs=1e-9)


# -- verifiers with state -------------------------------------------------------------------------------


class ByTurn(Verifier):
    """Counts each row's rounds; `odd` rounds are judged by one rule, even ones by another."""

    name = "by-turn"
    traits = VerifierTraits(drawn=frozenset({"chain"}), stateful=True)

    def __init__(self) -> None:
        super().__init__()
        self.turn: dict[int, int] = {}
        self.even = plugins.get("verifiers", "token")()
        self.odd = plugins.get("verifiers", "block")()

    def begin(self, row: int) -> None:
        self.turn[row] = 0

    def retire(self, row: int) -> None:
        del self.turn[row]

    def snapshot(self, row: int) -> int:
        return self.turn[row]

    def restore(self, row: int, snapshot: Any) -> None:
        self.turn[row] = snapshot

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        odd = torch.tensor([self.turn[row] % 2 == 1 for row in range(draft.batch_size)])
        for row in self.turn:
            self.turn[row] += 1
        verdicts = [rule.verify(draft, p, Apart(rng, k)) for k, rule in enumerate((self.even, self.odd))]
        even, odds = verdicts
        return Verdict(torch.where(odd, odds.length, even.length), torch.where(odd, odds.token, even.token))


class Apart:
    """A view of a rng whose decisions do not collide with those of the other views."""

    def __init__(self, rng: Any, number: int):
        self.rng, self.offset = rng, 100 * number

    def accept(self, h: torch.Tensor, purpose: str = "accept", index: int = 0) -> torch.Tensor:
        return self.rng.accept(h, purpose, index + self.offset)

    def draw(self, weights: torch.Tensor, purpose: str = "residual", index: int = 0) -> torch.Tensor:
        return self.rng.draw(weights, purpose, index + self.offset)


class AcceptAll(Verifier):
    """Wrong on purpose: keeps every drafted token."""

    name = "accept-all"
    traits = VerifierTraits(drawn=frozenset({"chain"}))

    def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
        rows = torch.arange(draft.batch_size)
        return Verdict(draft.count, rng.draw(p[rows, draft.count]))


class WrongLater(ByTurn):
    def __init__(self) -> None:
        super().__init__()
        self.odd = AcceptAll()


@pytest.mark.parametrize("toy", ["T0", "G1"])
def test_state_travels_between_rounds(toys: dict[str, Toy], drafts: dict, golden: dict, toy: str) -> None:
    found = certify(toys[toy], drafts["chain"], ByTurn, rounds=2, markov=True)
    assert found.tv <= TOLERANCE
    assert found.expected_tau[0] == pytest.approx(exact(golden["expected_tau"]["token"]["chain"][toy])[0], abs=1e-9)
    if toy == "T0":  # its laws do not depend on the context, so the second round is block's first
        assert found.expected_tau[1] == pytest.approx(exact(golden["expected_tau"]["block"]["chain"][toy])[0], abs=1e-9)


@pytest.mark.parametrize("toy", ["T0", "G1"])
def test_a_mistake_in_the_second_round_takes_two_rounds_to_see(toys: dict[str, Toy], drafts: dict, toy: str) -> None:
    assert certify(toys[toy], drafts["chain"], WrongLater, rounds=1).lossless
    found = certify(toys[toy], drafts["chain"], WrongLater, rounds=2, markov=True)
    assert found.tv > 0.05
    assert found.expected_tau[1] == pytest.approx(toys[toy].gamma)


# -- draft labels, and the options of `certify` -------------------------------------------------------------


def drawn_children(q: list[float], label: str) -> Iterator[tuple[float, set[int]]]:
    """The children that a draft of one level can have, with their probability."""
    tokens = range(len(q))
    ranked = sorted(tokens, key=lambda x: -q[x])
    if label in ("chain", "iid-2", "iid-3"):
        for children in itertools.product(tokens, repeat={"chain": 1, "iid-2": 2, "iid-3": 3}[label]):
            yield math.prod(q[x] for x in children), set(children)
    elif label == "tree-wor-2-1":
        for x, y in itertools.permutations(tokens, 2):
            if q[x] > 0:
                yield q[x] * (q[y] / (1 - q[x])), {x, y}
    elif label == "tree-greedy-2-1":
        for y in ranked[1:]:
            yield q[y] / (1 - q[ranked[0]]), {ranked[0], y}
    else:
        yield 1.0, set(ranked[: {"point-mass": 1, "tree-top-2-1": 2}[label]])


@pytest.mark.parametrize("label", [label for label in DRAFTS if label != "stop-early"])
@pytest.mark.parametrize("toy", TOYS)
def test_labels_draw_what_they_say(toys: dict[str, Toy], drafts: dict, toy: str, label: str) -> None:
    """Sampling the target and looking for the token among the children finds it as often as it is one."""
    p, q = toys[toy].target[-1].tolist(), toys[toy].drafter[-1].tolist()
    found = certify(toys[toy], drafts[label], plugins.get("verifiers", "sample-match"), gamma=1)
    want = sum(probability * sum(p[x] for x in children) for probability, children in drawn_children(q, label))
    assert found.expected_tau == pytest.approx([want], abs=1e-12)
    assert found.first_tau == pytest.approx([1 - want, want], abs=1e-12)


@pytest.mark.parametrize(
    "label, drawn",
    [
        ("chain", "chain"),
        ("point-mass", "chain"),
        ("stop-early", "chain"),
        ("iid-2", "iid"),
        ("iid-3", "iid"),
        ("tree-wor-2-1", "without_replacement"),
        ("tree-greedy-2-1", "greedy_draft"),
        ("tree-top-2-1", "deterministic"),
    ],
)
def test_labels_make_drafts_of_their_shape(label: str, drawn: str) -> None:
    assert _drawn(DRAFTS[label], plugins.get("verifiers", "token")) == drawn


@pytest.mark.parametrize("label, verifier", [("chain", "greedy-block"), ("iid-2", "traversal"), ("chain", "token")])
def test_a_draft_length_for_each_round(toys: dict[str, Toy], drafts: dict, label: str, verifier: str) -> None:
    """T0's laws do not depend on the context: a rule without state does in each round what it does in the first."""
    rule, t0 = plugins.get("verifiers", verifier), toys["T0"]
    lengths = [2, 0, 1, 2]
    found = certify(t0, drafts[label], rule, rounds=4, gamma=lengths, markov=True)
    assert found.tv <= TOLERANCE
    assert len(found.first_tau) == 3
    if rule.traits.stateful:
        assert found.expected_tau[1] == 0
    else:
        alone = {n: certify(t0, drafts[label], rule, gamma=n).expected_tau[0] for n in set(lengths)}
        assert found.expected_tau == pytest.approx([alone[n] for n in lengths], abs=1e-12)


def test_one_draft_length_for_all_rounds_is_a_list_of_equal_ones(toys: dict[str, Toy], drafts: dict) -> None:
    block = plugins.get("verifiers", "block")
    same, listed = (certify(toys["G1"], drafts["chain"], block, rounds=2, gamma=gamma) for gamma in (1, [1, 1]))
    assert listed == same


def test_draft_lengths_must_be_as_many_as_rounds(toys: dict[str, Toy], drafts: dict) -> None:
    with pytest.raises(ValueError, match="3 draft lengths for 2 rounds"):
        certify(toys["T0"], drafts["chain"], plugins.get("verifiers", "token"), rounds=2, gamma=[1, 2, 1])


@pytest.mark.parametrize(
    "toy, label, verifier, gamma",
    [
        ("T0", "chain", "greedy-block", [2, 2, 2]),
        ("G2", "chain", "greedy-block", [3, 1]),
        ("G1", "chain", "block", [2, 2]),
        ("T0", "iid-2", "multipath-block", [2, 1]),
        ("T0", "tree-wor-2-1", "traversal", [1, 2]),
    ],
)
def test_merging_states_that_end_alike_changes_nothing(
    toys: dict[str, Toy], drafts: dict, toy: str, label: str, verifier: str, gamma: list[int]
) -> None:
    one_by_one, merged = (
        certify(
            toys[toy],
            drafts[label],
            plugins.get("verifiers", verifier),
            rounds=len(gamma),
            gamma=gamma,
            markov=markov,
        )
        for markov in (False, True)
    )
    assert merged.expected_tau == pytest.approx(one_by_one.expected_tau, abs=1e-12)
    assert merged.first_tau == pytest.approx(one_by_one.first_tau, abs=1e-12)
    assert merged.tv <= TOLERANCE and one_by_one.tv <= TOLERANCE
    assert merged.paths < one_by_one.paths


def test_merging_keeps_apart_what_is_wrong(toys: dict[str, Toy], drafts: dict) -> None:
    one_by_one, merged = (
        certify(toys["T0"], drafts["chain"], WrongLater, rounds=2, markov=markov) for markov in (False, True)
    )
    assert one_by_one.tv > 0.05
    assert merged.tv == pytest.approx(one_by_one.tv, abs=1e-12)


# -- the command ----------------------------------------------------------------------------------------


@pytest.fixture
def install() -> Iterator[Callable[[type], None]]:
    """Register a verifier class in this process for the length of one test."""
    added: list[Any] = []

    def add(verifier: Any) -> None:
        plugin = SimpleNamespace(
            crossdraft_register_verifiers=hookimpl(lambda register: register(verifier.name, verifier))
        )
        plugins.manager().register(plugin, verifier.name)
        added.append(plugin)

    yield add
    for plugin in added:
        plugins.manager().unregister(plugin)


def run(capsys: Any, options: str, *more: str) -> tuple[int, str, str]:
    """Exit code, standard output and standard error of ``crossdraft certify``."""
    code = cli.main(["certify", *options.split(), *more])
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def smallest_toy(tmp_path: Path) -> str:
    """A toy file with T0 alone."""
    built_in = json.loads(files("crossdraft.framework").joinpath("toys.json").read_text(encoding="utf-8"))
    path = tmp_path / "T0.json"
    path.write_text(json.dumps({"T0": built_in["T0"]}), encoding="utf-8")
    return str(path)


def test_by_default_everything_registered_is_certified(capsys: Any, smallest_toy: str) -> None:
    """Each verifier meets every draft it accepts; test_golden.py does so on all toys."""
    code, out, _ = run(capsys, "--json", "--toy", smallest_toy)
    rows = json.loads(out)
    assert code == 0
    for name in plugins.entries("verifiers"):
        rule = plugins.get("verifiers", name)
        accepted = {label for label, kind in DRAFTS.items() if _drawn(kind, rule) in rule.traits.drawn}
        if rule.traits.modifies_target:
            accepted.remove("stop-early")  # its draft length is not fixed before drafting
        assert accepted, f"no draft label exercises the verifier {name!r}"
        assert {row["draft"] for row in rows if row["verifier"] == name} == accepted
    assert all(row["lossless"] for row in rows if plugins.get("verifiers", row["verifier"]).traits.lossless)


def _drawn(kind: Any, rule: Any) -> Any:
    from crossdraft.framework.decoding.sampling import Sampling

    drafter, config = kind.config(2)
    return drafter.traits(config, Sampling(temperature=0 if rule.traits.temperature_zero_only else 1)).drawn


def test_json_rows(capsys: Any, golden: dict) -> None:
    code, out, _ = run(capsys, "--json --verifier block --draft chain --rounds 2")
    rows = json.loads(out)
    assert code == 0
    assert [row["toy"] for row in rows] == list(TOYS)
    for row in rows:
        assert set(row) == {"toy", "draft", "verifier", "gamma", "rounds", "tv", "expected_tau", "lossless"}
        assert (row["draft"], row["verifier"], row["rounds"]) == ("chain", "block", 2)
        assert row["gamma"] == (3 if row["toy"] in ("G2", "G4") else 2)
        assert row["lossless"] is True and 0 <= row["tv"] <= TOLERANCE
        assert row["expected_tau"] == pytest.approx(
            exact(golden["expected_tau"]["block"]["chain"][row["toy"]][:2]), abs=1e-9
        )


def test_table(capsys: Any, install: Callable) -> None:
    class Lossy(AcceptAll):
        name = "lossy"
        traits = VerifierTraits(drawn=frozenset({"chain"}), lossless=False)

    install(Lossy)
    code, out, _ = run(capsys, "--verifier token --verifier greedy --verifier lossy --draft chain --gamma 1")
    assert code == 0  # a verifier that says it is lossy breaks no promise
    lines = out.splitlines()
    assert " ".join(lines[0].split()) == "toy draft verifier gamma rounds TV E[tau] per round lossless"
    assert any("token" in line and line.endswith("yes") for line in lines)
    assert any("greedy (temperature 0)" in line and line.endswith("yes") for line in lines)
    assert any("lossy" in line and line.endswith("declared lossy") for line in lines)


def test_a_broken_promise_is_exit_code_1(capsys: Any, install: Callable) -> None:
    install(AcceptAll)
    code, out, _ = run(capsys, "--verifier accept-all --draft chain")
    assert code == 1
    assert out.splitlines()[2].endswith("NO")
    code, out, _ = run(capsys, "--verifier accept-all --draft chain --json")
    assert code == 1
    assert not any(row["lossless"] for row in json.loads(out))


@pytest.mark.parametrize("kind", ["raises", "nan"])
def test_a_crash_is_one_failed_row(capsys: Any, install: Callable, kind: str) -> None:
    class Crashing(AcceptAll):
        name = "crashing"

        def verify(self, draft: Draft, p: torch.Tensor, rng: Any) -> Verdict:
            if kind == "raises":
                raise RuntimeError("boom")
            return Verdict(draft.count, rng.draw(p[:, 0] * float("nan")))

    install(Crashing)
    options = "--verifier crashing --verifier token --draft chain"
    sentence = "RuntimeError: boom" if kind == "raises" else "not numbers"
    code, out, _ = run(capsys, options)
    assert code == 1
    assert "FAILED" in out and sentence in out
    assert any("token" in line and line.endswith("yes") for line in out.splitlines())  # the others still ran
    code, out, _ = run(capsys, options, "--json")
    assert code == 1
    failed = [row for row in json.loads(out) if row["verifier"] == "crashing"]
    assert len(failed) == len(TOYS)
    for row in failed:
        assert (row["tv"], row["expected_tau"], row["lossless"]) == (None, [], False)
        assert sentence in row["error"]


@pytest.mark.parametrize("form", ["", "--json"], ids=["table", "json"])
def test_pairs_that_cannot_run_are_skipped_with_a_sentence(capsys: Any, install: Callable, form: str) -> None:
    class TreesOnly(AcceptAll):
        name = "trees-only"
        traits = VerifierTraits(drawn=frozenset({"iid"}))

    install(TreesOnly)
    code, out, err = run(capsys, f"--verifier token --verifier trees-only --draft chain {form}")
    assert code == 0
    assert "trees-only" not in out
    assert err.count("makes 'chain' drafts, but verifier 'trees-only' accepts only: iid") == 1
    code, out, err = run(capsys, f"--verifier trees-only --draft chain {form}")
    assert code == 2 and not out
    assert "accepts only: iid" in err and "no pair is left" in err


def test_a_verifier_that_cannot_be_loaded_does_not_stop_the_others(capsys: Any, install: Callable) -> None:
    install(SimpleNamespace(name="not-a-class"))
    code, out, err = run(capsys, "--json --draft point-mass --gamma 1")
    assert code == 1  # it was to be certified, and was not
    assert {"token", "block"} <= {row["verifier"] for row in json.loads(out)}
    assert "not-a-class" in err
    code, _, err = run(capsys, "--verifier not-a-class")
    assert code == 1 and "unusable" in err


def test_toy_file_round_trip(capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "toys.json"
    model = {
        "V": 2,
        "gamma": 1,
        "target_start": ["1/3", "2/3"],
        "target_rows": [[0.25, 0.75], ["1", 0]],
        "draft_start": [0.5, 0.5],
        "draft_rows": [["1/2", "1/2"], ["1/5", "4/5"]],
    }
    path.write_text(json.dumps({"mine": {"model": model, "golden": "ignored"}}), encoding="utf-8")
    code, out, _ = run(capsys, "--json --verifier token --draft chain --draft chain", "--toy", str(path))
    assert code == 0
    (row,) = json.loads(out)
    assert (row["toy"], row["gamma"]) == ("mine", 1)
    assert row["expected_tau"] == pytest.approx([1 / 3 + 1 / 2], abs=1e-12)  # sum over x of min(p, q)


@pytest.mark.parametrize(
    "options, sentence",
    [
        ("--verifier blok", "did you mean 'block'?"),
        ("--draft chian", "did you mean 'chain'?"),
        ("--rounds 0", "--rounds must be at least 1"),
        ("--gamma -1", "--gamma must be at least 0"),
        ("--toy no-such-file.json", "cannot read toy file no-such-file.json"),
        ("--gamma 24", "lower the draft length with --gamma (now 24)"),
        ("--rounds 9", "lower --rounds (now 9)"),
    ],
)
def test_usage_errors(capsys: Any, options: str, sentence: str) -> None:
    code, out, err = run(capsys, options)
    assert code == 2 and not out
    assert sentence in err and err.count("\n") == 1


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("{", "is not JSON"),
        ("[]", "must hold an object"),
        ('{"a": 1}', 'a has no "model" object'),
        ('{"a": {"model": {"V": 2}}}', "lacks gamma, target_start"),
        (
            '{"a": {"model": {"V": 2, "gamma": 1, "target_start": ["1/2", "1/3"], '
            '"target_rows": [[1, 0], [1, 0]], "draft_start": [1, 0], "draft_rows": [[1, 0], [1, 0]]}}}',
            "a.model.target_start must hold V = 2 probabilities that sum to 1",
        ),
    ],
)
def test_bad_toy_files(capsys: Any, tmp_path: Path, text: str, sentence: str) -> None:
    path = tmp_path / "toys.json"
    path.write_text(text, encoding="utf-8")
    code, _, err = run(capsys, "", "--toy", str(path))
    assert code == 2 and sentence in err
