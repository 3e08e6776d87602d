"""Tools that other people wrote, against the endpoint: guidellm and lm-eval, as docs/serve.md calls them.

They are found on PATH, and want environments of their own: ``pip install guidellm``, ``pip install 'lm-eval[api]'``.
"""

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tiny_models import save_model

pytest.importorskip("uvicorn", reason="the endpoint needs the extra serve")

from server_thread import serving

from crossdraft import generate, load_model

pytestmark = pytest.mark.slow
PAGE = Path(__file__).parents[2] / "docs" / "serve.md"
PROMPTS = [f"w{5 + i} w{9 + i % 7} w{5 + i}" for i in range(16)]


def of_the_page(tool: str, port: int, name: str) -> list[str]:
    """The command of a tool, at this server and its model."""
    text = PAGE.read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = [line for line in text.splitlines() if line.startswith(tool)]
    return shlex.split(line.replace("8000", str(port)).replace("smollm2-135m-instruct", name))


def run(command: list[str], place: Path) -> None:
    if not shutil.which(command[0]):
        pytest.skip(f"{command[0]} is not on PATH")
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(place / "hub")}
    done = subprocess.run(command, cwd=place, env=os.environ | offline, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def place(tmp_path: Path) -> Path:
    lines = [json.dumps({"prompt": prompt, "answer": "w5"}) for prompt in PROMPTS]
    (tmp_path / "my-prompts.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return tmp_path


@pytest.fixture
def name(tmp_path: Path) -> str:
    return save_model(tmp_path / "target")


DRAFTING = ("--drafter", "{name: prompt-lookup, gamma: 3}", "--slots", "4", "--max-new-tokens", "40")


def test_guidellm(place: Path, name: str) -> None:
    with serving("--target", name, *DRAFTING) as running:
        run(of_the_page("guidellm", running.port, name), place)
        assert running.idle()
    (benchmark,) = json.loads((place / "guidellm.json").read_text(encoding="utf-8"))["benchmarks"]
    requests: dict[str, Any] = benchmark["requests"]
    assert len(requests["successful"]) == 16 and not requests["errored"] and not requests["incomplete"]
    target = load_model(name, dtype="float32", device="cpu")
    wanted = generate(target, PROMPTS, chat=True, temperature=0, max_new_tokens=24)
    assert sorted(one["output"] for one in requests["successful"]) == sorted(one.text for one in wanted)
    tokens = sum(one["output_metrics"]["text_tokens"] for one in requests["successful"])
    assert tokens == sum(len(one.tokens) for one in wanted)


def test_lm_eval(place: Path, name: str) -> None:
    text = PAGE.read_text(encoding="utf-8")
    task = text.partition('```yaml title="rivers.yaml"\n')[2].partition("```")[0]
    (place / "rivers.yaml").write_text(task, encoding="utf-8")
    with serving("--target", name, *DRAFTING) as running:
        run(of_the_page("lm-eval", running.port, name), place)
        assert running.idle()
    (file,) = place.glob("lm-eval/**/samples_rivers_*.jsonl")
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    target = load_model(name, dtype="float32", device="cpu")
    wanted = generate(target, PROMPTS, chat=False, temperature=0, max_new_tokens=24, stop="\n")
    assert [row["resps"][0][0] for row in sorted(rows, key=lambda row: row["doc_id"])] == [one.text for one in wanted]
