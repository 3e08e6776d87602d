"""Prompts in all formats from all sources, and their errors."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdraft.framework.api.cell_runner import Conversation
from crossdraft.framework.bench.cells.conversations import prepare_conversations
from crossdraft.framework.contracts.models import LoadedModel
from crossdraft.framework.errors import UnknownNameError, UsageError
from crossdraft.framework.models.chat import encode
from crossdraft.framework.recipe.prompts import Prompt, load_prompts


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows), encoding="utf-8")
    return str(path)


def error(source: str, **options: Any) -> str:
    with pytest.raises(UsageError) as caught:
        load_prompts(source, **options)
    return str(caught.value)


# -- sources -------------------------------------------------------------------------------------------------


def test_builtin_is_stratified() -> None:
    prompts = load_prompts("builtin")
    assert len(prompts) == 96
    assert [p.index for p in prompts] == list(range(96))
    assert [p.question_id for p in prompts] == list(range(1, 97))
    assert set(Counter(p.category for p in load_prompts("builtin", limit=12)).values()) == {2}


def test_categories_keep_random_streams() -> None:
    all_items = {p.question_id: p for p in load_prompts("builtin")}
    chosen = load_prompts("builtin", categories=["rag", "qa"], limit=3)
    assert [p.category for p in chosen] == ["qa", "rag", "qa"]
    assert all(all_items[p.question_id].stream(1) == p.stream(1) for p in chosen)
    streams = [p.stream(turn) for p in all_items.values() for turn in range(16)]
    assert len(set(streams)) == len(streams)


def test_spec_bench_rows(tmp_path: Path) -> None:
    rows = [
        {"question_id": 81, "category": "writing", "turns": ["a", "b"], "reference": ["x", "y"]},
        {"turns": ["line\u2028separator"]},
    ]
    first, second = load_prompts(write(tmp_path / "p.jsonl", *rows))
    assert first == Prompt(81, "writing", ("a", "b"), ("x", "y"), 0)
    assert second == Prompt(2, "all", ("line\u2028separator",), None, 1)


def test_gsm8k_and_humaneval_rows(tmp_path: Path) -> None:
    rows = [
        {"question": "2 + 2?", "answer": "#### 4"},
        "",
        {"task_id": "HumanEval/0", "prompt": "def f():", "canonical_solution": "  pass"},
    ]
    gsm, human = load_prompts(write(tmp_path / "p.jsonl", *rows))
    assert gsm == Prompt(1, "question", ("2 + 2?",), ("#### 4",), 0)
    assert human == Prompt("HumanEval/0", "completion", ("def f():",), ("  pass",), 1)


def test_directory_read_by_datasets(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    parquet.write_table(pa.table({"question": ["a", "b"], "answer": ["1", "2"]}), tmp_path / "test.parquet")
    assert [p.turns for p in load_prompts(str(tmp_path))] == [("a",), ("b",)]
    assert [p.turns for p in load_prompts(str(tmp_path), column="answer", limit=1)] == [("1",)]
    assert error(str(tmp_path), column="text") == f"{tmp_path}, row 1: no column 'text'; its columns: question, answer"
    assert error(str(tmp_path), split="dev") == f"the dataset {tmp_path} has no split 'dev'; choose one of: test"
    write(tmp_path / "train.jsonl", {"question": "c"})
    (tmp_path / "test.parquet").rename(tmp_path / "sub.bin")
    write(tmp_path / "test.jsonl", {"question": "d"})
    assert error(str(tmp_path)) == f"the dataset {tmp_path} has several splits; choose one of: train, test"
    assert load_prompts(str(tmp_path), split="test")[0].turns == ("d",)


def test_data_set_saved_to_disk(tmp_path: Path) -> None:
    import datasets

    datasets.Dataset.from_dict({"text": ["a", "b"]}).save_to_disk(tmp_path / "set")
    assert [p.turns for p in load_prompts(str(tmp_path / "set"), column="text")] == [("a",), ("b",)]


def test_data_set_of_hub(monkeypatch: Any) -> None:
    import datasets

    calls = []

    def load_dataset(*args: Any, **options: Any) -> Any:
        calls.append((args, options))
        return {"train": [], "test": [{"question": "a"}, {"question": "b"}]}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [p.turns for p in load_prompts("hf:openai/gsm8k:main?split=test&column=question")] == [
        ("a",),
        ("b",),
    ]
    assert calls == [(("openai/gsm8k", "main"), {"streaming": False})]
    assert load_prompts("hf:openai/gsm8k", split="test", limit=1)[0].turns == ("a",)
    assert error("hf:openai/gsm8k") == "the dataset hf:openai/gsm8k has several splits; choose one of: train, test"
    assert error("hf:a/b?spilt=x") == "hf:a/b?spilt=x: unknown option 'spilt'; only split and column are supported"
    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: 1 / 0)
    assert error("hf:a/b") == "the dataset hf:a/b is not readable: ZeroDivisionError: division by zero"


def test_registered_sources(tmp_path: Path, install: Any) -> None:
    path = Path(write(tmp_path / "p.jsonl", {"prompt": "a"}))
    install("prompts", ("file", path), ("function", lambda: [{"prompt": "b"}]), ("none", lambda: []))
    assert load_prompts("file")[0].turns == ("a",)
    assert load_prompts("function")[0].turns == ("b",)
    assert error("none") == "none has no prompts; give a source with at least one"


# -- errors --------------------------------------------------------------------------------------------------


def test_missing_sources(tmp_path: Path) -> None:
    assert error("no/such.jsonl").startswith("prompt file no/such.jsonl does not exist; check the path")
    with pytest.raises(UnknownNameError, match="no prompt source named 'bulitin'; did you mean 'builtin'"):
        load_prompts("bulitin")
    path = write(tmp_path / "p.jsonl", {"prompt": "a"})
    assert error(path, column="x") == f"{path} is not a dataset; remove split and column"


@pytest.mark.parametrize(
    "row, sentence",
    [
        ('{"turns": [', "not JSON: Expecting value at column 12"),
        ("[1]", "a prompt must be a JSON object, not list"),
        (
            '{"text": "a", "id": 1}',
            "a prompt needs one of the keys turns, question, prompt, conversations, messages; it has: text, id",
        ),
        ('{"turns": []}', "'turns' must be a list of texts and must not be empty"),
        ('{"turns": ["a", " "]}', "'turns' must be a list of texts and must not be empty"),
        ('{"question": 3}', "'question' must be a text and must not be empty"),
        (json.dumps({"turns": ["a"] * 17}), "17 turns; the maximum is 16"),
        ('{"prompt": "a", "constraint": {"regx": "a"}}', "constraint.regx: is unknown; did you mean 'regex'?"),
        (
            '{"prompt": "a", "constraint": "[0-9]"}',
            "constraint='[0-9]' is not a constraint; give a mapping such as {{'regex': '[0-9]+'}}, with json_schema, "
            "regex, grammar or choice",
        ),
        ('{"question_id": 1, "prompt": "a"}', "question_id 1 was already used in {path}:1"),
    ],
)
def test_bad_rows(tmp_path: Path, row: str, sentence: str) -> None:
    path = write(tmp_path / "p.jsonl", {"question_id": 1, "turns": ["fine"]}, row)
    assert error(path) == f"{path}:2: {sentence.format(path=path)}"


def test_bad_files(tmp_path: Path) -> None:
    path = write(tmp_path / "p.jsonl", "", "  ")
    assert error(path) == f"{path} is empty; it needs one JSON object per line"
    Path(path).write_bytes(b'{"prompt": "\xff"}')
    assert error(path) == f"cannot read {path}: it is not UTF-8 text (line 1)"
    write(tmp_path / "p.jsonl", {"category": "math", "prompt": "a"})
    assert error(path, categories=["maths"]) == f"{path} has no category 'maths'; did you mean 'math'? It has: math."


# -- conversations -------------------------------------------------------------------------------------------


def test_encode(tokenizers: Any) -> None:
    chat, plain = tokenizers
    assert chat.decode(encode(chat, ["w5"])) == "user w5 assistant"
    assert chat.decode(encode(chat, ["w5", "w6"], ["w7"])) == "user w5 assistant w7 user w6 assistant"
    assert plain.decode(encode(plain, ["w5", "w6"], ["w7"])) == "w5 w7 w6"


def loaded(tokenizer: Any, context: int | None = None) -> LoadedModel:
    return LoadedModel(None, tokenizer, "toy", "", "", (), context)  # type: ignore[arg-type]


@given(st.lists(st.lists(st.integers(5, 80), max_size=40), min_size=2, max_size=2))
def test_answer_never_takes_more_room_than_was_kept(tokenizers: Any, answers: list[list[int]]) -> None:
    """Responses that encode to up to 40 tokens although 8 were generated."""
    texts = [" ".join(f"w{i}" for i in answer) for answer in answers]
    for tokenizer in tokenizers:
        prompt = Prompt("x", "c", ("w5 w6", "w7", "w8"))
        (conversation,) = prepare_conversations([prompt], loaded(tokenizer), 8)
        for turn in range(3):
            tokens = conversation.encode(tokenizer, texts[:turn])
            assert len(tokens) <= conversation.prompt_lens[turn]


def test_answer_that_fits_is_whole(tokenizers: Any) -> None:
    chat, _ = tokenizers
    conversation = Conversation(Prompt("x", "c", ("w5", "w6")), (3, 30))
    assert chat.decode(conversation.encode(chat, ["w7 w8"])) == "user w5 assistant w7 w8 user w6 assistant"


def test_prompts_that_do_not_fit(tokenizers: Any) -> None:
    chat, plain = tokenizers
    prompt = Prompt("long", "c", ("w5 w6 w7 w8",))
    with pytest.raises(UsageError, match=r"^prompt 'long' has 6 tokens, but the context length of toy is 6; shorten"):
        prepare_conversations([prompt], loaded(chat, 6), 8)
    prepare_conversations([prompt], loaded(chat, 7), 8)
    two = Prompt(3, "c", ("w5", "w6"))
    with pytest.raises(
        UsageError,
        match=r"^prompt 3, turn 2 has up to 30 tokens with the answers before it, but the context length of toy",
    ):
        prepare_conversations([two], loaded(chat, 20), 8)
    with pytest.raises(UsageError, match=r"^prompt 'e' has no tokens"):
        prepare_conversations([Prompt("e", "c", (" ",))], loaded(plain), 8)
