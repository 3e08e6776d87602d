"""Hostile model directories: rejected before anything large is allocated."""

# ruff: noqa: E501 (an input and its words on one line can be read)

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from crossdraft import ModelSource
from crossdraft.framework.api.generate import generate
from crossdraft.framework.errors import CrossdraftError
from crossdraft.framework.models.load import load_model
from crossdraft.framework.models.resolve import resolve

TOO_DEEP = '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"

#: A key of config.json, its value, words of the sentence.
CONFIGS: list[tuple[str, Any, list[str]]] = [
    *[
        (key, value, [f"config.json: {key} is", "it must be an integer of at least 1"])
        for key in ("num_hidden_layers", "hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings")
        for value in (0, -1, "8", 1.5, True, [1], {"a": 1})
    ],
    ("num_key_value_heads", 0, ["config.json: num_key_value_heads is 0"]),
    ("intermediate_size", "x" * 10_000, ["config.json: intermediate_size is 'xxx", "…"]),
    ("head_dim", float("nan"), ["config.json: head_dim is nan"]),
    ("num_hidden_layers", 10**9, ["num_hidden_layers is 1000000000", "the maximum is 1024", "built before any weight"]),
    ("num_hidden_layers", 10**30, ["the maximum is 1024"]),
    ("num_hidden_layers", 512, ["has 512 layers, but the weights have only 21 tensors"]),
    ("num_hidden_layers", None, ["num_hidden_layers"]),
    ("num_hidden_layers", 3, ["missing model.layers.2"]),
    ("hidden_size", 10**9, ["hidden_size is 1000000000", "the maximum is 16777216"]),
    ("hidden_size", 100_000, ["has hidden_size 100000, but the largest dimension of its weights is 72"]),
    ("hidden_size", 32, ["the shapes of its weights do not match its config.json"]),
    ("vocab_size", 10**7, ["has vocab_size 10000000, but the largest dimension"]),
    ("intermediate_size", 10**7, ["has intermediate_size 10000000, but the largest dimension"]),
    ("num_attention_heads", 10**7, ["could not be loaded", "multiple of the number of attention heads"]),
    ("num_key_value_heads", 3, ["the shapes of its weights do not match its config.json"]),
    ("max_position_embeddings", 10**30, ["positions are counted in 32 bits"]),
    ("text_config", {"hidden_size": 0}, ["text_config.hidden_size is 0"]),
    ("text_config", 3, ["could not be loaded"]),
    ("rope_theta", "x", ["rope_theta is 'x'; it must be a positive number"]),
    ("rope_theta", -1, ["rope_theta is -1; it must be a positive number"]),
    ("rope_parameters", {"rope_theta": 0, "rope_type": "default"}, ["rope_parameters.rope_theta is 0"]),
    ("rope_parameters", {"rope_type": "zz"}, ["could not be loaded", "zz"]),
    ("rope_parameters", 3, ["rope_parameters"]),
    ("eos_token_id", "</s>", ["eos_token_id"]),
    ("eos_token_id", -1, ["eos_token_id contains -1, which is not a valid token id"]),
    ("eos_token_id", [2, "x"], ["eos_token_id"]),
    ("eos_token_id", {"a": 1}, ["eos_token_id"]),
    ("eos_token_id", 10**30, ["eos_token_id contains 1000000000000000000000000000000, which is not a valid token id"]),
    ("hidden_act", "nope", ["could not be loaded", "nope"]),
    ("hidden_act", 3, ["hidden_act"]),
    ("rms_norm_eps", "x", ["rms_norm_eps"]),
    ("rms_norm_eps", None, ["rms_norm_eps"]),
    ("initializer_range", "x", ["initializer_range"]),
    ("use_cache", "x", ["use_cache", "expected bool"]),
    ("tie_word_embeddings", "x", ["tie_word_embeddings"]),
    ("pad_token_id", "x", ["pad_token_id"]),
    ("attention_bias", True, ["missing model.layers.0.self_attn"]),
    ("layer_types", 3, ["could not be loaded"]),
    ("quantization_config", 3, ["could not be loaded"]),
    ("quantization_config", {"quant_method": "gptq"}, ["could not be loaded", "GPTQ"]),
    ("id2label", 3, ["could not be loaded"]),
    ("dtype", "nope", ["could not be loaded", "nope"]),
    ("model_type", "nope", ["could not be loaded", "nope"]),
    ("model_type", None, ["could not be loaded"]),
    ("model_type", 3, ["could not be loaded"]),
]  # fmt: skip

INDEX, SHARED, TOKENIZER = "model.safetensors.index.json", "crossdraft.json", "tokenizer.json"


def shared(model: Any, sha256: Any = "0") -> str:
    return json.dumps({"shared_embedding": {"model": model, "sha256": sha256}})


#: Files of the directory and what stands in them (None: they are gone), words of the sentence.
FILES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "config: gone": ({"config.json": None}, ["config.json is missing"]),
    "config: empty": ({"config.json": ""}, ["config.json:1: not JSON"]),
    "config: cut": ({"config.json": '{"a":\n'}, ["config.json:2: not JSON"]),
    "config: a list": ({"config.json": "[]"}, ["config.json: it must hold a JSON object, not a list"]),
    "config: a text": ({"config.json": '"x"'}, ["not a text"]),
    "config: nothing": ({"config.json": "{}"}, ["could not be loaded"]),
    "config: nested": ({"config.json": '{"a": ' + "[" * 100 + "]" * 100 + "}"}, ["nested more than 64 deep"]),
    "config: nested more": ({"config.json": TOO_DEEP}, ["config.json:1", "nested too deeply"]),
    "config: digits": ({"config.json": '{"a": ' + "9" * 5000 + "}"}, ["5000 digits", "the maximum is 40"]),
    "config: UTF-16": ({"config.json": "{}".encode("utf-16")}, ["config.json: it is not UTF-8 text but UTF-16"]),
    "config: Latin-1": ({"config.json": b'{"a": "\xe9"}'}, ["config.json: it is not UTF-8 text (line 1)"]),
    "config: 11 MB": ({"config.json": " " * 11_534_336}, ["11534336 bytes", "the maximum is 10485760"]),
    "config: NUL": ({"config.json": "\0"}, ["config.json:1: not JSON"]),
    "generation config: cut": ({"generation_config.json": "{"}, ["generation_config.json:1: not JSON"]),
    "generation config: a list": ({"generation_config.json": "[]"}, ["must hold a JSON object, not a list"]),
    "generation config: EOS a text": ({"generation_config.json": '{"eos_token_id": "</s>"}'}, ["eos_token_id contains '</s>'"]),
    "generation config: EOS texts": ({"generation_config.json": '{"eos_token_id": [2, "x"]}'}, ["eos_token_id contains 'x'"]),
    "generation config: EOS an object": ({"generation_config.json": '{"eos_token_id": {"a": 1}}'}, ["eos_token_id contains {'a': 1}"]),
    "generation config: EOS true": ({"generation_config.json": '{"eos_token_id": true}'}, ["eos_token_id contains True"]),
    "weights: gone": ({"model.safetensors": None}, ["does not contain safetensors weights"]),
    "weights: empty": ({"model.safetensors": b""}, ["could not be loaded", "header too small"]),
    "weights: no header": ({"model.safetensors": b"\0" * 8}, ["could not be loaded"]),
    "weights: a header of 10 GB": ({"model.safetensors": (10**10).to_bytes(8, "little") + b"{"}, ["header too large"]),
    "weights: a header of 2^64": ({"model.safetensors": b"\xff" * 8 + b"{}"}, ["header too large"]),
    "weights: a header that is a list": ({"model.safetensors": (2).to_bytes(8, "little") + b"[]"}, ["could not be loaded"]),
    "weights: text": ({"model.safetensors": b"not safetensors at all"}, ["could not be loaded"]),
    "index: cut": ({INDEX: "{"}, ["index.json:1: not JSON"]),
    "index: empty": ({INDEX: ""}, ["index.json:1: not JSON"]),
    "index: a list": ({INDEX: "[]"}, ["index.json: it must hold a JSON object, not a list"]),
    "index: no weight_map": ({INDEX: "{}"}, ["index.json: weight_map"]),
    "index: weight_map a list": ({INDEX: '{"weight_map": ["a"]}'}, ["is missing or empty"]),
    "index: weight_map null": ({INDEX: '{"weight_map": null}'}, ["is missing or empty"]),
    "index: weight_map of nothing": ({INDEX: '{"weight_map": {}}'}, ["is missing or empty"]),
    "index: a number for a file": ({INDEX: '{"weight_map": {"a": 3}}'}, ["the file of the weight 'a' is 3"]),
    "index: a way out": ({INDEX: '{"weight_map": {"a": "../../etc/passwd"}}'}, ["'../../etc/passwd'", "in the same directory"]),
    "index: a directory": ({INDEX: '{"weight_map": {"a": "."}}'}, ["the file of the weight 'a' is '.'"]),
    "index: NUL": ({INDEX: '{"weight_map": {"a": "x\\u0000"}}'}, ["the file of the weight 'a'"]),
    "index: a file that is gone": ({INDEX: '{"weight_map": {"a": "x.safetensors"}}'}, ["missing x.safetensors"]),
    "index: nested": ({INDEX: TOO_DEEP}, ["nested too deeply"]),
    "index: binary": ({INDEX: b"\xff\xfe"}, ["index.json: it is not UTF-8 text"]),
    "tokenizer: gone": ({TOKENIZER: None, "tokenizer_config.json": None}, ["does not have a tokenizer"]),
    "tokenizer: empty": ({TOKENIZER: ""}, ["the tokenizer of", "could not be loaded"]),
    "tokenizer: cut": ({TOKENIZER: "{"}, ["the tokenizer of", "could not be loaded"]),
    "tokenizer: a list": ({TOKENIZER: "[]"}, ["the tokenizer of", "could not be loaded"]),
    "tokenizer: nothing": ({TOKENIZER: "{}"}, ["the tokenizer of", "could not be loaded"]),
    "tokenizer: binary": ({TOKENIZER: b"\xff\xfe\0"}, ["the tokenizer of", "could not be loaded"]),
    "tokenizer config: cut": ({"tokenizer_config.json": "{"}, ["tokenizer_config.json:1: not JSON"]),
    "tokenizer config: a list": ({"tokenizer_config.json": "[]"}, ["tokenizer_config.json: it must hold a JSON object"]),
    "tokenizer config: a class that is a number": ({"tokenizer_config.json": '{"tokenizer_class": 3}'}, ["the tokenizer of"]),
    "embedding: cut": ({SHARED: "{"}, ["crossdraft.json:1: not JSON"]),
    "embedding: a list": ({SHARED: "[]"}, ["crossdraft.json: it must hold a JSON object"]),
    "embedding: nothing": ({SHARED: "{}"}, ["crossdraft.json must be"]),
    "embedding: a number": ({SHARED: shared(3)}, ["crossdraft.json must be"]),
    "embedding: a number for a digest": ({SHARED: shared("x", 3)}, ["crossdraft.json must be"]),
    "embedding: nested": ({SHARED: TOO_DEEP}, ["nested too deeply"]),
    "embedding: of nobody": ({SHARED: shared("nobody")}, ["there is no model named 'nobody'"]),
    "embedding: of nothing": ({SHARED: shared("")}, ["'' is not a model name"]),
    "embedding: of nowhere": ({SHARED: shared("/no/where")}, ["model directory /no/where does not exist"]),
}  # fmt: skip


@pytest.fixture
def directory(models: dict[str, str], tmp_path: Path) -> Path:
    """A valid model, to be damaged."""
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    return Path(shutil.copytree(models["target"], tmp_path / "model"))


def spoil(directory: Path, files: dict[str, Any]) -> None:
    for name, content in files.items():
        file = directory / name
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content if isinstance(content, bytes) else content.encode())


def refusal(name: str | Path, *words: str) -> None:
    with pytest.raises(CrossdraftError) as caught:
        load_model(str(name))
    missing = [word for word in words if word not in str(caught.value)]
    assert not missing, f"{missing} not in: {caught.value}"
    assert len(str(caught.value)) < 2000


@pytest.mark.parametrize("key, value, words", CONFIGS, ids=lambda v: str(v)[:30])
def test_config(key: str, value: Any, words: list[str], directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    spoil(directory, {"config.json": json.dumps(config | {key: value})})
    refusal(directory, *words)


@pytest.mark.parametrize("subject", FILES)
def test_files(subject: str, directory: Path) -> None:
    files, words = FILES[subject]
    spoil(directory, files)
    refusal(directory, *words)


def test_weights_that_are_cut(directory: Path) -> None:
    whole = (directory / "model.safetensors").read_bytes()
    for length in (7, 8, 100, len(whole) - 1):
        spoil(directory, {"model.safetensors": whole[:length]})
        refusal(directory, "could not be loaded")


def test_embeddings_in_circle(directory: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(directory, tmp_path / "other"))
    spoil(directory, {SHARED: shared(str(directory))})
    refusal(directory, "as owner of the embedding of", "is a cycle")
    spoil(directory, {SHARED: shared(str(other))})
    spoil(other, {SHARED: shared(str(directory))})
    refusal(directory, "is a cycle")
    refusal(other, "is a cycle")


@pytest.mark.parametrize(
    "name, words",
    [
        ("", "'' is not a model name"),
        ("a\0b", "'a\\x00b' is not a valid path"),
        ("~nosuchuser/x", "home directory"),
        ("x" * 5000, "File name too long"),
        ("/dev/zero", "a file that is not supported by any installed backend"),
        ("\udcff", "there is no model named '\\udcff'"),
        ("../no/where", "model directory ../no/where does not exist"),
        ("a\\b", "model directory a\\b does not exist"),
        ("a/b/c", "model directory a/b/c does not exist"),
        ("\x1b[31m", "there is no model named '\\x1b[31m'"),
        ("/no/\x1b[31m", "model directory /no/\\x1b[31m does not exist"),
    ],
)
def test_name(name: str, words: str) -> None:
    refusal(name, words)


def test_directory_that_loops(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    refusal(tmp_path / "loop", "symbolic links")


def test_file_that_may_not_be_read(directory: Path, monkeypatch: Any) -> None:
    opened = os.open

    def denied(path: Any, *flags: Any, **options: Any) -> int:
        if str(path).endswith("config.json"):
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *flags, **options)

    monkeypatch.setattr(os, "open", denied)
    refusal(directory, "config.json: Permission denied")


@pytest.mark.parametrize("option", [{"device": "meta"}, {"device": "toaster"}, {"device": "cpu:x"}, {"device": 3.5}])
def test_device(option: Any, directory: Path) -> None:
    with pytest.raises(CrossdraftError, match="unknown device"):
        load_model(str(directory), **option)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8", "__class__", "complex64", "", 3, None])
def test_dtype(dtype: Any, directory: Path) -> None:
    with pytest.raises(CrossdraftError, match="unknown dtype"):
        load_model(str(directory), dtype=dtype)


# -- registered models ---------------------------------------------------------------------------------------


def raising(error: BaseException) -> Any:
    def model() -> Any:
        raise error

    return model


class _Source(ModelSource):
    def __init__(self, gives: Any):
        self.gives = gives

    def fetch(self, name: str) -> Any:
        if isinstance(self.gives, BaseException):
            raise self.gives
        return self.gives


@pytest.mark.parametrize(
    "model, words",
    [
        (raising(RuntimeError("boom")), ["RuntimeError: boom"]),
        (raising(SystemExit(0)), ["SystemExit: 0"]),
        (raising(SystemExit("bye\x1b[31m")), ["SystemExit: bye\\x1b[31m"]),
        (lambda: None, ["must return a path or a ModelSource, not None"]),
        (lambda: 3, ["must return a path or a ModelSource, not 3"]),
        (lambda x: x, ["TypeError"]),
        (_Source(RuntimeError("boom")), ["fetch() raised RuntimeError: boom"]),
        (_Source(SystemExit(3)), ["fetch() raised SystemExit: 3"]),
        (_Source(None), ["fetch() must return a ResolvedModel, not None"]),
        (lambda: _Source("x"), ["fetch() must return a ResolvedModel, not 'x'"]),
        (3, ["a model is a ModelSource"]),
        ("no_such_module:x", ["ModuleNotFoundError"]),
    ],
)
def test_registered_model(model: Any, words: list[str], install: Any) -> None:
    install("models", ("theirs", model))
    refusal("theirs", "the model 'theirs' of test-models", "is unusable", *words)
    with pytest.raises(CrossdraftError):
        resolve("theirs", heads=True)


def test_registered_path_that_is_not_directory(install: Any) -> None:
    install("models", ("theirs", Path("/no/where")))
    refusal("theirs", "the directory of theirs, /no/where, does not exist")


# -- a model's output ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "template",
    [
        "{{ nope(", "{% for %}", "{{ messages[9].content }}", "{{ 1 // 0 }}", "{{ messages.nope.nope }}",
        "{{ raise_exception('no system turns') }}", "{% for i in range(10**9) %}x{% endfor %}",
        "{{ ''.__class__.__mro__ }}",
    ],
)  # fmt: skip
def test_chat_template(template: str, directory: Path) -> None:
    spoil(directory, {"chat_template.jinja": template})
    loaded = load_model(str(directory))
    with pytest.raises(CrossdraftError, match=r"the chat template of .*model fails: "):
        generate(loaded, "w5 w6", max_new_tokens=2)


def test_half_surrogate_pair_is_not_text(directory: Path) -> None:
    with pytest.raises(CrossdraftError, match=r"U\+D800, half of a surrogate pair, which cannot be tokenized"):
        generate(load_model(str(directory)), "w5 \ud800")


def test_model_that_does_not_load_is_refused_before_run(
    models: dict[str, str], directory: Path, write_prompts: Any, recipe_file: Any, tmp_path: Path, capsys: Any
) -> None:
    """Rejected with the line in the recipe; nothing is measured."""
    from crossdraft.framework.cli import main as cli

    spoil(directory, {"config.json": "{"})
    prompts = write_prompts(tmp_path / "p.jsonl", n=2)
    recipe = recipe_file(
        f"target: {models['target']}\nprompts: {{path: {prompts}}}\nmax_new_tokens: 2\nverifiers: [token]\n"
        f"drafters: [prompt-lookup, {{name: draft-model, model: {directory}}}]\n"
    )
    assert cli.main(["run", recipe, "--out", str(tmp_path / "runs"), "--quiet"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"crossdraft: error: {recipe}:5: ") and "not JSON" in err
    assert "Traceback" not in err and not list(tmp_path.glob("runs/*/cells"))
