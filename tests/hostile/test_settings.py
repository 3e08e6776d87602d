"""``--set`` and other arguments of ``crossdraft run``: errors contain the argument."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

RECIPE = """\
target: TARGET
max_new_tokens: 8
drafters: [prompt-lookup, {name: draft-model, model: TARGET}]
verifiers: [token]
"""

SETTINGS: dict[str, list[str]] = {
    # the argument itself
    "limit": ["write --set key=value"],
    "=3": ["write --set key=value"],
    "": ["write --set key=value"],
    "a..b=1": ["write --set key=value"],
    ".limit=1": ["write --set key=value"],
    "li\0mit=1": ["U+0000"],
    "li\x1b[31mmit=1": ["U+001B"],
    "\ud800=1": ["U+D800"],
    ".".join("abc" * 40) + "=1": ["120 parts", "the maximum is 64"],
    # the value as YAML
    "limit=[": ["the value is not YAML"],
    "limit='": ["the value is not YAML"],
    "limit=\t- x": ["the value is not YAML"],
    "limit=@": ["the value is not YAML"],
    "limit=*x": ["the value is not YAML", "undefined alias 'x'"],
    "limit=&a [*a]": ["is used inside of its own anchor"],
    "limit=---\n1\n---\n2": ["found another document"],
    "limit=\0": ["U+0000"],
    'limit="\\0"': ["U+0000"],
    'limit="\\ud800"': ["--set limit="],
    "limit=\ud800": ["U+D800"],
    "limit=\x1b[31m": ["U+001B"],
    "limit=" + "[" * 3000: ["nested too deeply"],
    "limit=" + "9" * 5000: ["5000 digits"],
    "limit=0x_": ["'0x_'"],
    "limit=010": ["ambiguous number"],
    "limit=!!int abc": ["'abc'"],
    "limit=!!python/object:os.system {}": ["the tag '!!python/object:os.system'"],
    "limit=2024-13-45": ["valid integer", "'2024-13-45'"],
    "limit=1000000000000000000000000000000": ["less than or equal to 50000", "every cell decodes"],
    "limit=10^30": ["valid integer"],
    "limit=.inf": ["not a finite number"],
    "limit=true": ["valid integer, not true"],
    "limit=[1]": ["valid integer"],
    "limit={a: 1}": ["valid integer"],
    "limit={[a]: 1}": ["a list cannot be a key"],
    "limit={{a: 1}: 1}": ["a mapping cannot be a key"],
    "limit={1: 1}": ["the key 1 is not a text"],
    "limit={a: 1, a: 2}": ["the key 'a' is given twice"],
    "limit=0": ["greater than or equal to 1"],
    "limit=-3": ["greater than or equal to 1"],
    # places
    "limt=3": ["unknown key 'limt'", "did you mean 'limit'"],
    "1=3": ["unknown key '1'"],
    "limit.x=3": ["limit", "valid integer"],
    "max_new_tokens.x=3": ["max_new_tokens is 8, which has no key 'x'"],
    "drafters.9.gamma=3": ["drafters is a list", "9 is not one of 0 to 1"],
    "drafters.-1.gamma=3": ["drafters is a list", "'-1' is not one of 0 to 1"],
    "drafters.x.gamma=3": ["drafters is a list", "'x' is not one of 0 to 1"],
    "drafters." + "9" * 5000 + ".gamma=3": ["is not one of 0 to 1"],
    "drafters.\u0663.gamma=3": ["is not one of 0 to 1"],
    "drafters.0.gama=3": ["unknown key 'gama' in drafter 'prompt-lookup'", "did you mean 'gamma'"],
    "drafters.0.gamma=true": ["drafters[0].gamma", "not true"],
    "drafters.0.gamma=200000000": ["less than or equal to 1024", "the work of every step"],
    "drafters.0.gamma.x=1": ["drafters[0].gamma", "valid integer"],
    "drafters.1.temperature=.nan": ["not a finite number"],
    "drafters.1.model=nowhere": ["there is no model named 'nowhere'"],
    "drafters.1.model=" + "m" * 5000: ["File name too long"],
    "drafters.1.model=~nosuchuser/x": ["home directory"],
    "drafters=": ["drafters", "list"],
    "drafters=[]": ["at least 1 entry"],
    "drafters.0=": ["drafters[0]", "must be a name"],
    "drafters.0.name.x=3": ["drafters[0].name", "valid string"],
    "matrix.gamma=": ["matrix.gamma"],
    "matrix.gamma=[]": ["is an empty list"],
    "matrix.gamma=[1, x]": ["matrix.gamma[1]", "valid integer"],
    "matrix.0=[1]": ["unknown key '0' in matrix"],
    "matrix=3": ["matrix", "mapping"],
    "matrix.dtype=[int8]": ["unknown dtype 'int8'"],
    "matrix.target=[nowhere]": ["there is no model named 'nowhere'"],
    "exclude=[{drafter: {name: draft-model}}]": ["exclude[0].drafter", "must be a name or a list"],
    "exclude=[{gamma: 99}]": ["matches no cell"],
    "target=": ["target", "valid string"],
    "target=''": ["target", "at least 1 character"],
    "target=nowhere": ["there is no model named 'nowhere'"],
    "target=/no/where": ["model directory /no/where does not exist"],
    "target=./none": ["model directory ./none does not exist"],
    "target=~nosuchuser/x": ["home directory"],
    "target=" + "t" * 5000: ["File name too long"],
    "target=a/b/c": ["model directory a/b/c does not exist"],
    'target="a\\tb"': ["target", "U+0009"],
    "prompts=none.jsonl": ["prompt file none.jsonl does not exist"],
    "prompts=bultin": ["did you mean 'builtin'"],
    "prompts=~nosuchuser/p.jsonl": ["home directory"],
    "prompts=" + "p" * 5000: ["File name too long"],
    "prompts={name: builtin, path: x}": ["give either the name of the prompts or the path"],
    "prompts={name: builtin, limit: true}": ["prompts.limit", "not true"],
    "prompts={nane: builtin}": ["unknown key 'nane' in prompts", "did you mean 'name'"],
    "sampling.temperature=inf": ["finite number"],
    "sampling.temprature=1": ["unknown key 'temprature' in sampling"],
    "seed=-1": ["greater than or equal to 0"],
    "seed=1.5": ["valid integer"],
    "batch_size=0": ["greater than or equal to 1"],
    "batch_size=99999999": ["less than or equal to 65536"],
    "name=a/b": ["pattern"],
    "device=3": ["device: must be a device, or a mapping of modules to devices, not 3"],
}  # fmt: skip


@pytest.fixture
def recipe(tmp_path: Path, target: str) -> str:
    file = tmp_path / "recipe.yaml"
    file.write_text(RECIPE.replace("TARGET", target), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("setting", list(SETTINGS), ids=lambda s: ascii(s)[1:40])
def test_setting(setting: str, refused: Any, recipe: str) -> None:
    outputs = refused(["run", recipe, "--set", setting], *SETTINGS[setting])
    if setting != "drafters.0.name.x=3":  # what is wrong with the name stands in the file
        assert "--set " in outputs, "the argument is what was wrong"


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--limit", "0"], "limit"),
        (["--limit", "-1"], "limit"),
        (["--limit", "x"], "--limit"),
        (["--limit", "1.5"], "--limit"),
        (["--limit", "1" + "0" * 30], "less than or equal to 50000"),
        (["--nothing"], "--nothing"),
        (["more"], "more"),
    ],
)
def test_argument(arguments: list[str], words: str, refused: Any, recipe: str) -> None:
    refused(["run", recipe, *arguments], words)


def test_only_five_of_many_mistakes_are_reported(refused: Any, recipe: str) -> None:
    keys = [part for i in range(300) for part in ("--set", f"key{i}=1")]
    outputs = refused(["run", recipe, *keys], "unknown key 'key0'", "unknown key 'key4'", "... and 295 more")
    assert "key5" not in outputs
