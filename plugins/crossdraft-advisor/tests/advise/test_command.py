"""``crossdraft advise``: output, warnings and errors."""

import json
import re
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from advise_runs import GOOD, POOR, cell, curves, write_run
from crossdraft_advisor import Acceptance, AcceptanceFormat, Engine
from crossdraft_advisor.advise.candidates import of_pair
from crossdraft_advisor.cost.tables import read_cost_table
from crossdraft_advisor.engines.acceptance import UNKNOWN_PAIR
from crossdraft_advisor.shorter_drafts import shorter_drafts
from engine_schemas import LlamaCpp, vllm
from test_imports import SGLANG_LOG, VLLM_LOG, VLLM_SCRAPE

from crossdraft import CHAIN, Draft, Drafter, DraftTraits, Sequences, StepRng, hookimpl
from crossdraft.framework import plugins
from crossdraft.framework.cli import main as cli
from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import UsageError

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 128, "vocab_size": 512}
MIXTRAL = LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}
TABLE = "batch_size,width,context,seconds\n" + "".join(
    f"{b},{w},100,{(10 + max(b * w - 8, 0)) / 1000}\n" for b in (1, 8, 64) for w in (1, 2, 3, 5, 9)
)
SAID = ("--drafter", "draft-model", "--verifier", "token", "--temperature", "1")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: Any) -> Path:
    """A directory with logs of engines and cost tables, and an empty cache of cost curves."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    files = {"vllm.log": VLLM_LOG, "scrape.txt": VLLM_SCRAPE, "sglang.log": SGLANG_LOG, "passes.csv": TABLE}
    files |= {"draft.csv": "batch_size,width,context,seconds\n1,1,100,0.001\n64,1,100,0.002\n"}
    files |= {"target.json": json.dumps(LLAMA), "experts.json": json.dumps(MIXTRAL), "nothing.txt": "hello\n"}
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def advise(capsys: Any, *arguments: Any) -> tuple[int, str, str]:
    capsys.readouterr()
    code = cli.main(["advise", *map(str, arguments)])
    return code, *capsys.readouterr()


def advice_json(capsys: Any, *arguments: Any) -> dict[str, Any]:
    code, out, err = advise(capsys, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


# -- shorter drafts --------------------------------------------------------------------------------------------

DERIVED = {"draft-model", "eagle", "eagle3", "mtp", "early-exit"}
TREES = {"token-recycling", "lookahead", "draft-model-iid", "draft-model-tree", "draft-model-dynamic-tree"}


class Newcomer(Drafter):
    """A drafter that declares nothing on its lengths."""

    name = "newcomer"

    @classmethod
    def traits(cls, config: Any, sampling: Sampling) -> DraftTraits:
        return DraftTraits(kind=CHAIN, point_mass=False, nodes=3)

    def propose(self, sequences: Sequences, rng: StepRng) -> Draft:
        return Draft.empty(sequences.batch_size, sequences.device)


class Provider:
    @staticmethod
    @hookimpl
    def crossdraft_register_drafters(register: Any) -> None:
        register("newcomer", Newcomer, summary="declares nothing")


def test_shorter_drafts_of_every_drafter() -> None:
    """Derived only for autoregressive drafts of a fixed length; trees are errors; others keep the measured length."""

    def refusal(drafter: str, verifier: str = "token", **other: Any) -> str:
        acceptance = Acceptance((0.7, 0.5, 0.4), "here", drafts=100, drafter=drafter, verifier=verifier, **other)
        return of_pair(acceptance).refusal

    plugins.manager().register(Provider)
    try:
        for drafter in plugins.entries("drafters"):
            if drafter in TREES:
                with pytest.raises(UsageError, match=f"drafter '{drafter}' makes"):
                    refusal(drafter)
                with pytest.raises(UsageError, match="does not draft chains"):
                    refusal(drafter, "")
            elif drafter != "none":
                reason = refusal(drafter)
                assert (not reason) == (drafter in DERIVED), (drafter, reason)
                assert not reason or "measure each length" in reason or "--replay" in reason or "unknown" in reason
    finally:
        plugins.manager().unregister(Provider)
    assert "measure each length" in refusal("draft-model", "greedy-block")
    assert "measure each length" in refusal("draft-model", options={"policy": {"name": "heuristic"}})
    assert "--verifier" in refusal("draft-model", "")
    assert refusal("") == UNKNOWN_PAIR
    assert refusal("prompt-lookup", idle=0.5) == "" != refusal("prompt-lookup")
    with pytest.raises(UsageError, match="needs temperature 0"):
        refusal("draft-model", "greedy", temperature=1.0)
    assert refusal("draft-model", "greedy") == ""


def test_only_the_measured_length_is_advised(place: Path, capsys: Any) -> None:
    words = ("vllm.log", "--cost", "passes.csv", "--temperature", "1", "--verifier", "token", "--batch-size", "1")
    code, out, _ = advise(capsys, *words, "--drafter", "dflash")
    assert code == 0 and "drafts of fewer than 3 tokens are left out" in out and "measure each length" in out
    assert "dflash     token       3 " in out and "runner-up" in out and ", 2:" not in out
    code, out, _ = advise(capsys, *words, "--drafter", "mtp")
    assert (
        code == 0
        and "mtp × token, " in out
        and "derived from drafts of 3 tokens" in out
        and "assumed: shorter drafts" in out
    )
    code, _, err = advise(capsys, *words, "--drafter", "draft-model-tree")
    assert code == 2 and "verifier 'token' accepts only: chain" in err


# -- a finished run --------------------------------------------------------------------------------------------


def test_run_on_its_own_machine(place: Path, capsys: Any) -> None:
    results = [cell(None, b) for b in (1, 4)] + [
        cell(taus, b, model=m) for b in (1, 4) for taus, m in ((GOOD, "d"), (POOR, "e"))
    ]
    run = write_run(place, results)
    result = advice_json(capsys, run, "--batch-size", "1,64")
    one, many = result["advice"]
    assert one["draft"] and one["best"]["model"] == "d" and one["best"]["gamma"] == 3
    assert one["runner_up"]["model"] == "e" and one["best"]["speed_up"]["low"] < one["best"]["speed_up"]["value"]
    assert many["best"]["speed_up"]["value"] < one["best"]["speed_up"]["value"] and many["batch_size"] == 64
    # Measured part of these cells: a tenth of their tokens.
    assert one["measured_best"]["model"] == "d" and many["measured_best"] is None
    assert one["measured_best"]["speed_up"]["value"] == pytest.approx(4.2)
    remarks = result["remarks"]
    assert any("3 independent prompts" in line for line in remarks["measured"])
    assert any("cost curves of its machine" in line for line in remarks["computed"])
    assert any("drafts of more than 3 tokens were not measured" in line for line in remarks["warnings"])
    assert any("12 drafts are few" in line for line in remarks["warnings"])
    _, text, _ = advise(capsys, run, "--batch-size", "1,64")
    assert [line.split()[:2] for line in text.splitlines() if line[:2] in ("1 ", "64")] == [
        ["1", "draft"],
        ["64", "draft"],
    ]


def test_run_on_another_machine(place: Path, capsys: Any) -> None:
    run = write_run(place, [cell(None), cell(GOOD)])
    result = advice_json(
        capsys, run, "--cost", "passes.csv", "--draft-cost", "draft.csv", "--batch-size", "1", "--context", "100"
    )
    (step,) = result["advice"]
    assert step["measured_best"] is None  # on another machine
    # 10 ms and three of 1 ms for the row's tokens; plain decoding takes 10 ms.
    assert step["best"]["gamma"] == 3 and step["best"]["speed_up"]["value"] == pytest.approx(3.5 / 1.3)
    assert any("as its measured passes" in line for line in result["remarks"]["assumed"])
    result = advice_json(capsys, run, "--on", "h100", "--target", "target.json", "--batch-size", "1")
    assert any("as in published series" in line for line in result["remarks"]["assumed"])


def test_temperatures_are_kept_apart(place: Path, capsys: Any) -> None:
    cells = [cell(taus, temperature=t) for t in (0.0, 1.0) for taus in (None, GOOD)]
    run = write_run(place, cells)
    result = advice_json(capsys, run, "--batch-size", "1")
    assert {step["group"] for step in result["advice"]} == {"temperature 0", "temperature 1"}
    code, _, err = advise(capsys, run, "--batch-size", "1", "--export", "vllm")
    assert code == 2 and "choose with --temperature" in err
    code, out, _ = advise(capsys, run, "--batch-size", "1", "--export", "vllm", "--temperature", "0")
    assert code == 0 and vllm(out).draft_sample_method == "greedy"
    code, _, err = advise(capsys, run, "--temperature", "0.5")
    assert code == 2 and "the sources have no drafter at temperature 0.5" in err


@pytest.mark.parametrize(
    ("changes", "groups"),
    [
        ({"target": "n"}, {"temperature 1, target m", "temperature 1, target n"}),
        ({"sampling": Sampling(top_p=0.5)}, {"temperature 1, top p 1", "temperature 1, top p 0.5"}),
        ({"seed": 7, "max_new_tokens": 9}, {"temperature 1"}),
    ],
)
def test_runs_of_other_targets_are_kept_apart(
    place: Path, capsys: Any, changes: dict[str, Any], groups: set[str]
) -> None:
    others = [cell(None), cell(POOR, model="e")]
    for result in others:
        result.config = result.config.model_copy(update=changes)
    runs = [write_run(place, [cell(None), cell(GOOD)]), write_run(place, others, "other")]
    costs = ["--cost", "passes.csv", "--draft-cost", "draft.csv", "--batch-size", "1"]
    assert {step["group"] for step in advice_json(capsys, *runs, *costs)["advice"]} == groups


def test_unsupported_pairs_and_their_cost(place: Path, capsys: Any) -> None:
    """llama.cpp supports n-grams, but not block verification of sampled drafts."""
    cells = [cell(None), cell(GOOD, verifier="block"), cell(POOR, drafter="prompt-lookup")]
    run = write_run(place, cells)
    code, out, err = advise(capsys, run, "--batch-size", "1", "--export", "llama.cpp")
    assert code == 0 and LlamaCpp(out).given.spec_type in ("ngram-simple", "none")
    assert "draft-model × block at gamma 3: it has no block verification" in err
    code, _, err = advise(capsys, write_run(place, cells[:2], "other"), "--export", "llama.cpp")
    assert code == 2 and "llama.cpp supports none of the candidates" in err
    code, out, _ = advise(capsys, run, "--batch-size", "1", "--export", "vllm", "--draft-path", "org/draft")
    result = vllm(out)
    assert (result.rejection_sample_method, result.model, result.num_speculative_tokens) == ("block", "org/draft", 3)


def test_truncated_responses(place: Path, capsys: Any) -> None:
    run = write_run(place, [cell(None, finish_reason="length"), cell(GOOD, finish_reason="length")])
    assert any("all responses are truncated" in w for w in advice_json(capsys, run)["remarks"]["warnings"])
    code, _, err = advise(capsys, write_run(place, [cell(None)], "plain"))
    assert code == 2 and "no candidates" in err


# -- imported numbers ------------------------------------------------------------------------------------------


def test_log_and_table(place: Path, capsys: Any) -> None:
    costs = ("--cost", "passes.csv", "--draft-cost", "draft.csv", "--batch-size", "1,2,64", "--context", "100")
    result = advice_json(capsys, "vllm.log", *costs, *SAID)
    rates = (220 / 310, 110 / 310, 50 / 310)
    by_hand = [(1 + shorter_drafts(np.array(rates), g).sum()) * 10 / (10 + g) for g in (1, 2, 3)]
    assert result["advice"][0]["best"]["speed_up"]["value"] == pytest.approx(max(by_hand), rel=1e-4)
    assert [step["draft"] for step in result["advice"]] == [True, True, False]
    code, out, err = advise(capsys, "vllm.log", *costs, *SAID, "--export", "vllm", "--draft-path", "org/draft")
    schedule = vllm(out).num_speculative_tokens_per_batch_size
    assert code == 0 and schedule is not None and schedule[-1][1:] == [64, 0]
    assert "settings: option names of vLLM main" in err and "does not record whether drafts were sampled" in err


def test_overlapped_drafting(place: Path, capsys: Any) -> None:
    costs = ("--cost", "passes.csv", "--draft-cost", "draft.csv", "--batch-size", "1", "--context", "100")
    result = advice_json(capsys, "vllm.log", *costs, *SAID, "--overlap")
    # Three drafts of a millisecond are hidden behind a pass of ten.
    speed_up = result["advice"][0]["best"]["speed_up"]["value"]
    assert speed_up == pytest.approx(1 + (220 + 110 + 50) / 310, rel=1e-4)
    assert any("overlap" in line for line in result["remarks"]["assumed"])


def test_draft_head_with_fewer_tokens(place: Path, capsys: Any) -> None:
    machine = ("--on", "h100", "--target", "target.json", "--draft-model", "target.json", "--batch-size", "1", *SAID)
    few, own = (advice_json(capsys, "vllm.log", *machine, *more)["advice"][0] for more in (("--draft-vocab", "16"), ()))
    assert few["best"]["speed_up"]["value"] > own["best"]["speed_up"]["value"]


def test_two_scrapes_and_several_sources(place: Path, capsys: Any) -> None:
    costs = ("--cost", "passes.csv", "--batch-size", "1")
    zero = VLLM_SCRAPE.replace("100.0", "0.0").replace("300.0", "0.0")
    for count in ("200.0", "600.0", "120.0", "280.0", "80.0", "40.0"):
        zero = zero.replace(f" {count}", " 0.0")
    Path("before.txt").write_text(zero, encoding="utf-8")
    since = advice_json(capsys, "scrape.txt", "--since", "before.txt", *costs)["advice"]
    assert since == advice_json(capsys, "scrape.txt", *costs)["advice"]
    assert since == advice_json(capsys, "{source: scrape.txt, since: before.txt}", *costs)["advice"]
    both = advice_json(capsys, "scrape.txt", "vllm.log", *costs)["advice"][0]
    assert {both["best"]["source"], both["runner_up"]["source"]} == {"scrape.txt, model m", "vllm.log:2-4"} or both
    code, _, err = advise(capsys, "scrape.txt", "vllm.log", "--since", "before.txt", *costs)
    assert code == 2 and "requires exactly one SOURCE" in err
    code, _, err = advise(capsys, "before.txt", "--since", "scrape.txt", *costs)
    assert code == 2 and "the counter was reset" in err


def test_contexts_are_axis(place: Path, capsys: Any) -> None:
    more = TABLE + "".join(line.replace(",100,", ",900,") + "\n" for line in TABLE.splitlines()[1:])
    Path("two.csv").write_text(more, encoding="utf-8")
    result = advice_json(capsys, "vllm.log", "--cost", "two.csv", "--batch-size", "1,8", "--context", "100,900")
    assert [(s["context"], s["batch_size"]) for s in result["advice"]] == [(100, 1), (100, 8), (900, 1), (900, 8)]
    _, text, _ = advise(capsys, "vllm.log", "--cost", "two.csv", "--batch-size", "1", "--context", "100,900")
    first, _, _, _, header = text.splitlines()[:5]
    assert first.startswith("warning: vllm.log:2-4 does not count steps") and header.split()[:2] == ["B", "context"]


def test_mean_length_requires_assumption(place: Path, capsys: Any) -> None:
    """Accept length and rate are those of three tokens; without the rate, each source needs its length."""
    cost = ["--cost", "passes.csv", "--batch-size", "1"]
    result = advice_json(capsys, "sglang.log", *cost)
    assert any("a constant conditional acceptance rate" in line for line in result["remarks"]["assumed"])
    assert [item["best"]["gamma"] for item in result["advice"]] == [3]
    code, _, err = advise(capsys, "sglang.log", *cost, "--gamma", "4")
    assert code == 2 and "has drafts of 3 tokens, not 4; remove the given draft length" in err
    damaged = "skipped: a line that is cut\n" + VLLM_LOG.splitlines()[1][:120] + "\n"
    Path("cut.log").write_text(damaged + VLLM_LOG, encoding="utf-8")
    code, _, err = advise(capsys, "cut.log", *cost, "--gamma", "2")
    assert code == 2 and "has drafts of 3 tokens, not 2; remove" in err and "truncated" not in err
    Path("old.log").write_text(re.sub(r"accept rate: \S+ ", "", SGLANG_LOG), encoding="utf-8")
    code, _, err = advise(capsys, "old.log", *cost)
    assert code == 2 and "give it as --gamma, or as '{source: FILE, gamma: N}'" in err
    result = advice_json(capsys, "{source: old.log, gamma: 4}", "{source: old.log, gamma: 5, temperature: 1}", *cost)
    assert {(item["group"], item["best"]["gamma"]) for item in result["advice"]} == {
        ("temperature unknown", 4),
        ("temperature 1", 5),
    }


def test_unrealistic_traffic(place: Path, capsys: Any) -> None:
    head = "Namespace(backend='vllm', dataset_name='random', ignore_eos=True)\n"
    Path("bench.log").write_text(head + VLLM_LOG, encoding="utf-8")
    warnings = advice_json(capsys, "bench.log", "--on", "h100", "--target", "experts.json")["remarks"]["warnings"]
    assert any("random prompts" in line for line in warnings) and any(
        "ignores end-of-sequence" in line for line in warnings
    )
    assert any("does not record the temperature" in line for line in warnings)
    result = advice_json(capsys, "vllm.log", "--on", "h100", "--target", "experts.json", "--drafter", "prompt-lookup")
    assert any("name it as --verifier" in line for line in result["remarks"]["warnings"])
    result = advice_json(capsys, "vllm.log", "--on", "h100", "--target", "experts.json", *SAID)["remarks"]
    assert not any("random" in line or "temperature" in line for line in result["warnings"])
    assert any("over its 4 experts" in line for line in result["assumed"])
    assert any("as in published series, and at least" in line for line in result["assumed"])


def test_curve_that_was_measured_here(place: Path, capsys: Any) -> None:
    from crossdraft.framework.cost.curve import save_curve

    code, _, err = advise(capsys, "vllm.log", "--target", "m")
    assert code == 2 and "m has no cost curve on this machine; run crossdraft cost --target m" in err
    for item in curves():
        save_curve(item)
    result = advice_json(capsys, "vllm.log", "--target", "m", "--draft-model", "d", "--batch-size", "1,128", *SAID)
    assert result["advice"][0]["draft"] and any(
        "passes of m, float32" in line for line in result["remarks"]["measured"]
    )
    assert any("extrapolated beyond B = 64" in line for line in result["remarks"]["warnings"])


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["missing.log"], "missing.log does not exist"),
        (["nothing.txt"], "no acceptance in a known format"),
        (["vllm.log", "--on", "h100"], "--on requires --target"),
        (
            ["vllm.log", "--on", "h100", "--target", "target.json", "--cost", "passes.csv"],
            "--on and --cost cannot be combined",
        ),
        (["vllm.log", "--target", "x", "--cost", "passes.csv"], "--target and --cost cannot be combined"),
        (["vllm.log", "--draft-cost", "draft.csv"], "--draft-cost requires --cost"),
        (["vllm.log", "--draft-model", "d"], "--draft-model requires --target"),
        (["vllm.log", "--draft-model", "d", "--draft-cost", "x"], "--draft-model and --draft-cost cannot be combined"),
        (["vllm.log", "--drafter", "draft-modl"], "did you mean 'draft-model'"),
        (["vllm.log", "--export", "vlm"], "did you mean 'vllm'"),
        (["vllm.log", "--cost", "passes.csv", "--gamma", "4"], "has drafts of 3 tokens, not 4; remove"),
        (["vllm.log", "--cost", "passes.csv", "--context", "1,2", "--export", "vllm"], "takes one --context"),
        (["vllm.log", "--cost", "passes.csv", "--export", "vllm"], "the drafter of"),
        (["vllm.log", "--cost", "passes.csv", "--export", "transformers", "--batch-size", "4"], "--batch-size 1"),
        ([".", "--cost", "passes.csv"], "has no recipe.json"),
        ([".", "--drafter", "draft-model"], "a finished run has its own"),
        (["vllm.log", "--cost", "passes.csv", "--devices", "2"], "--devices requires --on"),
        (["vllm.log", "--cost", "passes.csv", "--draft-vocab", "9"], "--draft-vocab requires --on"),
        (["vllm.log", "--cost", "passes.csv", "--draft-path", "x"], "--draft-path requires --export"),
    ],
)
def test_invalid_arguments(place: Path, capsys: Any, arguments: list[str], message: str) -> None:
    code, out, err = advise(capsys, *arguments)
    assert (code, out) == (2, "") and message in err and err.count("\n") == 1


def test_engines_of_plug_ins_keep_their_contract(place: Path, capsys: Any, install: Any) -> None:
    class Theirs(Engine):
        name = "theirs"
        read_from = "1.0"
        methods: ClassVar[dict[str, str]] = {"draft-model": "s"}

        def export(self, schedule: Any) -> Any:
            return "--flags"

    class Lists(AcceptanceFormat):
        name = "lists"

        def read(self, source: Any, earlier: Any = None) -> Any:
            return [0.5]

    install("engines", ("theirs", Theirs))
    costs = ("--cost", "passes.csv", "--batch-size", "1", *SAID)
    code, _, err = advise(capsys, "vllm.log", *costs, "--export", "theirs")
    assert code == 1 and "the engine 'theirs'" in err and "must return crossdraft_advisor.Settings" in err
    install("formats", ("lists", Lists))
    code, out, _ = advise(capsys, "vllm.log", *costs)  # the other formats are read
    assert code == 0 and "must return a list of crossdraft_advisor.Acceptance" in out


@pytest.mark.parametrize(
    "text, message",
    [
        ("", "t.csv:1: a cost table must begin with"),
        ("batch_size,width,seconds\n1,1,1\n", "t.csv:1: a cost table must begin with"),
        ("batch_size,width,context,seconds\n", "no lines after the header"),
        ("batch_size,width,context,seconds\n1,1,1\n", "t.csv:2: the line has 3 values"),
        ("batch_size,width,context,seconds\n1,1,1,0.1\n1,1,1,0.2\n", "t.csv:3: this combination is a duplicate"),
        ("batch_size,width,context,seconds\n1,1,1,0.1\n1,1.5,1,0.2\n", "t.csv:3: .*not three integers"),
        ("batch_size,width,context,seconds\n1,1,1,nan\n", "t.csv:2: nan seconds is not a positive time"),
        ("batch_size,width,context,seconds\n0,1,1,1\n", "t.csv:2: batch size 0, width"),
        (f"batch_size,width,context,seconds\n1,1,1,{'1' * 200_000}\n", "t.csv:2: not valid CSV"),
        ("batch_size,width,context,seconds\n1,1,1,1\n2,2,1,1\n", "a point for each combination"),
        ("batch_size,width,context,seconds\n1,1,1,0.443\n1,3,1,0.191\n", "2.3 times as long as one over more"),
    ],
)
def test_invalid_cost_tables(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_cost_table(str(path))


def test_kept_curve_is_cost_table(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps(curves()[0].to_json()), encoding="utf-8")
    assert read_cost_table(str(path)) == curves()[0]
    path.write_text('{"points": [[1, 1, 1, 0, 0, 0]]}', encoding="utf-8")
    with pytest.raises(UsageError, match="is not a cost curve"):
        read_cost_table(str(path))
