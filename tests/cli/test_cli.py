"""The command line: output, exit codes, and light commands that do not import PyTorch."""

import ast
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tiny_models import save_model

from crossdraft.framework import plugins
from crossdraft.framework.cli import list as list_command
from crossdraft.framework.cli import main as cli
from crossdraft.framework.cli.commands import HEADINGS
from crossdraft.framework.contracts.hookspecs import hookimpl
from crossdraft.framework.errors import ModelError, UsageError


def test_list_prints_every_kind(capsys: Any) -> None:
    assert cli.main(["list"]) == 0
    out = capsys.readouterr().out
    for kind in plugins.KINDS:
        assert kind in out
    for name in plugins.entries("drafters"):
        assert name in out


def test_list_shows_options_of_drafter(capsys: Any) -> None:
    assert cli.main(["list", "drafters", "prompt-lookup"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("prompt-lookup: ") and re.search(r"^gamma +\d+ +\w", out, re.MULTILINE)
    for kind in ("drafters", "verifiers"):
        for name in plugins.entries(kind):
            assert cli.main(["list", kind, name, "--json"]) == 0
            options = json.loads(capsys.readouterr().out)["options"]
            assert {o["option"] for o in options} == set(plugins.get(kind, name).Config.model_fields)
            assert all(o["meaning"] for o in options), f"an option of {name} has no description"


def test_list_shows_compatible_verifiers_of_drafter(capsys: Any) -> None:
    assert cli.main(["list", "drafters", "draft-model-iid"]) == 0
    out = capsys.readouterr().out
    assert "with its default options: iid drafts, at most 10 nodes\n" in out
    assert "\ncompatible lossless verifiers: spectr, specinfer, sample-match, traversal, multipath-block" in out
    assert "\ndefault verifier: spectr (greedy at temperature 0)\n" in out
    assert cli.main(["list", "drafters", "prompt-lookup", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert (record["kind"], record["point_mass"], record["nodes"]) == ("chain", True, 10)
    assert {"token", "block"} <= set(record["verifiers"]) and record["default_verifier"] == "block"
    assert "greedy" not in record["verifiers"] and "lenient" not in record["verifiers"]
    assert cli.main(["list", "drafters", "none"]) == 0
    assert "with its default options: no drafts\n" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["drafters", "verifiers", "launchers", "servers"])
def test_options_of_every_name_are_listed(kind: str, capsys: Any) -> None:
    for name in plugins.entries(kind):
        assert cli.main(["list", kind, name]) == 0
        output = capsys.readouterr().out
        assert all(option in output for option in plugins.get(kind, name).Config.model_fields)


def test_list_describes_verifiers_and_recipes(capsys: Any) -> None:
    assert cli.main(["list", "verifiers", "typical"]) == 0
    assert "\nlossy; verifies drafts: chain, delayed_iid" in capsys.readouterr().out
    assert cli.main(["list", "recipes", "verifiers"]) == 0
    assert "\nmatrix:" in capsys.readouterr().out
    assert cli.main(["list", "models", "nothing"]) == 2
    assert "there is no model named 'nothing'" in capsys.readouterr().err


def test_list_as_json(capsys: Any) -> None:
    assert cli.main(["list", "verifiers", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert [entry["name"] for entry in record["verifiers"]] == sorted(plugins.entries("verifiers"))
    marks = {entry["name"]: entry["mark"] for entry in record["verifiers"]}
    assert marks["token"] == "lossless, certified" and marks["typical"] == "lossy"


def test_plugins_lists_broken_plugins(capsys: Any) -> None:
    def failing(register: Any) -> None:
        raise RuntimeError("boom")

    plugin = SimpleNamespace(crossdraft_register_models=hookimpl(failing))
    plugins.manager().register(plugin, "failing")
    try:
        assert cli.main(["list", "plugins"]) == 0
        assert "RuntimeError: boom" in capsys.readouterr().out
        assert cli.main(["list", "plugins", "--json"]) == 0
        record = json.loads(capsys.readouterr().out)
        assert {"provider": "failing (in this process)", "error": "RuntimeError: boom"} in record["broken"]
    finally:
        plugins.manager().unregister(plugin)


def test_env(capsys: Any) -> None:
    assert cli.main(["list", "env", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["versions"]["torch"]
    assert record["dtype"] in ("float32", "bfloat16")
    assert cli.main(["list", "env"]) == 0
    assert record["python"] in capsys.readouterr().out


@pytest.mark.parametrize(
    "error, code, message",
    [
        (UsageError("no such recipe"), 2, "crossdraft: error: no such recipe\n"),
        (ModelError("it is damaged"), 1, "crossdraft: error: it is damaged\n"),
        (KeyboardInterrupt(), 130, "crossdraft: interrupted\n"),
    ],
)
def test_errors_are_one_line_and_code(monkeypatch: Any, capsys: Any, error: Any, code: int, message: str) -> None:
    def fail(_: Any) -> int:
        raise error

    monkeypatch.setattr(list_command, "list_names", fail)
    assert cli.main(["list"]) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signals_end_every_command_like_ctrl_c(monkeypatch: Any, capsys: Any, number: int) -> None:
    def interrupt(_: Any) -> int:
        os.kill(os.getpid(), number)
        time.sleep(5)
        return 0

    monkeypatch.setattr(list_command, "list_names", interrupt)
    before = signal.getsignal(number)
    assert cli.main(["list"]) == 130
    assert capsys.readouterr().err == "crossdraft: interrupted\n" and signal.getsignal(number) is before


def test_control_characters_in_errors_are_escaped(monkeypatch: Any, capsys: Any) -> None:
    def fail(_: Any) -> int:
        raise UsageError("a name \x1b[2J, and\na second line")

    monkeypatch.setattr(list_command, "list_names", fail)
    assert cli.main(["list"]) == 2
    assert capsys.readouterr().err == "crossdraft: error: a name \\x1b[2J, and\na second line\n"


@pytest.mark.parametrize(
    "error, message", [(SystemExit(0), "SystemExit: 0 (test_cli.py, line"), (GeneratorExit("x"), "GeneratorExit: x")]
)
def test_plugin_cannot_leave_program(monkeypatch: Any, capsys: Any, error: Any, message: str) -> None:
    def leave(_: Any) -> int:
        raise error

    monkeypatch.setattr(list_command, "list_names", leave)
    assert cli.main(["list"]) == 1
    err = capsys.readouterr().err
    assert err.startswith(f"crossdraft: error: {message}") and err.count("\n") == 1
    assert cli.main(["list", "--debug"]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_invalid_arguments_exit_with_2() -> None:
    assert cli.main(["certify", "--gamma", "four"]) == 2
    for argv in ([], ["list", "--no-such-option"]):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(argv)
        assert exit_info.value.code == 2


def test_unknown_names_exit_with_2(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(plugins.COMPANIONS, ("commands", "fleet"), "crossdraft-fleet")
    monkeypatch.setitem(plugins.COMPANIONS, ("reports", "epub"), "crossdraft-epub")
    if "vllm" in plugins.entries("servers"):
        pytest.skip("crossdraft-vllm is installed")
    for argv, message in {
        "reprot": "there is no command named 'reprot'; did you mean 'report'?",
        "fleet": "the command 'fleet' is part of crossdraft-fleet; in a clone of crossdraft: pip "
        "install plugins/crossdraft-fleet",
        "report run --format epub": "the report 'epub' is part of "
        "crossdraft-epub; in a clone of crossdraft: pip install plugins/crossdraft-epub",
        "list servers vllm": "the server 'vllm' is part of crossdraft-vllm; ",
        "list servers vlm": "there is no server named 'vlm'",
        "list drafter": "there is no kind of plug-in named 'drafter'; did you mean 'drafters'?",
    }.items():
        assert cli.main(argv.split()) == 2
        assert capsys.readouterr().err.startswith(f"crossdraft: error: {message}")


def test_option_that_moved_names_its_companion(capsys: Any) -> None:
    advisor = {
        name: plugin for name, plugin in plugins.manager().list_name_plugin() if name.startswith("crossdraft-advisor:")
    }
    for name in advisor:
        plugins.manager().unregister(name=name)
    try:
        assert cli.main(["compare", "a", "b", "--fail-under", "0.9"]) == 2
    finally:
        for name, plugin in advisor.items():
            plugins.manager().register(plugin, name)
    assert "the command 'gate' is part of crossdraft-advisor; in a clone of crossdraft: pip" in capsys.readouterr().err


def test_list_names_companions_that_are_not_installed(monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setitem(plugins.COMPANIONS, ("prompts", "fleet"), "crossdraft-fleet")
    assert cli.main(["list", "prompts"]) == 0
    assert "in a clone of crossdraft: pip install plugins/crossdraft-fleet adds fleet" in capsys.readouterr().out


#: Commands that only print, and what their output contains.
LIGHT = {
    "--help": "certify",
    "--version": "crossdraft ",
    "list": "prompt-lookup",
    "list models --json": "[",
    "list plugins": "crossdraft",
    "certify --help": "--drafter-option",
    "run --help": "--set KEY=VALUE",
}


def test_light_commands_do_not_load_heavy_libraries() -> None:
    code = (
        "import sys; from crossdraft.framework import plugins; from crossdraft.framework.cli.main import main\n"
        "every = plugins.entry_points  # other plug-ins may be heavy\n"
        "plugins.entry_points = lambda group: [p for p in every(group=group) if p.dist.name == 'crossdraft']\n"
        f"for command in {list(LIGHT)}:\n"
        "    try: main(command.split())\n"
        "    except SystemExit: pass\n"
        "    print('end of', command)\n"
        "    heavy = {'torch', 'transformers', 'datasets', 'numpy'} & set(sys.modules)\n"
        "    heavy |= {'pydantic'} & set(sys.modules) if command.startswith(('-', 'list')) else set()\n"
        "    if heavy: sys.exit(f'{command}: loaded {heavy}')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    rest = done.stdout
    for command, words in LIGHT.items():
        printed, _, rest = rest.partition(f"end of {command}\n")
        assert words in printed, (command, printed)


def test_help_names_every_command() -> None:
    done = subprocess.run([sys.executable, "-m", "crossdraft", "--help"], capture_output=True, text=True, check=True)
    commands = plugins.entries("commands")
    for command in commands:
        assert f"\n    {command} " in done.stdout
    headings = re.findall(r"^(\w+):$", done.stdout, re.MULTILINE)
    used = {entry.heading for entry in commands.values()}
    assert headings == ["options", *(heading.lower() for heading in HEADINGS if heading in used)]


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGPIPE")
def test_closed_pipe_prints_no_traceback() -> None:
    code = (
        "import sys; from crossdraft.framework.cli import main as cli\n"
        "from crossdraft.framework.cli import list as commands\n"
        "commands.list_names = lambda args: print('x' * 10**7) or 0\n"
        "sys.exit(cli.main(['list']))"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout and command.stderr
        command.stdout.read(1)
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 141


def test_public_interface_is_lazy_and_complete() -> None:
    import crossdraft

    code = "import sys, crossdraft; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    for name in crossdraft.__all__:
        assert getattr(crossdraft, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = crossdraft.nonsense


@pytest.mark.thorough
def test_progress_bars_are_for_terminals(tmp_path: Path) -> None:
    """In a file each update of a progress bar is a line, including bars of transformers and of plug-ins."""
    environment = {key: value for key, value in os.environ.items() if key != "TQDM_DISABLE"}

    def errors(terminal: bool, then: str) -> str:
        code = "import sys; from crossdraft.framework.cli import main; "
        code += f"sys.stderr.isatty = lambda: {terminal}; main.main(['list', 'recipes']); {then}"
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, timeout=120
        )
        return done.stderr

    bar = "from tqdm import tqdm; list(tqdm(range(3)))"
    model = f"import crossdraft; crossdraft.load_model({save_model(tmp_path / 'target')!r}); "
    assert "3/3" in errors(True, bar)
    assert "%" not in errors(False, model + bar)


def test_every_tqdm_call_sets_disable() -> None:
    """``disable=None`` restricts a progress bar to terminals."""
    root, calls = Path(__file__).parents[2], 0
    for folder in ("framework", "drafters", "verifiers", "plugins", "benchmarks"):
        for file in (root / folder).rglob("*.py"):
            source = file.read_text(encoding="utf-8")
            for node in ast.walk(ast.parse(source)) if "tqdm" in source else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "tqdm":
                    calls += 1
                    assert "disable" in [keyword.arg for keyword in node.keywords], f"{file}:{node.lineno}"
    assert calls > 5
