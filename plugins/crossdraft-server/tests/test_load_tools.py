"""Third-party clients of the endpoint: guidellm and lm-eval, run as in docs/serve.md.

They must be on PATH, each in its own environment: ``pip install guidellm``, ``pip install 'lm-eval[api]'``.
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from server_thread import serving
from tiny_models import save_model

from crossdraft import generate, load_model

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[3] / "docs" / "serve.md"
PROMPTS = [f"w{5 + i} w{9 + i % 7} w{5 + i}" for i in range(16)]


def documented_command(tool: str, port: int, name: str) -> list[str]:
    """The command in docs/serve.md, with this port and model."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith(tool)]
    return shlex.split(line.replace("8000", str(port)).replace("smollm2-135m-instruct", name))


def run(command: list[str], directory: Path) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not on PATH")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(directory / "hub")}
    process = subprocess.run(
        command, cwd=directory, env=os.environ | offline, capture_output=True, text=True, timeout=300
    )
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": prompt, "answer": "w5"}) for prompt in PROMPTS]
    (tmp_path / "my-prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def name(tmp_path: Path) -> str:
    return save_model(tmp_path / "target")


DRAFTING = ("--drafter", "{name: prompt-lookup, gamma: 3}", "--slots", "4", "--max-new-tokens", "40")


def test_guidellm(directory: Path, name: str) -> None:
    with serving("--target", name, *DRAFTING) as running:
        run(documented_command("guidellm", running.port, name), directory)
        assert running.idle()
    (benchmark,) = json.loads((directory / "guidellm.json").read_text(encoding="utf-8"))["benchmarks"]
    requests: dict[str, Any] = benchmark["requests"]
    assert len(requests["successful"]) == 16 and not requests["errored"] and not requests["incomplete"]
    target = load_model(name, dtype="float32", device="cpu")
    expected = generate(target, PROMPTS, chat=True, temperature=0, max_new_tokens=24)
    assert sorted(request["output"] for request in requests["successful"]) == sorted(
        response.text for response in expected
    )
    tokens = sum(request["output_metrics"]["text_tokens"] for request in requests["successful"])
    assert tokens == sum(len(response.tokens) for response in expected)


def test_lm_eval(directory: Path, name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    task = text.partition('```yaml title="rivers.yaml"\n')[2].partition("```")[0]
    (directory / "rivers.yaml").write_text(task, encoding="utf-8")
    with serving("--target", name, *DRAFTING) as running:
        run(documented_command("lm-eval", running.port, name), directory)
        assert running.idle()
    (file,) = directory.glob("lm-eval/**/samples_rivers_*.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    target = load_model(name, dtype="float32", device="cpu")
    expected = generate(target, PROMPTS, chat=False, temperature=0, max_new_tokens=24, stop="\n")
    assert [row["resps"][0][0] for row in sorted(rows, key=lambda row: row["doc_id"])] == [
        response.text for response in expected
    ]
