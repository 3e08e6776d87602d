"""Recorded conversations, SPEED-Bench, and files other than JSON lines."""

import json
from pathlib import Path
from typing import Any

import pytest

from crossdraft.framework.errors import UsageError
from crossdraft.framework.recipe.prompts import Prompt, load_prompts


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def error(source: str) -> str:
    with pytest.raises(UsageError) as caught:
        load_prompts(source)
    return str(caught.value)


def sharegpt(*messages: tuple[str, str], **row: Any) -> dict[str, Any]:
    return {"id": "abc_0", "conversations": [{"from": who, "value": text} for who, text in messages], **row}


def write_list(path: Path, *rows: Any) -> str:
    path.write_text(" \n" + json.dumps(rows, indent=1), encoding="utf-8")
    return str(path)


def test_sharegpt_file(tmp_path: Path, caplog: Any) -> None:
    rows = [
        sharegpt(("human", "a"), ("gpt", "x"), ("human", " b "), ("gpt", "y")),
        sharegpt(("gpt", "an answer to nothing"), ("user", "c")),
        sharegpt(),
        sharegpt(("gpt", "alone")),
        sharegpt(("system", "be kind"), ("human", "d"), ("human", "e"), ("bing", "x"), ("bard", "y"), ("human", "")),
    ]
    result = load_prompts(write_list(tmp_path / "sharegpt.json", *rows))
    assert result == [
        Prompt(1, "conversation", ("a", "b"), ("x", "y"), 0),
        Prompt(2, "conversation", ("c",), None, 1),
        Prompt(5, "conversation", ("be kind\n\nd\n\ne",), ("x\n\ny",), 4),
    ]
    assert caplog.messages == ["crossdraft: skipped 2 conversations without a user message"]
    assert load_prompts(write(tmp_path / "lines.json", *rows)) == result  # JSON lines under that name


def test_long_conversation_is_cut(tmp_path: Path, caplog: Any) -> None:
    messages = [(who, f"{who} {i}") for i in range(20) for who in ("human", "gpt")]
    (prompt,) = load_prompts(write(tmp_path / "p.jsonl", sharegpt(*messages)))
    assert prompt.turns == tuple(f"human {i}" for i in range(16))
    assert prompt.reference == tuple(f"gpt {i}" for i in range(16))
    assert caplog.messages == ["crossdraft: truncated 1 conversations to 16 turns"]


def test_messages_of_chat_api(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    row = {"question_id": "q", "category": "coding", "messages": messages}
    assert load_prompts(write(tmp_path / "p.jsonl", row)) == [Prompt("q", "coding", ("a",), ("b",), 0)]


@pytest.mark.parametrize(
    "row, sentence",
    [
        ({"conversations": "a"}, "'conversations' must be a list of messages, not 'a'"),
        ({"conversations": ["a"]}, "message 1 of 'conversations' must be a mapping with texts 'from' and 'value'"),
        (
            sharegpt(("human", "a"), ("tool", "b")),
            "message 2 of 'conversations' is from 'tool'; the role must be user (human), ",
        ),
        (
            {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
            "message 1 of 'messages' must be a mapping with texts",
        ),
        (sharegpt(("human", "a\x00")), "turn 1 contains the character U+0000"),
    ],
)
def test_bad_conversations(tmp_path: Path, row: Any, sentence: str) -> None:
    path = write(tmp_path / "p.jsonl", row)
    assert error(path).startswith(f"{path}:1: {sentence}")


def test_bad_lists(tmp_path: Path) -> None:
    path = write_list(tmp_path / "p.json")
    assert error(path) == f"{path} is an empty list; it needs one JSON object per prompt"
    path = write_list(tmp_path / "p.json", {"prompt": "a"}, 3)
    assert error(path) == f"{path}, row 2: a prompt must be a JSON object, not int"
    Path(path).write_text('[{"prompt": "a"},\n oops]', encoding="utf-8")
    assert error(path) == f"{path}:2: not JSON: Expecting value at column 2"


def speed_bench(number: int, text: str) -> dict[str, Any]:
    """A row with the columns of the data card."""
    return {
        "question_id": f"q{number}",
        "category": "coding",
        "sub_category": "python",
        "turns": [text, "and then?"],
        "source": "somewhere",
        "src_id": str(number),
        "difficulty": None,
        "multiturn": True,
    }


def test_speed_bench(tmp_path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    path = tmp_path / "test-00000-of-00001.parquet"
    rows = [speed_bench(i, f"write {i}") for i in range(3)]
    parquet.write_table(pa.Table.from_pylist(rows), path)
    expected = [Prompt(f"q{i}", "coding", (f"write {i}", "and then?"), None, i) for i in range(3)]
    assert load_prompts(str(path)) == load_prompts(str(tmp_path)) == expected
    withheld = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    parquet.write_table(pa.Table.from_pylist([*rows, speed_bench(3, withheld)]), path)
    assert error(str(path)) == (
        f"{path}, row 4: SPEED-Bench contains only the source of this text; run its prepare.py, which "
        "fetches the text, and use the file that it writes"
    )
    assert load_prompts(str(path), limit=3) == expected


def test_damaged_parquet_file(tmp_path: Path) -> None:
    path = tmp_path / "p.parquet"
    path.write_bytes(b"PAR1 nothing")
    assert error(str(path)).startswith(f"cannot read {path}: ArrowInvalid: ")
