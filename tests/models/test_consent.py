"""Consent to a model's Python code is for that model alone. The code here leaves a marker where it has run."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers.dynamic_module_utils
from companions import has_command
from tiny_models import save_model
from transformers import AutoModelForCausalLM

from crossdraft import generate, load_model
from crossdraft.framework.cli.main import main
from crossdraft.framework.errors import ModelError
from crossdraft.framework.models.checkpoint import load_checkpoint
from crossdraft.framework.models.shared_embedding import SHARED, save_sharing_embedding

CODE = """\
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

Path({marker!r}).touch()

class MarkedConfig(LlamaConfig):
    model_type = "{kind}"

class MarkedForCausalLM(LlamaForCausalLM):
    config_class = MarkedConfig

class MarkedTokenizer(PreTrainedTokenizerFast):
    pass
"""


@pytest.fixture(autouse=True)
def own_modules_cache(tmp_path: Path, monkeypatch: Any) -> None:
    """Transformers copies such code into a cache and imports it from there."""
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", list(sys.path))


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def marked(directory: Path, place: str = "") -> Path:
    """A model that needs code of its own; the file that the code would leave. ``place``: whose code that is."""
    save_model(directory)
    marker, kind = directory.with_suffix(".ran"), f"marked-{directory.name}"
    (directory / "marked.py").write_text(CODE.format(marker=str(marker), kind=kind))
    code = {"AutoConfig": f"{place}marked.MarkedConfig", "AutoModelForCausalLM": f"{place}marked.MarkedForCausalLM"}
    edit(directory / "config.json", model_type=kind, auto_map=code)
    return marker


def test_code_runs_only_with_consent(tmp_path: Path) -> None:
    marker = marked(tmp_path / "it")
    with pytest.raises(ModelError, match="contains custom Python code"):
        load_model(str(tmp_path / "it"))
    assert not marker.exists()
    assert type(load_model(str(tmp_path / "it"), trust_remote_code=True).model).__name__ == "MarkedForCausalLM"
    assert marker.exists()


def test_owner_of_shared_embedding_needs_consent(tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "plain"))
    save_sharing_embedding(plain, tmp_path / "student", embedding_of=str(tmp_path / "owner"))
    marker = marked(tmp_path / "owner")
    with pytest.raises(ModelError, match=r"owner could not be loaded: it contains custom Python code"):
        load_model(str(tmp_path / "student"), trust_remote_code=True)
    assert not marker.exists()


def test_owner_without_embedding(tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "plain"))
    save_sharing_embedding(plain, tmp_path / "student", embedding_of=str(tmp_path / "student"))
    with pytest.raises(ModelError, match=r"student as owner .* is a cycle"):
        load_model(str(tmp_path / "student"))


@pytest.mark.parametrize("drafter", ["draft-model", "draft-model-tree"])
def test_draft_model_needs_consent(tmp_path: Path, drafter: str) -> None:
    marked(tmp_path / "target")
    marker = marked(tmp_path / "small")
    target = load_model(str(tmp_path / "target"), trust_remote_code=True, dtype="float32")
    with pytest.raises(ModelError, match="small could not be loaded: it contains custom Python code"):
        generate(target, [[5, 6]], drafter={"name": drafter, "model": str(tmp_path / "small")}, max_new_tokens=2)
    assert not marker.exists()


def test_other_tokenizer_needs_consent(tmp_path: Path) -> None:
    marked(tmp_path / "target")
    save_model(tmp_path / "small")
    marker = tmp_path / "tokenizer.ran"
    (tmp_path / "small" / "marked.py").write_text(CODE.format(marker=str(marker), kind="small"))
    code = {"AutoTokenizer": [None, "marked.MarkedTokenizer"]}
    edit(tmp_path / "small" / "tokenizer_config.json", tokenizer_class="MarkedTokenizer", auto_map=code)
    target = load_model(str(tmp_path / "target"), trust_remote_code=True, dtype="float32")
    small = {"name": "draft-model", "model": str(tmp_path / "small")}
    with pytest.raises(ModelError, match="small could not be loaded: it contains custom Python code"):
        generate(target, [[5, 6]], drafter=small, max_new_tokens=2)
    assert not marker.exists()


def test_heads_bring_no_code(tmp_path: Path) -> None:
    marker = marked(tmp_path / "heads")
    assert load_checkpoint(str(tmp_path / "heads")).tensors
    assert not marker.exists()


@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_code_of_another_repository_is_not_covered(tmp_path: Path, file: str) -> None:
    save_model(tmp_path / "it")
    code = {"AutoConfig": "org/name--marked.MarkedConfig"}
    if file == "tokenizer_config.json":
        code = {"AutoTokenizer": [None, "org/name--marked.MarkedTokenizer"]}
    edit(tmp_path / "it" / file, auto_map=code)
    with pytest.raises(
        ModelError, match=r"code of another repository, org/name, which trust_remote_code does not cover"
    ):
        load_model(str(tmp_path / "it"), trust_remote_code=True)
    assert torch.isfinite(next(load_model(str(tmp_path / "it")).model.parameters())).all()  # as a plain Llama it may


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation", "nested"])
def test_attention_is_not_fetched_from_repository(tmp_path: Path, key: str) -> None:
    save_model(tmp_path / "it")
    with pytest.raises(ModelError, match="'org/kernel' would fetch unreviewed code"):
        load_model(str(tmp_path / "it"), attn_implementation="org/kernel")
    attention = {"attn_implementation": {"": "paged|org/kernel"}}
    edit(tmp_path / "it" / "config.json", **({"text_config": attention} if key == "nested" else {key: "org/kernel"}))
    with pytest.raises(ModelError, match="org/kernel' would fetch unreviewed code"):
        load_model(str(tmp_path / "it"), trust_remote_code=True)


COMMANDS = {
    "certify-model": "certify-model {target} --drafter {small} --prompt w5 --raw --draws 100",
    "cost": "cost --target {target} --drafter {small} --batch-size 1 --width 1 --context 8 --repeats 1",
    "run": "run {recipe} --out {out}",
    "replay": "replay {responses} --target {target} --drafter {drafter} --temperature 1 --gamma 1",
    "diagnose": "diagnose --target {target} --drafter {drafter} --prompts {prompts} --max-new-tokens 2 --gamma 1",
    "advise": "advise --prompts {prompts} --target {target} --drafter {drafter} --max-new-tokens 18 --cost {costs}",
}


@pytest.mark.parametrize("command", list(filter(has_command, COMMANDS)))
def test_every_command_has_consent_per_model(tmp_path: Path, command: str, capsys: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    target, small, recipe = tmp_path / "target", tmp_path / "small", tmp_path / "recipe.yaml"
    markers = [marked(target), marked(small)]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"question_id": 1, "category": "a", "turns": ["w5 w6"]}\n')
    recipe.write_text(
        f"target: {target}\nprompts: {prompts}\nmax_new_tokens: 2\n"
        f"drafters: [{{name: draft-model, model: {small}, gamma: 1}}]\nverifiers: [token]\n"
    )
    responses, costs = tmp_path / "responses.jsonl", tmp_path / "costs.csv"
    responses.write_text('{"prompt": "w5 w6", "response": "w7 w8", "ended": true}\n')
    costs.write_text("batch_size,width,context,seconds\n1,1,8,0.1\n1,8,8,0.2\n1,17,8,0.3\n")
    names = {"target": target, "small": small, "recipe": recipe, "out": tmp_path / "runs", "prompts": prompts}
    names |= {"responses": responses, "costs": costs, "drafter": f"{{name: draft-model, model: {small}}}"}
    argv = [part.format(**names) for part in COMMANDS[command].split()]
    for allowed, ran in [([], [False, False]), ([target], [True, False]), ([target, small], [True, True])]:
        main([*argv, *(word for name in allowed for word in ("--trust-remote-code", str(name)))])
        outputs = "".join(capsys.readouterr())
        assert ("it contains custom Python code" in outputs) == (not all(ran)), outputs
        assert [marker.exists() for marker in markers] == ran
        for module in [name for name in sys.modules if name.startswith("transformers_modules")]:
            del sys.modules[module]
    assert main([*argv, "--trust-remote-code", "nobody"]) == 2
    assert "--trust-remote-code 'nobody' is not a model of this command" in capsys.readouterr().err


def test_student_may_name_owner_that_is_shared(tmp_path: Path) -> None:
    """The way out: the user loads the owner, with consent for that one, and shares it."""
    marked(tmp_path / "owner")
    owner = load_model(str(tmp_path / "owner"), trust_remote_code=True, dtype="float32")
    save_sharing_embedding(owner.model, tmp_path / "student", embedding_of=str(tmp_path / "owner"))
    edit(tmp_path / "student" / "config.json", model_type="llama")
    assert (tmp_path / "student" / SHARED).is_file()
    student = load_model(str(tmp_path / "student"), share_with=owner)
    assert student.model.get_input_embeddings().weight is owner.model.get_input_embeddings().weight
