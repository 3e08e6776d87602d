"""LoRA adapters merged on load: weights, names, digests, and rejected adapters."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from companions import needs_command
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB, make_tokenizer, save_model
from transformers import LlamaConfig, LlamaForCausalLM

from crossdraft import generate
from crossdraft.framework.bench.matrix import load_recipe
from crossdraft.framework.bench.provenance import changes, models_used
from crossdraft.framework.cli.main import main
from crossdraft.framework.contracts.models import ResolvedModel
from crossdraft.framework.errors import ModelError, UsageError
from crossdraft.framework.models import adapters
from crossdraft.framework.models.adapters import check_base
from crossdraft.framework.models.digests import model_sha256, weights_sha256
from crossdraft.framework.models.load import load_model
from crossdraft.framework.models.resolve import resolve
from crossdraft.framework.models.tokenizer import load_tokenizer

peft = pytest.importorskip("peft", reason="the extra adapters is not installed")


@pytest.fixture(scope="module")
def base(tmp_path_factory: Any) -> Path:
    return Path(save_model(tmp_path_factory.mktemp("models") / "base"))


@pytest.fixture(scope="module")
def saved_adapter(base: Path) -> Path:
    return save_adapter(base.with_name("lora"), base)


@pytest.fixture
def adapter(saved_adapter: Path, tmp_path: Path) -> Path:
    """A copy that the test may change."""
    return shutil.copytree(saved_adapter, tmp_path / "lora")


def save_adapter(directory: Path, base: Path, seed: int = 1, **options: Any) -> Path:
    """A random LoRA of ``base``, by peft."""
    model = load_model(str(base), dtype="float32").model
    config = peft.LoraConfig(**{"r": 2, "lora_alpha": 6, "target_modules": ["q_proj", "down_proj"], **options})
    config.base_model_name_or_path = str(base)
    wrapped = peft.get_peft_model(model, config)
    torch.manual_seed(seed)
    for name, weight in wrapped.named_parameters():
        if "lora" in name or "modules_to_save" in name:
            torch.nn.init.normal_(weight, std=0.4)
    wrapped.save_pretrained(directory)
    return directory


def by_peft(base: Path, adapter: Path, dtype: str = "float32") -> Any:
    return peft.PeftModel.from_pretrained(load_model(str(base), dtype=dtype).model, str(adapter))


@torch.inference_mode()
def logits(model: Any) -> torch.Tensor:
    return model(torch.arange(5, 30)[None]).logits.float()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"use_rslora": True, "rank_pattern": {"q_proj": 3}, "alpha_pattern": {"down_proj": 1}},
        {"use_dora": True},
        {"modules_to_save": ["lm_head"]},
        {"target_modules": ["embed_tokens", "lm_head", "v_proj"]},
        {"target_modules": r".*\.0\..*(q|down)_proj", "exclude_modules": ".*mlp.*", "rank_pattern": {"(q|k)_proj": 3}},
    ],
    ids=["plain", "patterns", "dora", "head", "embeddings", "expressions"],
)
def test_adapter_is_merged_as_peft_merges_it(tmp_path: Path, base: Path, options: Any, dtype: str) -> None:
    adapter = save_adapter(tmp_path / "lora", base, **options)
    loaded, plain = load_model(f"{base}+{adapter}", dtype=dtype), load_model(str(base), dtype=dtype)
    unmerged = by_peft(base, adapter, dtype)
    assert (logits(loaded.model) - logits(unmerged)).std() < (1e-4 if dtype == "float32" else 0.1)
    assert (logits(loaded.model) - logits(plain.model)).std() > 0.2
    merged = unmerged.merge_and_unload().state_dict()
    ours = loaded.model.state_dict()
    assert ours.keys() == merged.keys() and all(torch.equal(ours[key], merged[key]) for key in merged)
    assert all(weight.requires_grad for weight in loaded.model.parameters())
    assert not any("lora" in name.lower() for name, _ in loaded.model.named_modules())


def test_name_and_digests_cover_base_and_adapter(base: Path, adapter: Path) -> None:
    name = f"{base}+{adapter}"
    loaded = load_model(name, dtype="float32")
    assert loaded.name == name and str(base) in loaded.source and str(adapter) in loaded.source
    assert loaded.sha256.startswith(weights_sha256(base) + "+") and loaded.sha256 == model_sha256(resolve(name))
    used = {"models": models_used({name: {"sha256": loaded.sha256}})}
    assert changes(used, {}) == []
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 5}))
    assert changes(used, {}) == [f"the weights of {name}"]


def test_directory_with_plus_in_its_name_takes_precedence(base: Path, tmp_path: Path) -> None:
    renamed = tmp_path / "c++" / "my+model"
    renamed.parent.mkdir()
    shutil.copytree(base, renamed)
    assert resolve(str(renamed)).adapter is None
    adapter = save_adapter(tmp_path / "lora", renamed)
    assert resolve(f"{renamed}+{adapter}").adapter == adapter


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_adapter_decodes_as_target_and_as_draft_model(base: Path, adapter: Path, temperature: float) -> None:
    target = load_model(f"{base}+{adapter}", dtype="float32")
    prompts, options = [[7, 8, 9], [5]], {"temperature": temperature, "max_new_tokens": 12, "seed": 3}
    plain = generate(target, prompts, drafter="none", **options)
    for model in (target.name, str(base)):
        drafted = generate(target, prompts, drafter={"name": "draft-model", "model": model}, **options)
        if not temperature:
            assert [response.tokens for response in drafted] == [response.tokens for response in plain]
        if model == target.name:
            assert all(len(a.steps) < len(b.steps) for a, b in zip(drafted, plain, strict=True))


@needs_command("replay")
def test_replay_measures_drafter_of_adapted_target(base: Path, adapter: Path, tmp_path: Path, capsys: Any) -> None:
    file, target = tmp_path / "responses.jsonl", f"{base}+{adapter}"
    file.write_text('{"prompt": [7, 8, 9], "tokens": [5, 6, 7, 8], "finish_reason": "length"}\n')
    lengths = []
    for model in (target, str(base)):
        options = ["--verifier", "token", "--gamma", "2", "--temperature", "1", "--dtype", "float32", "--json"]
        drafter = json.dumps({"name": "draft-model", "model": model})
        assert main(["replay", str(file), "--target", target, "--drafter", drafter, *options]) == 0
        (row,) = json.loads(capsys.readouterr().out)["rows"]
        lengths.append(row["acceptance_marginal"])
    assert lengths[0] == pytest.approx([1, 1]) and max(lengths[1]) < 1


@needs_command("replay")
def test_replay_compares_adapters_of_one_base(base: Path, adapter: Path, tmp_path: Path, capsys: Any) -> None:
    other = save_adapter(tmp_path / "other", base, seed=2)
    targets = [str(base), f"{base}+{adapter}", f"{base}+{other}"]
    sources, options = [], ["--gamma", "2", "--temperature", "1", "--dtype", "float32", "--verifier", "token"]
    for i, _ in enumerate(targets):
        sources.append(str(tmp_path / f"{i}.jsonl"))
        rows = [
            {"id": str(k), "prompt": [7, 8, 9 + k], "tokens": [5, 6, 7, 8 + i], "finish_reason": "length"}
            for k in range(3)
        ]
        Path(sources[-1]).write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = [word for target in targets for word in ("--target", target)]
    drafter = json.dumps({"name": "draft-model", "model": targets[1]})
    assert main(["replay", *sources, *names, "--drafter", drafter, *options]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("draft-model")]
    rates = {target: next(line for line in lines if f" {target} " in f"{line} ") for target in targets}
    assert "1.000" in rates[targets[1]] and "1.000" not in rates[targets[0]] + rates[targets[2]]


def test_tokenizer_of_adapter_takes_precedence(base: Path, adapter: Path) -> None:
    assert load_tokenizer(f"{base}+{adapter}").tokenizer.chat_template != "{{ messages }}"
    own = make_tokenizer({**VOCAB, "w5": 63, "w63": 5})
    own.chat_template = "{{ messages }}"
    own.save_pretrained(adapter)
    for tokenizer in (load_tokenizer(f"{base}+{adapter}").tokenizer, load_model(f"{base}+{adapter}").tokenizer):
        assert tokenizer.chat_template == "{{ messages }}" and tokenizer.get_vocab()["w5"] == 63


def test_recipe_takes_adapter(base: Path, adapter: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    text = f"target: {base}+{adapter}\nprompts: builtin\ndrafters: [{{name: draft-model, model: {base}+{adapter}}}]\n"
    recipe.write_text(text + "verifiers: [token]\n")
    load_recipe(str(recipe))
    recipe.write_text(text.replace(str(adapter), "nowhere") + "verifiers: [token]\n")
    with pytest.raises(UsageError, match="the adapter 'nowhere' is neither a directory nor a Hub id"):
        load_recipe(str(recipe))


#: A regular expression that takes exponential time for the names of modules.
SLOW = r"(?:[\w.]|[\w.]{2}|[\w.]{3})+[!?]"


def changed(adapter: Path, **keys: Any) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | keys))


@pytest.mark.parametrize(
    "keys, sentence",
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3', but only LORA is merged on load; merge it with peft"),
        ({"peft_type": None}, "peft_type is None"),
        ({"layer_replication": [[0, 1]]}, "layer_replication is set"),
        ({"corda_config": {"cache_file": "/tmp/x"}}, "corda_config is set"),
        ({"megatron_config": {"a": 1}}, "megatron_config is set"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa', which changes the base weights"),
        ({"r": 0}, "the rank 0 is not valid"),
        ({"r": "8"}, "the rank '8' is not valid"),
        ({"rank_pattern": {"q_proj": 10**30}}, "the rank 10{30} is not valid"),
        ({"modules_to_save": ["(a|aa)+b"]}, "modules_to_save contains .* is not the name of a layer"),
        ({"layers_pattern": "(a|aa)+b"}, "layers_pattern contains .* is not the name of a layer"),
        ({"base_model_name_or_path": "{other}"}, "base_model_name_or_path is '.*, but the base given is .*"),
    ],
)
def test_unsupported_adapter_raises(base: Path, adapter: Path, tmp_path: Path, keys: Any, sentence: str) -> None:
    other = save_model(tmp_path / "other", seed=5)
    changed(adapter, **{key: other if value == "{other}" else value for key, value in keys.items()})
    with pytest.raises(ModelError, match=sentence):
        resolve(f"{base}+{adapter}")


@pytest.mark.parametrize(
    "keys, sentence",
    [
        ({"r": 1000}, "has rank 1000, but the largest dimension of adapter_model.safetensors is"),
        ({"r": 4}, "could not be loaded: .*size mismatch"),
        ({"target_modules": ["q_proj"]}, "missing none; unexpected .*down_proj"),
        ({"target_modules": ["q_proj", "down_proj", "v_proj"]}, "missing .*v_proj.*; unexpected none"),
        ({"target_modules": ["nothing"]}, "could not be loaded: .*Target modules"),
        ({"target_modules": SLOW}, "target_modules is .*: matching it takes too long; list the names"),
        ({"exclude_modules": SLOW}, "exclude_modules is .*: matching it takes too long"),
        ({"rank_pattern": {SLOW: 2}}, "rank_pattern is .*: matching it takes too long"),
        ({"alpha_pattern": {SLOW: 2}}, "alpha_pattern is .*: matching it takes too long"),
        ({"target_modules": "("}, r"target_modules is '\(': missing \)"),
        ({"target_modules": "(" * 900 + ")" * 900}, "target_modules is .*: it is nested too deeply"),
    ],
)
def test_adapter_that_does_not_fit_raises(
    base: Path, adapter: Path, keys: Any, sentence: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(adapters, "SECONDS", 0.1)
    changed(adapter, **keys)
    with pytest.raises(ModelError, match=sentence):
        load_model(f"{base}+{adapter}")


def test_adapter_of_another_shape_raises(adapter: Path, tmp_path: Path) -> None:
    wide = save_model(tmp_path / "wide", hidden=32)
    changed(adapter, base_model_name_or_path="org/somewhere")
    with pytest.raises(ModelError, match="size mismatch"):
        load_model(f"{wide}+{adapter}")


def test_adapter_of_another_hub_model_raises(base: Path, adapter: Path) -> None:
    changed(adapter, base_model_name_or_path="org/other")
    hub = ResolvedModel("org/base", base, "Hub org/base at main", "org/base")
    with pytest.raises(ModelError, match="base_model_name_or_path is 'org/other', but the base given is org/base"):
        check_base(hub, adapter)
    changed(adapter, base_model_name_or_path="Org/Base")
    check_base(hub, adapter)


def test_tied_embedding_with_lora_raises(tmp_path: Path) -> None:
    sizes = {"vocab_size": 72, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, tie_word_embeddings=True))
    model.save_pretrained(tmp_path / "tied")
    make_tokenizer().save_pretrained(tmp_path / "tied")
    adapter = save_adapter(tmp_path / "lora", tmp_path / "tied", target_modules=["embed_tokens", "q_proj"])
    with pytest.raises(ModelError, match="ties to its output head"):
        load_model(f"{tmp_path / 'tied'}+{adapter}")


def test_pickled_adapter_is_not_read(base: Path, adapter: Path) -> None:
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"Pickled weights \(adapter_model.bin\) can run code"):
        load_model(f"{base}+{adapter}")
    (adapter / "adapter_model.safetensors").write_bytes(b"junk")
    with pytest.raises(ModelError, match="is damaged or not a safetensors file"):
        load_model(f"{base}+{adapter}")


def test_missing_tensor_raises(base: Path, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = load_file(file)
    tensors.pop(next(key for key in tensors if "layers.1" in key))
    save_file(tensors, file)
    with pytest.raises(ModelError, match=r"missing .*layers\.1"):
        load_model(f"{base}+{adapter}")


@pytest.mark.parametrize(
    "name, sentence",
    [
        ("{base}+nowhere", "the adapter 'nowhere' is neither a directory nor a Hub id"),
        ("{base}+{base}", "is not an adapter of PEFT: adapter_config.json is missing"),
        ("{base}+{adapter}+{adapter}", "has an adapter, so an adapter cannot be merged"),
        ("{base}+{adapter}@int8", "a model with an adapter cannot be quantised on load"),
        ("{base}@int8+{adapter}", "is quantised, so an adapter cannot be merged"),
        ("nobody+{adapter}", "nobody"),
        ("{base}+", "does not exist"),
    ],
)
def test_name_that_is_not_valid_raises(base: Path, adapter: Path, name: str, sentence: str) -> None:
    with pytest.raises((UsageError, ModelError), match=sentence):
        resolve(name.format(base=base, adapter=adapter))


def test_unsupported_use_raises(base: Path, adapter: Path, monkeypatch: Any) -> None:
    name = f"{base}+{adapter}"
    with pytest.raises(
        UsageError, match=r"heads and initial checkpoints of training cannot have an adapter; use .*base"
    ):
        resolve(name, heads=True)
    with pytest.raises(UsageError, match="is placed on several devices"):
        load_model(name, device="spread")
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(ModelError, match=r"needs peft; .* '\.\[adapters\]'"):
        load_model(name)


def test_engines_refuse_adapters(base: Path, adapter: Path) -> None:
    engine_cell = pytest.importorskip("crossdraft_advisor.engines.engine_cell")
    from crossdraft_advisor.engines.builtin.vllm import Vllm

    name = f"{base}+{adapter}"
    served: Any = SimpleNamespace(target=name, is_baseline=True, engine=SimpleNamespace(name="vllm"))
    with pytest.raises(
        UsageError, match=r"the engine vllm loads the weights itself, without an adapter; use .*base, or"
    ):
        engine_cell.EngineCell.remarks(served)
    drafted: Any = SimpleNamespace(model=name)
    with pytest.raises(UsageError, match="vllm does not merge an adapter into its draft model"):
        Vllm().model_of(drafted)


def test_copied_base_is_recognised(base: Path, adapter: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "copy")
    resolve(f"{tmp_path / 'copy'}+{adapter}")
