"""Nothing of the project reads a pickle, which can run code: every call that could is looked for, in tests too."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("framework", "drafters", "verifiers", "recipes", "plugins", "benchmarks", "tests")

#: Modules whose readers run code.
MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
#: Names out of them that read nothing.
SAFE = {"dumps", "dump", "UnpicklingError", "PicklingError", "Pickler", "PickleError"}
#: Readers of other modules that unpickle, and those that run code by design.
READERS = {"read_pickle", "unsafe_load", "full_load", "hub_load", "load_state", "PackageImporter"}

#: Keywords of calls that decide.
OPTIONS = ("weights_only", "allow_pickle", "Loader", "gguf_file", "use_safetensors")

#: Words without which a file holds none of these: parsing all files takes seconds.
WORDS = re.compile(rf"\b({'|'.join([*MODULES, *READERS, *OPTIONS, 'load', 'from_pretrained'])})\b")

#: Allowed places, by file: errors are pickled between crossdraft's own processes.
ALLOWED = {("tests/test_plugins.py", "pickle.loads")}


def offences(source: str) -> Iterator[str]:
    """Possible unpickling in a file: the dotted name of each call, import or option."""
    for node in ast.walk(ast.parse(source)) if WORDS.search(source) else ():
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names if alias.name not in SAFE)
        elif isinstance(node, ast.ImportFrom) and node.module == "torch":
            yield from ("torch.load by another name" for alias in node.names if alias.name == "load")
        elif isinstance(node, ast.Import):
            yield from (
                f"{alias.name} as {alias.asname}" for alias in node.names if alias.name in MODULES and alias.asname
            )
        elif isinstance(node, ast.Attribute):
            holder = node.value.id if isinstance(node.value, ast.Name) else ""
            if (holder in MODULES and node.attr not in SAFE) or node.attr in READERS:
                yield f"{holder}.{node.attr}"
        elif isinstance(node, ast.Call):
            yield from _call(node)


def _call(node: ast.Call) -> Iterator[str]:
    options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg in OPTIONS}
    last = getattr(node.func, "attr", "")
    if not options and last not in ("load", "from_pretrained"):
        return
    name = ast.unparse(node.func)
    if name == "torch.load" and options.get("weights_only") != "True":
        yield f"{name} without weights_only=True"
    if options.get("weights_only", "True") != "True":
        yield f"{name} with weights_only={options['weights_only']}"
    if options.get("allow_pickle", "False") != "False":
        yield f"{name} with allow_pickle={options['allow_pickle']}"
    if name == "yaml.load" and options.get("Loader") not in ("yaml.SafeLoader", "yaml.CSafeLoader"):
        yield "yaml.load without a safe Loader"
    model = name.endswith(".from_pretrained") and "Auto" in name and "Model" in name
    if model and "gguf_file" not in options and options.get("use_safetensors") != "True":
        yield f"{name} without use_safetensors=True"


def files() -> list[Path]:
    results = [*ROOT.glob("*.py"), *(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))]
    return [file for file in results if "build" not in file.parts]


def test_no_unpickling() -> None:
    results = {
        (file.relative_to(ROOT).as_posix(), offence)
        for file in files()
        for offence in offences(file.read_text(encoding="utf-8"))
        # A test may read what it has just written itself, with an AutoModel.
        if not ("tests" in file.relative_to(ROOT).parts and offence.endswith("without use_safetensors=True"))
    }
    assert results == ALLOWED
    assert len(files()) > 200  # the walk has seen the project


@pytest.mark.parametrize(
    "source",
    [
        "import pickle\npickle.load(f)",
        "from pickle import loads",
        "import pickle as p",
        "import torch\ntorch.load(f)",
        "import torch\ntorch.load(f, weights_only=False)",
        "import torch\ntorch.load(f, weights_only=not strict)",
        "from torch import load\nload(f)",
        "import numpy as np\nnp.load(f, allow_pickle=True)",
        "import joblib\njoblib.load(f)",
        "import pandas as pd\npd.read_pickle(f)",
        "import yaml\nyaml.load(f, Loader=yaml.Loader)",
        "import yaml\nyaml.unsafe_load(f)",
        "accelerator.load_state(d)",
        "AutoModelForCausalLM.from_pretrained(d)",
        "AutoModel.from_pretrained(d, use_safetensors=False)",
    ],
)
def test_walk_finds_each_kind(source: str) -> None:
    assert list(offences(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.load(f, weights_only=True)",
        "import json\njson.load(f)",
        "import numpy as np\nnp.load(f)",
        "import yaml\nyaml.load(f, Loader=yaml.SafeLoader)",
        "import pickle\ntry: ...\nexcept pickle.UnpicklingError: ...",
        "AutoModelForCausalLM.from_pretrained(d, use_safetensors=True)",
        "AutoTokenizer.from_pretrained(d)",
    ],
)
def test_walk_lets_readers_of_data_be(source: str) -> None:
    assert not list(offences(source))
