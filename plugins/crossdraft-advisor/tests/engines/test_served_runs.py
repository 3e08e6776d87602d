"""Recipes on an engine's server, and `crossdraft verify-engine`, with crossdraft's own endpoint as the engine."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_model

pytest.importorskip("crossdraft_server", reason="its endpoint is the engine")

from crossdraft_advisor.advise.candidates import of_run
from crossdraft_advisor.cost.tables import cost_tables
from crossdraft_advisor.engines.engine_cell import AFTER, BEFORE, RESPONSES, piece_of, served_flags
from crossdraft_advisor.engines.server import ServedResponse, ServedStep, _grouped
from crossdraft_advisor.samples.engine_checks import CellCheck, CounterCheck, counted, step_mates
from engine_server import Script, engine_server, steps
from server_thread import serving

from crossdraft.framework import plugins
from crossdraft.framework.cli import main as cli
from crossdraft.framework.cost.load_run import read_run
from crossdraft.framework.errors import UsageError
from crossdraft.framework.metrics.pieces import Piece
from crossdraft.framework.recipe.recipe import CellConfig
from crossdraft.framework.runs.records import CellResult

DRAFTER = "{name: prompt-lookup, gamma: 4, min_ngram: 1, max_ngram: 2}"
RECIPE = """
target: {target}
dtype: float32
prompts: {prompts}
max_new_tokens: {tokens}
batch_size: 2
sampling: {{temperature: {temperature}}}
drafters: [{drafter}]
verifiers: [token]
matrix: {{engine: [crossdraft, {{name: openai, url: "{url}", baseline_url: "{plain}", token_ids: true}}]}}
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: Any) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="module")
def other(tmp_path_factory: Any) -> str:
    return save_model(tmp_path_factory.mktemp("models") / "other", seed=7)


@pytest.fixture(autouse=True)
def own_place(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def recipe(tmp_path: Path, target: str, write_prompts: Any) -> Callable[..., str]:
    def written(url: str, plain: str, temperature: float = 0, prompts: int = 6, tokens: int = 24) -> str:
        file, questions = tmp_path / "served.yaml", write_prompts(tmp_path / "prompts.jsonl", n=prompts)
        values = {"url": url, "plain": plain, "temperature": temperature, "tokens": tokens}
        file.write_text(RECIPE.format(target=target, drafter=DRAFTER, prompts=questions, **values))
        return str(file)

    return written


@pytest.fixture(scope="module")
def servers(target: str) -> Iterator[tuple[str, str]]:
    options = ("--target", target, "--slots", "2", "--max-new-tokens", "64")
    with serving(*options, "--drafter", DRAFTER) as drafting, serving(*options, "--drafter", "none") as plain:
        yield drafting.url, plain.url


def rows(directory: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Metrics by engine and drafter."""
    cells = {}
    for file in directory.glob("*/cells/*/metrics.json"):
        config = json.loads((file.parent / "config.json").read_text())
        engine = (config.get("config", config).get("engine") or {"name": "crossdraft"})["name"]
        cells[engine, config.get("config", config)["drafter"]["name"]] = json.loads(file.read_text())["metrics"]
    return cells


def test_engine_has_own_columns_beside_cells_of_the_loop(
    tmp_path: Path, recipe: Any, servers: tuple[str, str], capsys: Any
) -> None:
    assert cli.main(["run", recipe(*servers), "--out", str(tmp_path / "runs")]) == 0
    output = capsys.readouterr().out
    assert "engine openai" in output and "first token ms" in output and "verify-engine" in output
    assert list(tmp_path.glob("runs/*/cost-openai*.csv")), "the tables that crossdraft simulate reads"
    (directory,) = (tmp_path / "runs").iterdir()
    candidates, notes = of_run(read_run(directory).summary.results, "r", [])
    assert len(candidates) == 2 and any("served by openai, uncertified" in note for note in notes)
    metrics = rows(tmp_path / "runs")
    own, served = metrics["crossdraft", "prompt-lookup"], metrics["openai", "prompt-lookup"]
    assert served["same_as_baseline"] == own["same_as_baseline"] == 1
    # The endpoint drafts before the first token, so its first step is taken for the prefill.
    assert own["tokens"] > served["tokens"] > own["tokens"] - 6 * 5
    assert served["block_efficiency"]["value"] == pytest.approx(own["block_efficiency"]["value"], rel=0.25)
    assert served["token_seconds"]["value"] > 0 and served["first_token_seconds"]["value"] > 0
    assert metrics["openai", "none"]["block_efficiency"]["value"] == 1
    # Steps without a match have no draft, also in a server that does not report it.
    assert served["target_rows_per_token"] == pytest.approx(own["target_rows_per_token"], rel=0.25)
    assert served["nodes_per_step"] == pytest.approx(own["nodes_per_step"], rel=0.25) and own["nodes_per_step"] < 3


def test_verified_engine(tmp_path: Path, recipe: Any, servers: tuple[str, str], capsys: Any) -> None:
    assert cli.main(["verify-engine", recipe(*servers), "--out", str(tmp_path / "runs"), "--json"]) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["verdict"] for cell in cells] == ["yes", "yes"]
    steps = cells[1]["steps"]
    assert steps["decided"] == steps["equal"] == steps["steps"] > 20
    assert all(cell["text"]["equal"] + cell["text"]["tied"] == 8 for cell in cells)
    (run,) = (tmp_path / "runs").iterdir()
    assert cli.main(["verify-engine", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == cells
    assert cli.main(["verify-engine", str(run), "--limit", "2"]) == 2


def test_recorded_response_that_is_impossible(tmp_path: Path, recipe: Any, servers: Any, capsys: Any) -> None:
    assert cli.main(["verify-engine", recipe(*servers, prompts=2), "--out", str(tmp_path / "runs")]) == 0
    files = tmp_path.glob("runs/*/cells/prompt-lookup*/responses.jsonl")
    (file,) = [file for file in files if "arrivals" in file.read_text()]
    original = file.read_text()
    first, *rest = map(json.loads, original.splitlines())
    for change in (
        {"tokens": [10**6, *first["tokens"][1:]]},
        {"tokens": [2, *first["tokens"][1:]]},
        {"finish_reason": "stop"},
    ):
        file.write_text("".join(json.dumps(line) + "\n" for line in [first | change, *rest]))
        assert cli.main(["verify-engine", str(file.parents[2])]) == 2
        assert "impossible" in capsys.readouterr().err


def test_first_step_that_differs_is_described(tmp_path: Path, recipe: Any, target: str, capsys: Any) -> None:
    """A server with shorter n-grams: its drafts are printed beside those of the recipe, and that the text is right."""
    options = ("--target", target, "--slots", "2", "--max-new-tokens", "64")
    other = DRAFTER.replace("max_ngram: 2", "max_ngram: 2, match: first")
    with serving(*options, "--drafter", other) as drafting, serving(*options, "--drafter", "none") as plain:
        code = cli.main(["verify-engine", recipe(drafting.url, plain.url), "--out", str(tmp_path / "runs")])
    output = capsys.readouterr().out
    assert code == 1 and "steps differ from replay" in output
    assert "the drafter proposes" in output and "the response continues" in output  # who shares the step is timing
    assert "the text is not affected" in output


def test_requests_of_a_step() -> None:
    """Steps of 10: b joins in the step before, c ends in it, d is in neither."""
    lines: list[dict[str, Any]] = [
        {"question_id": "a", "arrivals": [0, 10, 20, 30]},
        {"question_id": "b", "arrivals": [11, 21, 29]},
        {"question_id": "c", "arrivals": [1, 9]},
        {"question_id": "d", "arrivals": [100, 110]},
        {"question_id": "e"},
    ]
    firsts = [[0, 1, 4, 6], [0, 1, 2], [0, 1], [0, 1], [0]]
    assert step_mates(lines, firsts, 0, 4) == (["b (token 1)"], ["b (joins)", "c (ends)"])
    assert (
        step_mates(lines, firsts, 0, 5)
        == step_mates(lines, firsts, 0, 0)
        == step_mates(lines, firsts, 4, 0)
        == ([], [])
    )


def test_another_target_is_not_verified(tmp_path: Path, recipe: Any, other: str, capsys: Any) -> None:
    options = ("--target", other, "--slots", "2", "--max-new-tokens", "64")
    with serving(*options, "--drafter", DRAFTER) as drafting, serving(*options, "--drafter", "none") as plain:
        code = cli.main(["verify-engine", recipe(drafting.url, plain.url), "--out", str(tmp_path / "runs")])
    output = capsys.readouterr().out
    assert code == 1 and "not the target's greedy text" in output


def test_lossy_verification_is_not_verified(tmp_path: Path, recipe: Any, target: str, capsys: Any) -> None:
    """A server whose verifier changes the distribution: the draws differ, the plain server's do not."""
    options = ("--target", target, "--slots", "2", "--max-new-tokens", "64")
    lossy = "{name: top-k, k: 8}"
    with (
        serving(*options, "--drafter", DRAFTER, "--verifier", lossy) as drafting,
        serving(*options, "--drafter", "none") as plain,
    ):
        path = recipe(drafting.url, plain.url, temperature=1, prompts=8, tokens=24)
        code = cli.main(["verify-engine", path, "--out", str(tmp_path / "runs"), "--json"])
    output = json.loads(capsys.readouterr().out)
    cells = {cell["config"]["drafter"]["name"]: cell for cell in output["cells"]}
    assert not output["failed"]
    assert code == 1 and cells["none"]["verdict"] != "no"
    assert cells["prompt-lookup"]["verdict"] == "no"


SCRAPE = """# HELP vllm:spec_decode_num_accepted_tokens_total Number of accepted tokens.
# TYPE vllm:spec_decode_num_accepted_tokens_total counter
vllm:spec_decode_num_accepted_tokens_total{{engine="0",model_name="m"}} {}
"""


def test_counters_of_all_responses_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = type("Server", (), {"settings": "vllm"})
    get = plugins.get
    monkeypatch.setattr(plugins, "get", lambda kind, name: server if kind == "servers" else get(kind, name))
    config = CellConfig(target="t", engine={"name": "served"}, drafter={"name": "prompt-lookup"}, verifier="token")
    assert counted(config, tmp_path, 3) is None
    (tmp_path / BEFORE).write_text(SCRAPE.format("7.0"), encoding="utf-8")
    (tmp_path / AFTER).write_text(f"{RESPONSES}3\n" + SCRAPE.format("19.0"), encoding="utf-8")
    assert counted(config, tmp_path, 3) == 12
    assert counted(config, tmp_path, 4) is None  # the server was started again in between


@pytest.mark.parametrize(
    "accepted, deviation, agrees",
    [(10, 0.0, True), (12, 0.0, True), (9, 0.0, False), (13, 0.0, False), (7, 1.0, True), (16, 1.0, False)],
)
def test_counter_agrees_within_range(accepted: float, deviation: float, agrees: bool) -> None:
    check = CounterCheck(accepted, expected=10, unknown=2, deviation=deviation)
    assert check.agrees is agrees
    assert (CellCheck(Any, counters=check).outcome == "yes") is agrees  # type: ignore[arg-type]


def test_url_alone(tmp_path: Path, recipe: Any, servers: tuple[str, str], capsys: Any) -> None:
    """Plain decoding is left out, with the reason; a recipe of nothing else fails."""
    path = recipe(servers[0], "", prompts=2)
    engine = f"matrix.engine=[{{name: openai, url: '{servers[0]}', token_ids: true}}]"
    assert cli.main(["verify-engine", path, "--set", engine, "--out", str(tmp_path / "runs")]) == 0
    output = "".join(capsys.readouterr())
    page = (Path(__file__).parents[4] / "docs" / "remote.md").read_text(encoding="utf-8")
    shown = page.partition('title="output.txt"\n')[2].partition("```")[0].splitlines()
    skipped, header = shown[0], shown[1].split()
    assert skipped in output and header in [line.split() for line in output.splitlines()] and "failed" not in output
    code = cli.main(["run", path, "--set", engine, "--set", "drafters=[none]", "--out", str(tmp_path / "runs")])
    assert code == 1 and "baseline_url is missing" in capsys.readouterr().out


def test_address_serves_one_configuration(recipe: Any, servers: tuple[str, str], tmp_path: Path, capsys: Any) -> None:
    """Refused before anything is sent: one server as two, and a server with other settings by its own account."""
    drafting, plain = servers
    other = DRAFTER.replace("gamma: 4", "gamma: 3")
    for urls, setting, message in [
        ((drafting, drafting.replace("127.0.0.1", "localhost") + "/"), "limit=2", "a server has one target, drafter"),
        (servers, f"drafters=[{DRAFTER}, {other}]", "a server has one target, drafter"),
        (servers, "matrix.dtype=[float32, bfloat16]", "a server has one target, drafter"),
        ((drafting, "localhost:1"), "limit=2", "is not the address of a server"),
        ((plain, drafting), "limit=2", "its drafter is"),
    ]:
        path = recipe(*urls)
        assert cli.main(["run", path, "--set", setting, "--out", str(tmp_path / "runs")]) == 2
        error = capsys.readouterr().err
        assert message in error and "served.yaml:" in error and "Traceback" not in error


COUNTERS = """vllm:generation_tokens_total {tokens}
vllm:request_success_total {requests}
"""
DRAFTS = """llamacpp:spec_decode_num_drafts_total {drafts}
llamacpp:spec_decode_num_draft_tokens_total {drafts}
"""


@pytest.mark.parametrize("factor, drafts, plain", [(1, 0, 0), (2, 0, 0), (1, 1, 0), (1, 0, 1), (1, 1, 1)])
def test_counters_contain_other_requests_or_drafts(
    tmp_path: Path, recipe: Any, capsys: Any, factor: int, drafts: bool, plain: bool
) -> None:
    """A plain server that also serves others is marked; one that drafts during the baseline fails."""

    def counters(requests: int) -> str:
        text = DRAFTS if drafts else COUNTERS
        return text.format(tokens=factor * 8 * requests, requests=factor * requests, drafts=max(requests - 2, 0))

    address = "url: 'http://localhost:1', baseline_url: '{}'"
    if plain:
        address = "url: '{}', plain: {{n_max: 0}}"
    with engine_server(Script(steps(*[[5]] * 8), pages={"/metrics": counters})) as script:
        arguments = [
            "--set",
            "drafters=[none]",
            "--set",
            f"matrix.engine=[{{name: openai, {address.format(script.url)}, token_ids: true, model: m}}]",
            "--out",
            str(tmp_path / "runs"),
        ]
        code = cli.main(["run", recipe("", "", prompts=3, tokens=8), *arguments])
    output = capsys.readouterr().out
    assert code == drafts
    assert ("counted 8 requests instead of 4, 64 tokens instead of 32" in output) == (factor == 2), output
    assert ("tokens in" in output and "drafts nothing" in output.replace("which ", "")) == drafts
    assert ("does not switch speculation off" in output) == (drafts and plain)


def test_unknown_engine_and_option_are_refused(tmp_path: Path, recipe: Any, servers: Any, capsys: Any) -> None:
    path = recipe(*servers)
    assert cli.main(["run", path, "--set", "matrix.engine=[vlm]"]) == 2
    assert "vlm" in capsys.readouterr().err
    assert cli.main(["run", path, "--set", "matrix.engine=[{name: openai, colour: x}]"]) == 2
    assert "colour" in capsys.readouterr().err


def test_times_of_slots() -> None:
    """Two slots, three requests: the tail begins when the first of the last two ends."""

    def response(sent: float, *steps: tuple[float, int]) -> ServedResponse:
        served = [ServedStep(*step) for step in steps]
        return ServedResponse([0] * sum(step.tokens for step in served), served, "length", sent)

    responses = [
        response(0.0, (1.0, 1), (2.0, 3)),
        response(0.0, (1.0, 1), (3.0, 2), (5.0, 2)),
        response(2.0, (1.0, 1), (4.0, 2), (6.0, 1)),
    ]
    piece = piece_of([responses], 2)
    assert (piece.emitted, piece.tail_emitted) == (3 + 4, 3)
    assert piece.seconds["prefill"] == (1 + 1 + 1) / 2
    assert piece.seconds["rest"] == (1 + 4 + 2) / 2
    assert sum(piece.seconds.values()) == 5 and piece.tail_seconds == 3
    second = 1_000_000
    assert piece.requests == [
        [3, second, second, 2, second],
        [4, second, 4 * second, 1, 2 * second, 2, 2 * second],
        [3, second, 5 * second, 2, 3 * second, 1, 2 * second],
    ]


def test_positions_of_a_step_are_those_of_all_rows() -> None:
    """Two rows in step, the second of which begins a step later: 4, 4 + 2 and 1 + 3 positions."""
    steps = {0.0: [(1.0, 3), (2.01, 3), (3.02, 0)], 1.0: [(1.0, 1), (2.0, 2)]}
    turn = []
    for sent, later in steps.items():
        served = [ServedStep(0.02 if sent else 0.0, 1)] + [ServedStep(at, 1, nodes) for at, nodes in later]
        turn.append(ServedResponse([0] * len(served), served, "length", sent))
    requests = piece_of([turn], 2).requests
    assert [row[3::2] for row in requests] == [[4, 4 + 2, 1 + 3], [4 + 2, 1 + 3]]


def test_single_tokens_are_grouped_at_the_longest_gaps() -> None:
    arrivals = [1.0, 2.0, 2.01, 2.02, 3.0, 3.02, 4.1]
    steps = _grouped([ServedStep(seconds, 1) for seconds in arrivals], 4)
    assert [(step.seconds, step.tokens) for step in steps] == [(1.0, 1), (2.02, 3), (3.02, 2), (4.1, 1)]


def test_cost_tables_of_an_engine() -> None:
    """Medians by positions of the batch, which do not fall; draft passes from what their steps take longer."""

    def cell(drafter: str, milliseconds: dict[int, float], **options: Any) -> Any:
        config = CellConfig(
            target="t",
            engine={"name": "vllm"},
            batch_size=2,
            drafter={"name": drafter, **options},
            verifier="greedy",
        )
        flat = [x for positions, ms in milliseconds.items() for _ in range(10) for x in (positions, int(1000 * ms))]
        result = CellResult(config, pieces=[Piece(0, {}, requests=[[0, 0, 0, *flat]])])
        result.responses = [{"prompt_tokens": 90, "tokens": [0] * 20}]
        result.metrics = Any  # only its presence counts
        return result

    lookup = {1: 900, 2: 21, 3: 19, 5: 30}  # a single row, at the end of a run, is not counted
    cells = [cell("none", {2: 20}), cell("prompt-lookup", lookup), cell("small", {2: 1, 6: 46}, model="m")]
    tables = cost_tables(cells)
    target = {1: 20.5, 2: 25.25}  # 4 positions: between 20.5 (at 3) and 30 (at 5)
    assert tables["cost-vllm.csv"].splitlines() == [
        "batch_size,width,context,seconds",
        *(f"2,{width},100,{ms / 1000:.6f}" for width, ms in target.items()),
    ]
    at_6 = 30 + (30 - 20.5) / 3  # on the line from the first number of positions to the last
    assert tables["draft-cost-vllm-small.csv"].splitlines()[1:] == [f"2,1,100,{(46 - at_6) / 2 / 1000:.6f}"]
    assert tables["step-cost-vllm-small.csv"].splitlines()[1:] == ["2,1,100,0.020500", "2,3,100,0.046000"]
    assert cost_tables([CellResult(cells[0].config.model_copy(update={"engine": None}))]) == {}


def test_prefill_table_is_line_through_first_tokens() -> None:
    """2 ms a token after 10 ms, with an outlier; only of batch size 1."""

    def cell(batch_size: int, **drafter: Any) -> CellResult:
        config = CellConfig(
            target="t", engine={"name": "vllm"}, batch_size=batch_size, drafter=drafter, verifier="greedy"
        )
        result = CellResult(config)
        result.responses = [{"prompt_tokens": n, "tokens": [0] * 20} for n in range(20, 110, 10)]
        first = [10_000 + 2000 * r["prompt_tokens"] for r in result.responses]
        result.pieces = [
            Piece(0, {}, requests=[[19, us + 90_000 * (i == 4), 1, batch_size, 20_000]]) for i, us in enumerate(first)
        ]
        result.metrics = Any  # only its presence counts
        return result

    tables = cost_tables([cell(1, name="none"), cell(4, name="none"), cell(1, name="small", model="m")])
    lines = ["batch_size,width,context,seconds", "1,20,0,0.050000", "1,100,0,0.210000"]
    assert tables["prefill-cost-vllm.csv"].splitlines() == lines
    assert tables["prefill-cost-vllm-small.csv"].splitlines() == lines


def test_trees_are_refused_by_engine_for_chains(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also trees without a fixed number of children, whose ``branching`` is unknown."""
    server = type("Server", (), {"name": "chains", "settings": "vllm"})
    get = plugins.get
    monkeypatch.setattr(plugins, "get", lambda kind, name: server if kind == "servers" else get(kind, name))
    shared: dict[str, Any] = {"target": "t", "engine": {"name": "chains"}, "verifier": "token"}
    tree = CellConfig(**shared, drafter={"name": "medusa", "model": "m", "choices": [[0], [1], [0, 0]]})
    with pytest.raises(UsageError, match="medusa with token: it does not support tree drafts"):
        served_flags(tree, None)
    chain = CellConfig(**shared, drafter={"name": "draft-model", "model": "m", "gamma": 3})
    assert "--speculative-config" in served_flags(chain, None)[0]
