"""Hostile recipes: rejected with their line, before anything is allocated."""

# ruff: noqa: E501 (an input and its words on one line can be read)

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.bench.matrix import expand, load_recipe
from crossdraft.framework.errors import UsageError

BASE = "target: TARGET\ndrafters: [prompt-lookup]\nverifiers: [token]\n"


def bomb(levels: int, width: int) -> str:
    lines = ["a0: &a0 [" + ", ".join(["x"] * width) + "]"]
    lines += [f"a{i}: &a{i} [" + ", ".join([f"*a{i - 1}"] * width) + "]" for i in range(1, levels)]
    return "\n".join(lines)


#: What follows `BASE`, the line that the sentence names (0: none), and words of the sentence.
TEXTS: dict[str, tuple[str, int, list[str]]] = {
    # YAML itself
    "a list that never ends": ("matrix: [1, 2", 0, ["this is not YAML"]),
    "a tab": ("matrix:\n\tgamma: [1]", 5, ["this is not YAML"]),
    "an open quote": ("name: 'x", 0, ["this is not YAML"]),
    "a reserved character": ("name: @x", 4, ["this is not YAML"]),
    "a percent sign": ("name: %x", 4, ["this is not YAML"]),
    "a closed bracket": ("name: ]", 4, ["this is not YAML"]),
    "two documents": ("---\ntarget: x", 4, ["expected a single document in the stream, but found another document"]),
    "NUL": ("name: a\0b", 4, ["U+0000", "is not allowed in YAML"]),
    "ESC": ("name: a\x1b[31mb", 4, ["U+001B"]),
    "DEL": ("name: a\x7fb", 4, ["U+007F"]),
    "NUL escaped": ('name: "a\\0b"', 4, ["U+0000"]),
    "ESC escaped": ('name: "\\e[31m"', 4, ["U+001B"]),
    "half a pair": ('name: "\\ud800"', 4, ["recipe.yaml:4"]),
    "an alias of nothing": ("name: *x", 4, ["found undefined alias"]),
    "an alias inside itself": ("matrix: &a {gamma: *a}", 4, ["is used inside of its own anchor"]),
    "a list inside itself": ("matrix: {gamma: &a [*a]}", 4, ["is used inside of its own anchor"]),
    "a bomb of aliases": (bomb(10, 10), 0, ["those repeated by aliases included", "the maximum is 30000"]),
    "a bomb of merges": ("a: &a {x: 1}\nb: &b\n" + "".join(f"  k{i}: *a\n" for i in range(1000)) + "".join(f"c{i}: {{<<: *b}}\n" for i in range(60)), 0, ["the maximum is 30000"]),
    "nested lists": ("matrix: {gamma: " + "[" * 3000 + "]" * 3000 + "}", 4, ["nested too deeply", "the maximum is 64"]),
    "nested mappings": ("matrix: " + "{a: " * 3000 + "1" + "}" * 3000, 4, ["nested too deeply"]),
    "nested without an end": ("matrix: " + "[" * 200_000, 4, ["nested too deeply"]),
    "nested dashes": ("matrix:\n  " + "- " * 2000 + "x", 5, ["nested too deeply"]),
    "too many values": ("matrix:\n  gamma: [" + "1," * 40_000 + "1]", 5, ["values", "the maximum is 30000"]),
    # keys
    "a list as a key": ("? [a, b]\n: 1", 4, ["a list cannot be a key"]),
    "a mapping as a key": ("? {a: b}\n: 1", 4, ["a mapping cannot be a key"]),
    "an inline mapping as a key": ("{a: b}: 1", 4, ["a mapping cannot be a key"]),
    "a number as a key": ("1: x", 4, ["the key 1 is not a text"]),
    "true as a key": ("true: x", 4, ["the key True is not a text"]),
    "on as a key": ("on: x", 4, ["the key True is not a text"]),
    "null as a key": ("~: x", 4, ["the key None is not a text"]),
    "a float as a key": ("1.5: x", 4, ["the key 1.5 is not a text"]),
    "a key twice": ("target: y", 4, ["the key 'target' is given twice"]),
    "a key twice below": ("matrix: {gamma: [1], gamma: [2]}", 4, ["the key 'gamma' is given twice"]),
    "a key of a drafter twice": ("prompts:\n  name: builtin\n  name: builtin", 6, ["the key 'name' is given twice"]),
    "an unknown key": ("max_new_token: 3", 4, ["unknown key 'max_new_token'", "did you mean 'max_new_tokens'"]),
    "a key of a megabyte": ("? '" + "k" * 500_000 + "'\n: 1", 4, ["unknown key 'kkk", "…"]),
    "a key of a sampling": ("temperature: 1", 4, ["put it under sampling"]),
    "merging a number": ("matrix: {<<: 3}", 4, ["the value of '<<' must be a mapping"]),
    "merging a list of numbers": ("matrix: {<<: [3]}", 4, ["the value of '<<' must be a mapping"]),
    "merging what has unknown keys": ("sampling: {<<: {nothing: 1}}", 4, ["unknown key 'nothing' in sampling"]),
    # tags and scalars
    "a date that is none": ("limit: 2024-13-45", 4, ["limit", "valid integer", "2024-13-45"]),
    "a date": ("limit: 2024-01-02", 4, ["limit", "valid integer", "2024-01-02"]),
    "an integer of 5,000 digits": ("limit: " + "9" * 5000, 4, ["5000 digits", "the maximum is 40"]),
    "a text of 5,000 digits": ("limit: '" + "9" * 5000 + "'", 4, ["limit", "…"]),
    "an integer of 30 digits": ("limit: 1" + "0" * 30, 4, ["limit", "less than or equal to 50000"]),
    "0x_": ("limit: 0x_", 4, ["'0x_'"]),
    "0b_": ("limit: 0b_", 4, ["'0b_'"]),
    "an octal number": ("limit: 010", 4, ["'010'", "ambiguous number"]),
    "a sexagesimal number": ("limit: 1:30", 4, ["'1:30'", "ambiguous number"]),
    "!!int abc": ("limit: !!int abc", 4, ["'abc'", "'int'"]),
    "!!int of nothing": ("limit: !!int ''", 4, ["'int'"]),
    "!!float abc": ("sampling: {temperature: !!float abc}", 4, ["'abc'", "'float'"]),
    "!!bool maybe": ("trust_remote_code: !!bool maybe", 4, ["'maybe'", "'bool'"]),
    "!!binary": ("name: !!binary aGk=", 4, ["the tag '!!binary'"]),
    "!!timestamp": ("name: !!timestamp 2024-01-01", 4, ["the tag '!!timestamp'"]),
    "!!set": ("matrix: !!set {gamma}", 4, ["the tag '!!set'"]),
    "!!omap": ("matrix: !!omap [gamma: 1]", 4, ["the tag '!!omap'"]),
    "a call": ("name: !!python/object/apply:os.system ['touch hacked']", 4, ["the tag '!!python/object/apply:os.system'"]),
    "a class": ("name: !!python/name:os.system", 4, ["the tag '!!python/name:os.system'"]),
    "a tag of one's own": ("name: !mine x", 4, ["the tag '!mine'"]),
    "a tag on a mapping": ("matrix: !!str {a: b}", 4, ["the tag '!!str'"]),
    # numbers
    "infinity": ("sampling: {temperature: .inf}", 4, ["'.inf' is not a finite number"]),
    "minus infinity": ("sampling: {temperature: -.inf}", 4, ["not a finite number"]),
    "NaN": ("sampling: {temperature: .nan}", 4, ["'.nan' is not a finite number"]),
    "infinity as a text": ("sampling: {temperature: inf}", 4, ["sampling.temperature", "finite number"]),
    "NaN as a text": ("sampling: {top_p: nan}", 4, ["sampling.top_p", "finite number"]),
    "1e999": ("sampling: {temperature: 1e999}", 4, ["finite number"]),
    "1.0e+999": ("sampling: {temperature: 1.0e+999}", 4, ["not a finite number"]),
    "NaN in the matrix": ("matrix: {temperature: [1, .nan]}", 4, ["not a finite number"]),
    "NaN as a text in the matrix": ("matrix: {temperature: [1, nan]}", 4, ["matrix.temperature[1]", "finite number"]),
    "a negative temperature": ("sampling: {temperature: -1}", 4, ["greater than or equal to 0"]),
    "top_p 0": ("sampling: {top_p: 0}", 4, ["greater than 0"]),
    "top_p 2": ("sampling: {top_p: 2}", 4, ["less than or equal to 1"]),
    "top_k -1": ("sampling: {top_k: -1}", 4, ["greater than or equal to 0"]),
    "min_p text": ("sampling: {min_p: much}", 4, ["valid number", "'much'"]),
    "true tokens": ("max_new_tokens: true", 4, ["valid integer, not true"]),
    "a true seed": ("seed: yes", 4, ["seed", "valid integer, not true"]),
    "a true temperature": ("sampling: {temperature: true}", 4, ["valid number, not true"]),
    "a true batch size in the matrix": ("matrix: {batch_size: [true]}", 4, ["matrix.batch_size[0]", "not true"]),
    "half a token": ("max_new_tokens: 1.5", 4, ["valid integer", "1.5"]),
    "no tokens": ("max_new_tokens: 0", 4, ["greater than or equal to 1"]),
    "too many tokens": ("max_new_tokens: 10000000000", 4, ["less than or equal to 1048576", "slot of the cache"]),
    "no rows": ("batch_size: 0", 4, ["greater than or equal to 1"]),
    "too many rows": ("batch_size: 1000000000000", 4, ["less than or equal to 65536", "cache"]),
    "rows as a list": ("batch_size: [1, 2]", 4, ["batch_size", "valid integer"]),
    "a negative seed": ("seed: -1", 4, ["greater than or equal to 0"]),
    "a seed of 65 bits": ("seed: 18446744073709551616", 4, ["less than or equal to 18446744073709551615", "64 bits"]),
    "no prompts": ("limit: 0", 4, ["greater than or equal to 1"]),
    "a limit of 10^30": ("limit: 1000000000000000000000000000000", 4, ["less than or equal to 50000"]),
    "10^30 in words": ("limit: 10^30", 4, ["valid integer", "'10^30'"]),
    # names and paths
    "no name": ("name: ''", 4, ["name"]),
    "a name with a slash": ("name: a/b", 4, ["name", "pattern"]),
    "a name of 300 characters": ("name: " + "n" * 300, 4, ["300 characters", "the maximum is 200"]),
    "a name that is a list": ("name: [a]", 4, ["name", "valid string"]),
    "a dtype of two lines": ('dtype: "float32\\nx"', 4, ["dtype", "U+000A"]),
    "a dtype that is none": ("dtype: __class__", 4, ["unknown dtype '__class__'"]),
    "a dtype that is a number": ("dtype: 16", 4, ["dtype", "valid string"]),
    "no home": ("prompts: ~nosuchuser/x.jsonl", 4, ["~nosuchuser/x.jsonl", "home directory"]),
    "a path of 5,000 characters": ("prompts: /tmp/" + "p" * 5000, 4, ["File name too long"]),
    "prompts that are a list": ("prompts: [a, b]", 4, ["prompts", "mapping"]),
    "prompts that are a number": ("prompts: 3", 4, ["prompts"]),
    "prompts of nothing": ("prompts: ''", 4, ["prompts"]),
    "prompts with a control character": ('prompts: "a\\tb"', 4, ["U+0009"]),
    "categories that are a text": ("prompts: {name: builtin, categories: chat}", 4, ["categories", "list"]),
    "categories that are numbers": ("prompts: {name: builtin, categories: [3]}", 4, ["categories[0]", "string"]),
    # the matrix
    "a matrix that is a list": ("matrix: [gamma]", 4, ["matrix", "mapping"]),
    "a matrix that is a text": ("matrix: gamma", 4, ["matrix", "mapping"]),
    "a key of nobody": ("matrix: {gama: [1]}", 4, ["unknown key 'gama' in matrix", "did you mean 'gamma'"]),
    "no values": ("matrix: {gamma: []}", 4, ["is an empty list"]),
    "null": ("matrix: {gamma: [null]}", 4, ["matrix.gamma[0]", "valid integer"]),
    "a mapping for a number": ("matrix: {gamma: [{a: 1}]}", 4, ["matrix.gamma[0]", "valid integer"]),
    "a true gamma": ("matrix: {gamma: [true]}", 4, ["matrix.gamma[0]", "not true"]),
    "gamma 200,000,000 beside gamma 2": ("matrix: {gamma: [2, 200000000]}", 4, ["matrix.gamma[1]", "less than or equal to 1024", "the work of every step"]),
    "a million cells": (f"matrix: {{batch_size: {list(range(1, 1001))}, seed: {list(range(1000))}}}", 4, ["2000000 cells", "the maximum is 10000", "every prompt"]),
    "10^18 cells": (f"matrix:\n  batch_size: {list(range(1, 1001))}\n  seed: {list(range(1000))}\n  gamma: {list(range(1000))}\n  max_ngram: {list(range(1, 1001))}\n  top_k: {list(range(1000))}\n  min_p: {[0.0] * 1000}", 4, ["cells", "the maximum is 10000"]),
    "a target that is a list": ("matrix: {target: [[a]]}", 4, ["target", "valid string"]),
    # exclude
    "exclude a mapping of a drafter": ("exclude: [{drafter: {name: prompt-lookup}}]", 4, ["exclude[0].drafter", "must be a name or a list"]),
    "exclude a number": ("exclude: [{drafter: 3}]", 4, ["exclude[0].drafter", "not 3"]),
    "exclude a list of mappings": ("exclude: [{verifier: [{name: token}]}]", 4, ["exclude[0].verifier"]),
    "exclude nobody": ("exclude: [{drafter: nobody}]", 4, ["there is no drafter named 'nobody'"]),
    "exclude with an unknown key": ("exclude: [{gama: 3}]", 4, ["unknown key 'gama' in exclude"]),
    "exclude what is not there": ("exclude:\n  - {gamma: 99}", 5, ["exclude[0]", "matches no cell"]),
    "exclude what another one excludes not": ("matrix: {gamma: [1, 2]}\nexclude:\n  - {gamma: 1}\n  - {gamma: 3}", 7, ["exclude[1]", "matches no cell"]),
    "exclude everything": ("exclude: [{drafter: prompt-lookup}]", 4, ["no cell is left to run"]),
    "exclude with an empty entry": ("exclude: [{}]", 4, ["would match every cell"]),
    "exclude that is a mapping": ("exclude: {drafter: none}", 4, ["exclude", "list"]),
    "exclude a thousand times": ("exclude: [" + "{gamma: 1}," * 1000 + "]", 4, ["1000 entries", "the maximum is 200"]),
}  # fmt: skip


@pytest.mark.parametrize("subject", TEXTS)
def test_recipe(subject: str, refused: Any, target: str, tmp_path: Path) -> None:
    text, line, words = TEXTS[subject]
    file = tmp_path / "recipe.yaml"
    file.write_text(BASE.replace("TARGET", target) + text, encoding="utf-8", newline="")
    refused(["run", str(file)], *([f"recipe.yaml:{line}: "] if line else ["recipe.yaml"]), *words)
    assert not (tmp_path / "here" / "runs").exists() and not (tmp_path / "here" / "hacked").exists()


#: The drafters of a recipe, and words of the sentence.
DRAFTERS: dict[str, list[str]] = {
    "[]": ["drafters", "needs at least 1 entry"],
    "{}": ["drafters", "list"],
    "prompt-lookup": ["drafters", "list"],
    "[3]": ["drafters[0]", "must be a name"],
    "[null]": ["drafters[0]", "must be a name"],
    "[[prompt-lookup]]": ["drafters[0]", "must be a name"],
    "['']": ["drafters[0]", "at least 1 character"],
    "[{}]": ["drafters[0] needs the key 'name'"],
    "[{name: 3}]": ["drafters[0].name", "valid string"],
    "[{name: [prompt-lookup]}]": ["drafters[0].name", "valid string"],
    "[{label: x}]": ["drafters[0] needs the key 'name'"],
    "[promt-lookup]": ["there is no drafter named 'promt-lookup'", "did you mean 'prompt-lookup'"],
    '["a\\nb"]': ["U+000A"],
    '[{name: prompt-lookup, label: "a\\tb"}]': ["drafters[0].label", "U+0009"],
    '[{name: prompt-lookup, label: "a\\x9bb"}]': ["U+009B"],
    '[{name: prompt-lookup, label: "a\\u2028b"}]': ["drafters[0].label", "U+2028"],
    "[{name: prompt-lookup, label: " + "l" * 300 + "}]": ["the label", "the maximum is 200"],
    "[{name: prompt-lookup, label: [x]}]": ["drafters[0].label", "valid string"],
    "[prompt-lookup, prompt-lookup]": ["drafters[1]", "the same as drafters[0]"],
    "[prompt-lookup, {name: prompt-lookup, label: again}]": ["drafters[1]", "the same as drafters[0]"],
    "[prompt-lookup, {name: prompt-lookup, gamma: 10}]": ["drafters[1]", "the same as drafters[0]"],
    "[{name: prompt-lookup, gama: 3}]": ["unknown key 'gama' in drafter 'prompt-lookup'", "did you mean 'gamma'"],
    "[{name: prompt-lookup, gamma: true}]": ["drafters[0].gamma", "not true"],
    "[{name: prompt-lookup, gamma: four}]": ["drafters[0].gamma", "valid integer"],
    "[{name: prompt-lookup, gamma: 2.5}]": ["drafters[0].gamma", "valid integer"],
    "[{name: prompt-lookup, gamma: [4]}]": ["drafters[0].gamma", "valid integer"],
    "[{name: prompt-lookup, gamma: -1}]": ["greater than or equal to 0"],
    "[{name: prompt-lookup, gamma: 200000000}]": ["less than or equal to 1024"],
    "[{name: prompt-lookup, gamma: 1" + "0" * 30 + "}]": ["less than or equal to 1024"],
    "[{name: prompt-lookup, max_ngram: 1000000000}]": ["less than or equal to 1024"],
    "[{name: prompt-lookup, min_ngram: 9}]": ["min_ngram (9) must not exceed max_ngram (3)"],
    "[{name: draft-model}]": ["needs the key 'model'"],
    "[{name: draft-model, model: 3}]": ["drafters[0].model", "valid string"],
    "[{name: draft-model, model: nowhere}]": ["there is no model named 'nowhere'"],
    "[{name: draft-model, model: ''}]": ["there is no model named ''"],
    "[{name: draft-model, model: /no/where}]": ["model directory /no/where does not exist"],
    "[{name: draft-model, model: ~nosuchuser/x}]": ["home directory"],
    "[{name: draft-model, model: TARGET, gamma: 2000}]": ["less than or equal to 1024"],
    "[{name: draft-model, model: TARGET, temperature: .inf}]": ["not a finite number"],
    "[{name: draft-model, model: TARGET, temperature: 'inf'}]": ["drafters[0].temperature", "finite number"],
    "[{name: draft-model, model: TARGET, policy: 3}]": ["drafters[0].policy"],
    "[{name: draft-model, model: TARGET, policy: nothing}]": ["drafters[0].policy"],
    "[{name: draft-model, model: TARGET, policy: {name: confidence, threshold: true}}]": ["threshold", "not true"],
    "[{name: draft-model, model: TARGET, policy: {name: confidence, threshold: nan}}]": ["threshold", "finite"],
    "[{name: draft-model-iid, model: TARGET, K: 4000}]": ["drafters[0].K", "less than or equal to 256"],
    "[{name: draft-model-iid, model: TARGET, K: 100, gamma: 100}]": ["10000 nodes", "the maximum is 4096"],
    "[{name: draft-model-tree, model: TARGET, branching: [1000, 1000, 1000]}]": ["1000 children", "the maximum is 256"],
    "[{name: draft-model-tree, model: TARGET, branching: [100, 100, 100]}]": ["1010100 nodes", "the maximum is 4096"],
    "[{name: draft-model-tree, model: TARGET, branching: [2, 0]}]": ["all n"],
    "[{name: draft-model-tree, model: TARGET, branching: [true]}]": ["branching[0]", "not true"],
    "[{name: draft-model-tree, model: TARGET, branching: 3}]": ["branching"],
    "[{name: draft-model-tree, model: TARGET, choices: [[1000000000]], siblings: top-k}]": ["ranks of siblings"],
    "[{name: draft-model-tree, model: TARGET, choices: [[]]}]": ["choices"],
    "[{name: draft-model-dynamic-tree, model: TARGET, depth: 1000000}]": ["less than or equal to 1024"],
    "[{name: draft-model-dynamic-tree, model: TARGET, top_k: 1000000}]": ["less than or equal to 256"],
    "[{name: draft-model-dynamic-tree, model: TARGET, nodes: 1000000}]": ["less than or equal to 4096"],
    "[{name: draft-model-dynamic-tree, model: TARGET, top_k: 200, depth: 1000}]": ["199800 expanded nodes"],
    "[{name: eagle, model: TARGET, gamma: 5000}]": ["less than or equal to 1024"],
    "[{name: medusa, model: TARGET, heads: 1000000000}]": ["less than or equal to 1024"],
    "[" + "{name: prompt-lookup}," * 2000 + "]": ["2000 entries", "the maximum is 1000"],
}  # fmt: skip


@pytest.mark.parametrize("drafters", DRAFTERS, ids=lambda text: text[:60])
def test_drafters(drafters: str, refused: Any, target: str, tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    text = BASE.replace("[prompt-lookup]", drafters).replace("TARGET", target)
    file.write_text(text, encoding="utf-8")
    refused(["run", str(file)], "recipe.yaml:2: ", *DRAFTERS[drafters])


FILES: dict[str, tuple[bytes, list[str]]] = {
    "empty": (b"", ["a recipe must be a mapping of keys to values"]),
    "blanks": (b"\n\n  \n", ["a recipe must be a mapping of keys to values"]),
    "a comment": (b"# nothing\n", ["a recipe must be a mapping"]),
    "a list": (b"- a\n- b\n", ["a recipe must be a mapping"]),
    "a text": (b"hello", ["a recipe must be a mapping"]),
    "a number": (b"3", ["a recipe must be a mapping"]),
    "null": (b"~", ["a recipe must be a mapping"]),
    "an empty mapping": (b"{}", ["needs the key 'target'"]),
    "UTF-16": ("target: x".encode("utf-16"), ["UTF-16", "save it as UTF-8"]),
    "Latin-1": (b"name: a\nquestion: \xe9t\xe9\n", ["not UTF-8 text (line 2)"]),
    "binary": (bytes(range(256)), ["not UTF-8 text"]),
    "larger than a megabyte": (b"#" * 1_100_000, ["1100000 bytes", "the maximum is 1048576"]),
    "a byte order mark and a bad key": (b"\xef\xbb\xbftarget: x\ndrafter: y\n", ["recipe.yaml"]),
}


@pytest.mark.parametrize("subject", FILES)
def test_files(subject: str, refused: Any, tmp_path: Path) -> None:
    content, words = FILES[subject]
    (tmp_path / "recipe.yaml").write_bytes(content)
    refused(["run", str(tmp_path / "recipe.yaml")], "recipe.yaml", *words)


def test_invalid_recipe_paths(refused: Any, tmp_path: Path) -> None:
    (tmp_path / "directory.yaml").mkdir()
    os.mkfifo(tmp_path / "pipe.yaml")
    (tmp_path / "loop.yaml").symlink_to(tmp_path / "loop.yaml")
    refused(["run", str(tmp_path / "directory.yaml")], "directory.yaml is a directory")
    refused(["run", str(tmp_path / "pipe.yaml")], "pipe.yaml: it is a device, a pipe or a socket")
    refused(["run", "/dev/zero"], "it is a device, a pipe or a socket")
    refused(["run", str(tmp_path / "loop.yaml")], "is not a valid path", "symbolic links")
    refused(["run", str(tmp_path / "none.yaml")], "does not exist")
    refused(["run", "/tmp/" + "x" * 5000], "File name too long")
    refused(["run", "~nosuchuser/x.yaml"], "home directory")
    refused(["run", "a\0b"], "is not a valid path")
    refused(["run", "nothing\udcff.yaml"], "does not exist")
    refused(["run", ""], "recipe")
    refused(["run", "smollm2-gama"], "did you mean 'smollm2-gamma'")


def test_name_with_escape_codes_is_shown_without_them(refused: Any, tmp_path: Path) -> None:
    file = tmp_path / "a\x1b[31m.yaml"
    file.write_text("target: [", encoding="utf-8")
    refused(["run", str(file)], "a\\x1b[31m.yaml:", ": this is not YAML")


def test_harmless_yaml_is_fast(tmp_path: Path, target: str) -> None:
    file = tmp_path / "recipe.yaml"
    categories = "[" + ", ".join(f"c{i}" for i in range(20_000)) + "]"
    file.write_text(BASE.replace("TARGET", target) + f"prompts: {{categories: {categories}}}", encoding="utf-8")
    start = time.process_time()
    assert len(load_recipe(file).prompts.categories) == 20_000
    assert time.process_time() - start < 5, "reading is not to grow with the square of what is read"


def test_yaml_features_are_supported(tmp_path: Path, target: str) -> None:
    file = tmp_path / "recipe.yaml"
    text = (
        "\ufefftarget: &t TARGET\nname: 2024-13-45\n"
        "drafters:\n  - &d {name: prompt-lookup, gamma: 3, label: 'a | b'}\n  - {<<: *d, gamma: 0x10, label: c}\n"
        "verifiers: [!!str token]\nsampling: {temperature: 5e-1}\nmatrix: {target: [*t]}\n"
    )
    file.write_text(text.replace("TARGET", target), encoding="utf-8")
    recipe = load_recipe(file)
    assert (recipe.name, recipe.sampling.temperature) == ("2024-13-45", 0.5)
    assert [d.config["gamma"] for d in recipe.drafters] == [3, 16]
    assert [c.drafter.label for c in expand(recipe).cells] == ["none", "a | b", "c"]


def test_override_does_not_change_alias(tmp_path: Path, target: str) -> None:
    file = tmp_path / "recipe.yaml"
    text = f"target: {target}\ndrafters: &d [{{name: prompt-lookup}}]\nverifiers: [token]\nmatrix: {{gamma: [1]}}\n"
    file.write_text(text + "exclude: []\nquestion: &q x\ndescription: *q\n", encoding="utf-8")
    recipe = load_recipe(file, ["question=y"])
    assert (recipe.question, recipe.description) == ("y", "x")


@pytest.mark.parametrize(
    "value, words",
    [
        (float("nan"), "finite"),
        ({1: 2}, "keys must be texts"),
        ({"a": object()}, "not a text, number"),
        ("a\x1bb", "U+001B"),
        ("\ud800", "U+D800"),
        ({1, 2}, "not a text, number"),
        ([[1] * 300] * 300, "the maximum is 30000"),
    ],
)
def test_overrides_from_python(value: Any, words: str, tmp_path: Path, target: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(BASE.replace("TARGET", target), encoding="utf-8")
    with pytest.raises(UsageError, match=words.replace("+", r"\+")):
        load_recipe(file, {"matrix.gamma": value})


def test_override_inside_itself(tmp_path: Path, target: str) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(BASE.replace("TARGET", target), encoding="utf-8")
    inside: list[Any] = []
    inside.append(inside)
    with pytest.raises(UsageError, match="nested too deeply"):
        load_recipe(file, {"matrix.gamma": inside})
