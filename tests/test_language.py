"""Language of the code: docstring openings, names and messages. The words that are not used, each with its reason."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PARTS = ("framework", "drafters", "verifiers", "plugins", "benchmarks", "tests")

#: A docstring opens with a noun phrase or an imperative verb.
OPENINGS = {"What", "Which", "How", "Whether", "Where", "Why", "Who", "Of", "Does", "Do", "Did", "Is", "Are", "Has"}

#: Names of files, classes, functions, parameters and variables.
NAMES = {
    "asked": "a participle: name the request or the argument",
    "told": "a participle: name the value",
    "begun": "a participle: `started`, or the noun",
    "forced": "a participle: teacher-forced scoring has names of its own",
    "elder": "earlier sibling",
    "lineage": "ancestor mask",
    "finish": "finish_reason",
    "rounds": "step is the word",
    "drawn_by": "kind",
    "said": "code does not speak: output, message",
    "heard": "code does not speak: events",
    "law": "probs, or distribution",
    "laws": "distributions",
    "mine": "own, or the noun",
    "youngest": "last sibling",
    "goes_on": "should_continue, or is_running",
    "drafts_along": "response_drafts",
}

#: Phrases in messages of exceptions.
PHRASES = {
    r"\bis no (?!longer|more)": 'negate the verb: "is not a ..."',
    r"\bthere is none\b": 'negate the verb: "does not exist"',
    r"\bwithout a word\b": "say what happened",
    r"\bthe most is\b": "the maximum is",
    r"\b(tells|told|asked for)\b": "code does not speak",
}


def sources() -> list[Path]:
    return [
        path
        for part in PARTS
        for path in sorted((ROOT / part).rglob("*.py"))
        if not {"build", ".venv", "__pycache__", "templates"} & set(path.relative_to(ROOT).parts)
    ]


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def at(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def openings(path: Path) -> Iterator[str]:
    """Docstrings that open with a word of `OPENINGS`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and re.split(r"\W", docstring, maxsplit=1)[0] in OPENINGS:
                yield f"{at(path, node)}: {docstring.splitlines()[0][:80]}"


def names(path: Path) -> Iterator[str]:
    """Bindings called by a word of `NAMES`."""
    if path.stem in NAMES:
        yield f"{path.relative_to(ROOT)}: {NAMES[path.stem]}"
    for node in ast.walk(tree_of(path)):
        bound = None
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            bound = node.name
        elif isinstance(node, ast.arg):
            bound = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound = node.id
        if bound in NAMES:
            yield f"{at(path, node)}: {bound}: {NAMES[bound]}"


def messages(path: Path) -> Iterator[str]:
    """Texts of raised exceptions that hold a phrase of `PHRASES`."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            for part in ast.walk(node.exc):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    for phrase, reason in PHRASES.items():
                        if re.search(phrase, part.value):
                            yield f"{at(path, part)}: {part.value[:80]!r}: {reason}"


@pytest.mark.parametrize("rule", [openings, names, messages])
def test_words(rule) -> None:
    places = [line for path in sources() for line in rule(path)]
    assert not places, "\n".join(places[:40])


def test_word_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "one.py"
    path.write_text(
        '"""What it is."""\n\n\ndef asked(told):\n    raise ValueError(f"{told} is no number")\n', encoding="utf-8"
    )
    assert len(list(openings(path))) == 1 and len(list(names(path))) == 2 and len(list(messages(path))) == 1
