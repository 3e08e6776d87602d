"""Language of the code: docstring openings, prose, names and messages, with a reason for each denied word."""

from __future__ import annotations

import ast
import gc
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
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
    **dict.fromkeys(
        ("found", "made", "held", "meant", "wanted", "learnt", "judged", "gone", "got", "had", "given"),
        "a participle: name the value",
    ),
    **dict.fromkeys(
        ("again", "ahead", "along", "alone", "beside", "here", "together", "several"),
        "an adverb or a preposition: name the value",
    ),
    **dict.fromkeys(("most", "least", "what"), "not a noun for one thing: name the value"),
    "ask": "code does not speak: request",
    "judge": "verify",
}

#: Further ones in the kernel, which is read most.
KERNEL = ("framework/contracts", "framework/engine", "framework/lm", "framework/models", "framework/api")
KERNEL += ("drafters", "verifiers")
KERNEL_NAMES = NAMES | dict.fromkeys(
    ("whole", "where", "one", "words", "fitted"), "not a noun for one thing: name the value"
)

#: Beginnings of the names of tests: a test is called test_<subject>_<verb>_<object>.
TEST_NAMES = re.compile(
    r"test_(what|which|how|whether|where|why|who|that|nothing|nobody|a|an|the)_"
    r"|_(says?|said|tells?|told|asks?|asked|knows?|laws?|elder|youngest|begun)(_|$)"
    r"|(?<!there)_(is|are)_no_(?!longer|more)"
)

#: Words in docstrings and comments.
PROSE = re.compile(
    r"\b(says?|said|tells?|told|asks?|asked|hears?|heard)\b"  # code does not speak
    r"|(?<!there )\b(is|are) no (?!longer|more|such)|\bthere (is|are) none\b|\bthat there (is|are)\b"  # negate the verb
    r"|(?<!Zipf's )\blaws?\b|\b(elder|youngest|lineage|begun)\b|\b(nobody|so many|goes on)\b",
    re.IGNORECASE,
)
QUOTED = re.compile(r"``[^`]*``|`[^`]*`|\"[^\"]*\"")

#: Phrases in messages: of exceptions, `print` and the help of the command line.
PHRASES = {
    r"\bis no (?!longer|more)": 'negate the verb: "is not a ..."',
    r"\bthere is none\b": 'negate the verb: "does not exist"',
    r"\bwithout a word\b": "say what happened",
    r"\bthe most is\b": "the maximum is",
    r"\b(says?|said|tells?|told|asked for)\b": "code does not speak",
}
#: Callables whose string arguments are messages.
SPEAKERS = {"print", "add_argument", "error", "exit", "warning", "info", "warn", "option", "Field", "ArgumentParser"}
#: Nodes that bind names, hold docstrings or print messages.
NODES = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef, ast.arg, ast.Name, ast.Call, ast.Raise)
#: Rewritten elsewhere.
UNCHECKED = {"tests/test_language.py"}


def sources() -> list[Path]:
    return [
        path
        for part in PARTS
        for path in sorted((ROOT / part).rglob("*.py"))
        if not {"build", ".venv", "__pycache__", "templates"} & set(path.relative_to(ROOT).parts)
        and path.relative_to(ROOT).as_posix() not in UNCHECKED
    ]


@dataclass(frozen=True)
class Source:
    """A file, read and parsed once for all rules."""

    path: Path
    text: str
    nodes: list[ast.AST]

    @classmethod
    def of(cls, path: Path) -> Source:
        text = path.read_text(encoding="utf-8")
        return cls(path, text, [node for node in ast.walk(ast.parse(text)) if isinstance(node, NODES)])

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def openings(source: Source) -> Iterator[str]:
    """Docstrings that open with a word of `OPENINGS`."""
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            docstring = ast.get_docstring(node)
            if docstring and re.split(r"\W", docstring, maxsplit=1)[0] in OPENINGS:
                yield f"{source.at(node)}: {docstring.splitlines()[0][:80]}"


def names(source: Source) -> Iterator[str]:
    """Bindings called by a word of `NAMES`, in the kernel of `KERNEL_NAMES`."""
    file = source.path.relative_to(ROOT)
    words = KERNEL_NAMES if file.as_posix().startswith(tuple(f"{folder}/" for folder in KERNEL)) else NAMES
    if file.stem in words:
        yield f"{file}: {words[file.stem]}"
    for node in source.nodes:
        bound = None
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            bound = node.name
        elif isinstance(node, ast.arg):
            bound = node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            bound = node.id
        if bound in words:
            yield f"{source.at(node)}: {bound}: {words[bound]}"


def unclear_tests(source: Source) -> Iterator[str]:
    """Names of tests that match `TEST_NAMES`."""
    for node in source.nodes:
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and TEST_NAMES.search(node.name):
            yield f"{source.at(node)}: {node.name}: call it test_<subject>_<verb>_<object>"


def prose(source: Source) -> Iterator[str]:
    """Lines of docstrings and comments that match `PROSE`, outside of quotes."""
    lines = source.text.replace('"""', "").splitlines() if PROSE.search(source.text) else ()
    if not any(PROSE.search(QUOTED.sub("", line)) for line in lines):
        return  # tokenizing takes seconds in all
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT or (token.type == tokenize.STRING and token.string.startswith('"""')):
            for i, line in enumerate(token.string.removeprefix('"""').removesuffix('"""').splitlines()):
                if match := PROSE.search(QUOTED.sub("", line)):
                    place = f"{source.path.relative_to(ROOT)}:{token.start[0] + i}"
                    yield f"{place}: {match[0]!r} in {line.strip()[:80]!r}"


def messages(source: Source) -> Iterator[str]:
    """Messages that hold a phrase of `PHRASES`."""
    for node in source.nodes:
        name = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        text = node.exc if isinstance(node, ast.Raise) else node if name in SPEAKERS else None
        if text is not None:
            for part in ast.walk(text):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    for phrase, reason in PHRASES.items():
                        if re.search(phrase, part.value):
                            yield f"{source.at(part)}: {part.value[:80]!r}: {reason}"


RULES = (openings, names, unclear_tests, prose, messages)


def test_words() -> None:
    gc.disable()  # syntax trees have no cycles, and looking for some takes more time than the rules
    try:
        files = map(Source.of, sources())
        places = [place for source in files for rule in RULES for place in rule(source)]
    finally:
        gc.enable()
    assert not places, "\n".join(places)


def test_denied_words_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    path = tmp_path / "one.py"
    path.write_text(
        '"""What it is."""\n\n\ndef asked(told):  # says no\n    raise ValueError(f"{told} is no number")\n\n\n'
        'def test_what_it_is():\n    print("nothing is told")\n',
        encoding="utf-8",
    )
    source = Source.of(path)
    assert [len(list(rule(source))) for rule in RULES] == [1, 2, 1, 1, 2]
