"""Every code block of the README and of the pages in docs/ runs, and every output block is the output of its command.

Tiny models replace the models that the pages name, and commands that take minutes run on less.

An output block (any fence that is not code or a file) follows the command that prints it and is compared with what the
command prints, whitespace at line ends, durations and floating-point residues aside. After ``<!-- excerpt -->`` it is a
part of that. Tables of runs are printed from the finished runs in tests/fixtures. After ``<!-- slow -->``, a slow test
runs the command with the real models. A diagram is preceded by ``<!-- diagram -->``.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tarfile
import tomllib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from crossdraft_trainers.medusa_files import save_heads
from text_models import THINKING, save_text_model
from tiny_models import save_adapter, save_model

from crossdraft import hookimpl, load_model
from crossdraft.drafters.heads.eagle3 import Eagle3Head
from crossdraft.drafters.heads.eagle_weights import make_config
from crossdraft.drafters.heads.medusa.weights import MedusaHeads
from crossdraft.framework.bench.matrix import load_recipe
from crossdraft.framework.cli.main import main
from crossdraft.framework.cost.load_run import read_run
from crossdraft.framework.plugins import COMPANIONS, manager
from crossdraft.framework.report import write
from crossdraft.framework.report.tables import terminal
from crossdraft.framework.util.extras import importable

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
#: A block: the comment before it, language, info string, text.
_BLOCK = re.compile(r"(?:^<!-- ([^\n]*) -->\n)?^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
#: Languages of code and files; ``sh`` is code that needs the network, an extra or another machine.
CODE = ("bash", "python", "sh", "toml", "yaml")
#: The page whose files README uses, too.
GUIDE = ROOT / "docs/from-responses-to-flags.md"
#: Finished runs of quickstart and multi-draft, in the folders runs and again.
RUNS = (ROOT / "tests/fixtures/runs.tar.xz", ROOT / "tests/fixtures/multi-draft.tar.xz")
#: Pages whose commands are of the core and whose files or machines only a companion reads.
READ_BY_COMPANIONS = ("cost.md",)
#: The port that the pages name; tests take a free one.
PORT = "8000"
#: The model of a page about thinking.
THINKS = "Qwen/Qwen3-0.6B"
#: The plug-in that provides the real models.
PACK = "crossdraft-smollm2:smollm2"
#: Commands that install, test the repository, measure for minutes or are other people's; .ci/run, the benchmarks and
#: plugins/*/tests run them.
NOT_HERE = ("pip install", "python -m venv", "pyright", "ruff", "guidellm", "lm-eval")
#: Commands that start processes or need an extra: a slow test below runs them.
ELSEWHERE = ("--launcher", "--track")


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    title: str
    text: str
    comment: str = ""

    @property
    def is_output(self) -> bool:
        return self.language not in CODE and not self.title and self.comment != "diagram"

    @property
    def slow(self) -> bool:
        return self.comment == "slow"


def blocks(page: Path) -> list[Block]:
    return parse(page.read_text(encoding="utf-8"))


def parse(text: str) -> list[Block]:
    results = []
    for comment, language, info, body in _BLOCK.findall(text):
        title = re.search(r'title="([^"]+)"', info)
        results.append(Block(language, title[1] if title else "", body, comment))
    return results


def unexplained_outputs(text: str) -> list[str]:
    """Output blocks that do not follow a command which the tests run."""
    wrong, previous = [], None
    for block in parse(text):
        if block.is_output and not (previous and printing_command(previous)):
            wrong.append(block.text)
        previous = block
    return wrong + re.findall(r"^ {4}\$ .*", text, re.MULTILINE)  # an indented transcript has no place for a marker


def printing_command(block: Block) -> str:
    """The last command of a block if the tests run it."""
    if block.language != "bash" or not commands(block):
        return ""
    command = commands(block)[-1].rpartition(" && ")[2]
    return command if command.startswith("crossdraft ") and runs_here(command) else ""


def commands(block: Block) -> list[str]:
    lines = [line.partition("  #")[0].strip() for line in block.text.replace("\\\n", " ").splitlines()]
    return [line for line in lines if line]


def runs_here(command: str) -> bool:
    if "+my-adapter" in command and not importable("peft"):
        return False
    return not command.startswith(NOT_HERE) and not any(option in command for option in ELSEWHERE)


def normalized(output: str) -> str:
    """Without whitespace at line ends, durations, and the digits of floating-point residues."""
    lines = [line.rstrip() for line in output.strip().splitlines()]
    output = re.sub(r"\b\d+(\.\d+)? (seconds|minutes|s|ms|min)\b", "N s", "\n".join(lines))
    return re.sub(r"\b\d(\.\d+)?e-1\d\b", "1e-16", output)


@pytest.fixture(scope="module")
def models(tmp_path_factory: Any) -> Iterator[dict[str, Path]]:
    """Tiny models under the names that the pages use, and where they are."""
    root = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    target = save_model(root / "target", context=2048, layers=6)
    loaded = load_model(target, dtype="float32", device="cpu").model
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = make_config(**shape, num_hidden_layers=1, max_position_embeddings=2048, vocab_size=72)
    head = Eagle3Head(config, loaded.get_input_embeddings().weight, 3 * 16)
    head.save(root / "eagle3")
    save_heads(root / "medusa", MedusaHeads(16, 5, lm_head=loaded.get_output_embeddings()), {})
    names = {
        "smollm2-135m-instruct": Path(target),
        "smollm2-draft-model": Path(save_model(root / "small", seed=1, context=2048)),
        "smollm2-eagle3": root / "eagle3",
        "smollm2-medusa": root / "medusa",
    }

    real = manager().unregister(name=PACK) if manager().has_plugin(PACK) else None
    with registered(names):
        yield names
    if real is not None:
        manager().register(real, PACK)


@contextmanager
def registered(names: dict[str, Path]) -> Iterator[None]:
    """Models under the names that the pages use."""

    def models_of_the_docs(register: Any) -> None:
        for name, path in names.items():
            register(name, path)

    plugin, name = SimpleNamespace(crossdraft_register_models=hookimpl(models_of_the_docs)), "models of the docs"
    manager().register(plugin, f"more {name}" if manager().has_plugin(name) else name)
    yield
    manager().unregister(plugin)


@pytest.fixture
def text_models(page: Path, tmp_path_factory: Any, models: dict[str, Path]) -> Iterator[None]:
    """On the pages about constraints and replay, models whose tokenizer can spell any text instead of words only."""
    if page.name == "replay.md":
        with registered({THINKS: Path(save_text_model(tmp_path_factory.mktemp("thinks"), chat=THINKING))}):
            yield
        return
    if page.name != "constrained.md":
        yield
        return
    pytest.importorskip("llguidance", reason="constraints need the extra constrain")
    root, plugin = tmp_path_factory.mktemp("text-models"), manager().unregister(name="models of the docs")
    names = [name for name in models if "eagle3" not in name and "medusa" not in name]
    with registered({name: Path(save_text_model(root / name, seed)) for seed, name in enumerate(names)}):
        yield
    manager().register(plugin, "models of the docs")


@pytest.fixture
def stored_runs(page: Path, place: Path) -> None:
    """The finished runs, on the pages that print from them."""
    pages = {"report.md": RUNS[:1], "batch-size.md": RUNS[1:]}
    for archive in pages.get(page.name, ()):
        with tarfile.open(archive) as runs:
            runs.extractall(place, filter="data")


@pytest.fixture
def engines(page: Path) -> Iterator[None]:
    """On the page about engines, vLLM as one."""
    plugin = import_module("crossdraft_vllm") if page.name == "engines.md" else None
    if plugin is not None:
        manager().register(plugin, "engine of the docs")
    yield
    if plugin is not None:
        manager().unregister(plugin)


@pytest.fixture
def place(tmp_path: Path, monkeypatch: Any, models: Any) -> Path:
    """A folder to work in, with the files that the pages take for granted."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.setattr(write, "notify", lambda *_, **__: None)  # charts take seconds
    (tmp_path / "my-prompts.jsonl").write_text(
        '{"prompt": "w5 w6 w7 w5 w6"}\n{"prompt": "w9 w8 w9"}\n', encoding="utf-8"
    )
    save_adapter(tmp_path / "my-adapter", hidden=16)
    return tmp_path


def with_blocks() -> Iterator[Any]:
    """The pages with blocks; those that use commands of companions, which may not be installed, are marked."""
    for page in PAGES:
        examples = blocks(page)
        words = {command.split()[1] for block in examples for command in commands(block) if " " in command}
        if examples:
            formats = {word for block in examples for line in commands(block) for word in line.split()}
            needed = page.name in READ_BY_COMPANIONS or any(("commands", word) in COMPANIONS for word in words)
            needed |= any(("reports", word) in COMPANIONS for word in formats)
            marks = [pytest.mark.companions] if needed else []
            yield pytest.param(page, marks=marks, id=page.name)


@pytest.mark.parametrize("page", list(with_blocks()))
def test_every_block_runs(
    page: Path, place: Path, text_models: None, stored_runs: None, engines: None, capsys: Any
) -> None:
    names: dict[str, Any] = {}
    files: dict[str, list[str]] = {}
    for block in (*blocks(page), *(blocks(GUIDE) if page.name == "README.md" else ())):
        if block.title:
            files.setdefault(block.title, []).append(block.text)
    for title, parts in files.items():
        (place / title).write_text("\n\n".join(parts), encoding="utf-8")
    plugin = None
    if "pyproject.toml" in files:  # what pip would read
        project = tomllib.loads((place / "pyproject.toml").read_text(encoding="utf-8"))
        (module,) = project["project"]["entry-points"]["crossdraft"].values()
        plugin = import_module(module)
        manager().register(plugin, "a package of the docs")
    try:
        with ExitStack() as servers:
            examples = blocks(page)
            for block, following in zip(examples, [*examples[1:], None], strict=True):
                output = following if following and following.is_output and not following.slow else None
                run_block(block, place, names, servers, output, capsys)
    finally:
        if plugin is not None:
            manager().unregister(plugin)
            sys.modules.pop(plugin.__name__)


def run_block(
    block: Block, place: Path, names: dict[str, Any], servers: ExitStack, output: Block | None, capsys: Any
) -> None:
    if block.language == "python" and not block.title:
        exec(compile(block.text.replace(PORT, names.get(PORT, PORT)), "a block of the docs", "exec"), names)
    elif block.language == "yaml" and re.search("^target:", block.text, re.MULTILINE):
        file = place / (block.title or "recipe.yaml")
        file.write_text(block.text, encoding="utf-8")
        load_recipe(str(file))
    elif block.language == "bash":
        for command in commands(block):
            if output is not None and command.endswith(printing_command(block)):
                check_output(printing_command(block), output, capsys)
            elif command.startswith("crossdraft serve"):
                serving = pytest.importorskip("server_thread", reason="the endpoint is a companion").serving
                names[PORT] = str(servers.enter_context(serving(*shlex.split(command)[2:])).port)
            elif runs_here(command):
                run_command(shlex.split(command))


@pytest.mark.slow
@pytest.mark.network
@pytest.mark.parametrize("page", [page for page in PAGES if any(block.slow for block in blocks(page))], ids=str)
def test_real_models_print_the_output(page: Path, tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    """As `test_every_block_runs`, with the models of the pack."""
    monkeypatch.chdir(tmp_path)
    examples, names = blocks(page), {}
    for block, following in zip(examples, [*examples[1:], None], strict=True):
        if block.title:
            (tmp_path / block.title).write_text(block.text, encoding="utf-8")
        elif block.language == "python":
            exec(compile(block.text, "a block of the docs", "exec"), names)
        elif following and following.slow:
            check_output(printing_command(block), following, capsys)


def check_output(command: str, output: Block, capsys: Any) -> None:
    words = shlex.split(command)[1:]
    if words[0] == "run":
        (run,) = Path("runs").glob(f"{words[1]}-*")
        printed = terminal(read_run(run).summary)
    else:
        capsys.readouterr()
        assert main(words) in (0, 1), command  # 1: the answer is no
        printed = capsys.readouterr().out
    if output.comment == "excerpt":
        assert normalized(output.text) in normalized(printed), command
    else:
        assert normalized(printed) == normalized(output.text), command


def run_command(words: list[str]) -> None:
    if words[0] == "pytest" and words[1:]:
        # A few of the kit's tests; tests/third_party runs all of them on like strategies.
        few = ["-k", "traits or (keep and not law)"]
        # In this process: another one would take ten seconds to load PyTorch and transformers.
        assert pytest.main(["-q", "-p", "no:cacheprovider", "-p", "no:xdist", *few, *words[1:]]) == 0
    elif words[0] == "crossdraft":
        if named := next((word for word in words if "<hash>" in word), None):  # a run that the reader has made
            recipe = Path(named).name.removesuffix("-<hash>")
            if not list(Path("runs").glob(f"{recipe}-*")):
                assert main(shortened(["run", recipe])) == 0
            (run,) = Path("runs").glob(f"{recipe}-*")
            words = [str(run) if word == named else word for word in words]
        assert main(shortened(words[1:])) in (0, words[1] == "compare-texts"), shlex.join(words)  # 1: texts differ


def shortened(arguments: list[str]) -> list[str]:
    """The same command, on less: a page shows what takes minutes."""
    if arguments[:1] == ["run"]:
        smaller = ("matrix.batch_size=[1, 2]", "matrix.gamma=[4]", "verifiers=[token, spectr]")
        few = [word for item in smaller for word in ("--set", item)] if "smollm2-batch" in arguments else []
        return [*arguments, "--limit", "1", "--set", "max_new_tokens=4", *few, "--quiet"]
    if arguments[:1] == ["diagnose"]:
        return [*arguments, "--responses", "1", "--max-new-tokens", "8"]
    if arguments[:1] == ["train"]:
        few = ["--tokens", "40", "--write-batch", "8", "--max-response", "6", "--questions", "my-prompts.jsonl"]
        return [*arguments, *few, "--epochs", "1", "--measure", "none"]
    if arguments[:1] == ["certify"]:
        rule = [] if "--verifier" in arguments else ["--verifier", "token"]
        draft = ["--steps", "1"] if "--drafter" in arguments else ["--draft", "chain"]
        return [*arguments, *rule, *draft, "--gamma", "2"]
    if arguments[:1] == ["cost"] and "--on" not in arguments and "--run" not in arguments:
        return [*arguments, "--batch-size", "1,2", "--width", "1,2", "--context", "16", "--repeats", "1", "--quiet"]
    return arguments


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_output_is_compared(page: Path) -> None:
    assert not unexplained_outputs(page.read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "text, outputs",
    [
        ("```text\n1 s\n```\n", 1),
        ("```\n1 s\n```\n", 1),
        ("```console\n$ crossdraft list\n```\n", 1),
        ("    $ crossdraft list\n", 1),
        ("```bash\nguidellm run\n```\n\n```text\n1 s\n```\n", 1),
        ("```bash\ncrossdraft list\n```\n\n```text\na\n```\n\n```text\nb\n```\n", 1),
        ("<!-- slow -->\n```text\n1 s\n```\n", 1),
        ("```bash\ncrossdraft list\n```\n\n<!-- slow -->\n```text\n1 s\n```\n", 0),
        ("```bash\ncrossdraft list\n```\n\nprints\n\n```text\n1 s\n```\n", 0),
        ('```text title="a.log"\n1 s\n```\n', 0),
        ("<!-- diagram -->\n```text\na -> b\n```\n", 0),
    ],
)
def test_output_without_origin_is_found(text: str, outputs: int) -> None:
    assert len(unexplained_outputs(text)) == outputs


def test_readme_is_short() -> None:
    assert 60 <= len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 80


def test_pages_are_found() -> None:
    assert {"README.md", "plugins.md", "recipes.md", "cost.md"} <= {page.name for page in PAGES if blocks(page)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "option, package",
    [
        ("--launcher local", "crossdraft_cluster"),
        ("--launcher ray", "ray"),
        ("--launcher slurm", "submitit"),
        ("--track mlflow", "mlflow"),
        ("--track trackio", "trackio"),
    ],
)
def test_launchers_and_trackers_of_docs(option: str, package: str, place: Path, models: dict[str, Path]) -> None:
    """As they stand in machines.md, but on a cluster, or a server, of this machine alone; processes find the models."""
    pytest.importorskip(package)
    page = [block for block in blocks(ROOT / "docs/machines.md") if block.language == "bash"]
    (command,) = [item for block in page for item in commands(block) if option in item]
    known = {"MLFLOW_TRACKING_URI": (place / "mlruns").as_uri(), "MLFLOW_ALLOW_FILE_STORE": "true"}
    directory = {"ray": [], "submitit": ["--launcher-option", "cluster=local"]}
    words = shlex.split(command)
    while "=" in words[0]:
        assert words.pop(0).partition("=")[0] in known
    if package in directory:
        words = [*words[: words.index("--launcher-option")], *directory[package], "--untimed"]
    provide(place / "site", models)
    own = {"PYTHONPATH": str(place / "site"), "TRACKIO_DIR": str(place / "trackio"), "HF_HUB_OFFLINE": "1", **known}
    line = [sys.executable, "-m", words[0], *shortened(words[1:])]
    done = subprocess.run(line, env=os.environ | own, cwd=place, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    (run,) = place.glob("runs/*-*")
    assert (run / "summary.md").is_file() and list(run.glob("cells/*/responses.jsonl"))
    if package == "mlflow":
        assert list(place.glob("mlruns/*/*/metrics/block_efficiency"))
    if package == "trackio":
        assert list((place / "trackio").iterdir())


def provide(site: Path, models: dict[str, Path]) -> None:
    """The models as an installed distribution, in place of the pack that has the real ones."""
    about = site / "crossdraft_smollm2-9.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: crossdraft-smollm2\nVersion: 9\n", encoding="utf-8")
    (about / "entry_points.txt").write_text("[crossdraft]\nsmollm2 = models_of_the_docs\n", encoding="utf-8")
    lines = ["from pathlib import Path", "from crossdraft import hookimpl", "@hookimpl"]
    lines += ["def crossdraft_register_models(register):"]
    lines += [f"    register({name!r}, Path({str(path)!r}))" for name, path in models.items()]
    (site / "models_of_the_docs.py").write_text("\n".join(lines) + "\n", encoding="utf-8")
