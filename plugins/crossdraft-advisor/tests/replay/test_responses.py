"""Sources of recorded responses, and errors with file, line and key."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.replay.responses import Reader
from tiny_models import make_tokenizer

from crossdraft.framework.contracts.sampling import Sampling
from crossdraft.framework.errors import UsageError
from crossdraft.framework.models.tokenizer import TokenizerOf

HALF = Sampling(temperature=0.5)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """``read(*rows, **options)``: the responses of a file with these rows, and the reader."""

    def reading(*rows: Any, tokenizer: bool = True, **options: Any) -> tuple[list[Response], Reader]:
        path = tmp_path / "responses.jsonl"
        path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows), "utf-8")
        reader = Reader(**options)
        if tokenizer:
            reader.target = "tiny"
            reader._tokenizer = TokenizerOf("tiny", make_tokenizer(), frozenset({2}))
        return list(reader.read([str(path)])), reader

    return reading


def test_token_ids_need_no_tokenizer(read: Any) -> None:
    row = {"prompt": [1, 2], "tokens": [3, 4], "logprobs": [-1.0, -0.5], "temperature": 1, "category": "c", "id": 7}
    (one,), reader = read(row, tokenizer=False)
    assert (one.prompt, one.tokens, one.id, one.category) == ([1, 2], [3, 4], "7", "c")
    assert one.log_p.tolist() == [-1.0, -0.5] and one.sampling == Sampling()
    assert not one.ended and one.limit == 2
    assert "raw and processed" in next(iter(reader.assumed))


def test_texts_are_tokenized(read: Any) -> None:
    rows = [
        {"prompt": "w5 w6", "response": "w7 w8", "finish_reason": "stop", "max_tokens": 9},
        {"messages": [{"role": "user", "content": "w5"}], "response": "w7", "finish_reason": "length"},
    ]
    (first, second), reader = read(*rows)
    assert first.tokens == [7, 8, 2] and first.ended and first.limit == 9  # with the token that ended it
    assert second.prompt == [3, 5, 4] and second.limit == 1
    assert any("retokenized" in subject for subject in reader.assumed)
    with pytest.raises(UsageError, match=r"responses.jsonl:1: a text needs a tokenizer; set --target"):
        read(rows[0], tokenizer=False)


def test_truncated_response_is_limited_to_its_length(read: Any) -> None:
    """A response with finish_reason length may be shorter than max_tokens, because the context was full."""
    row = {"prompt": [5], "tokens": [7, 8], "max_tokens": 9}
    choice = {"prompt": [5], "choices": [{"token_ids": [7, 8], "finish_reason": "length"}], "max_tokens": 9}
    responses, _ = read(row | {"finish_reason": "length"}, choice, row | {"finish_reason": "stop"}, tokenizer=False)
    assert [response.limit for response in responses] == [2, 2, 9]


@pytest.mark.parametrize("output", [{"tokens": [7, 8]}, {"response": "w7 w8"}])
def test_logprobs_without_end_of_sequence_truncate(read: Any, output: dict[str, Any]) -> None:
    row = {"prompt": [5], "finish_reason": "stop", "temperature": 1, **output}
    (cut, whole), reader = read(row | {"logprobs": [-0.1, -0.2]}, row | {"logprobs": [-0.1, -0.2, -0.3]})
    assert (cut.tokens, cut.ended, cut.limit) == ([7, 8], False, 2) and cut.log_p.tolist() == [-0.1, -0.2]
    assert (whole.tokens, whole.ended) == ([7, 8, 2], True)
    assert reader.assumed["without their end-of-sequence token, treated as truncated there"] == 1


def test_documented_responses_have_their_finish_reason(read: Any) -> None:
    page = (Path(__file__).parents[4] / "docs" / "replay.md").read_text("utf-8")
    rows = page.split('```json title="responses.jsonl"\n')[1].split("```")[0].splitlines()
    responses, _ = read(*rows, tokenizer=False)
    assert [(response.ended, response.limit) for response in responses] == [(True, None), (False, 6), (False, 6)]


def test_logprobs_are_used_only_if_valid_log_p(read: Any) -> None:
    row = {"prompt": [1], "tokens": [3], "logprobs": [-1.0]}
    assert read(row, sampling=Sampling())[0][0].log_p.tolist() == [-1.0]
    assert read(row, sampling=Sampling(temperature=0))[0][0].log_p.tolist() == [0.0]
    for options, why in (({}, "sampling parameters are unknown"), ({"sampling": HALF}, "--logprobs processed")):
        (one,), reader = read(row, **options)
        assert one.log_p is None and why in next(iter(reader.assumed))
    assert read(row, sampling=HALF, processed=True)[0][0].log_p.tolist() == [-1.0]


CHAT = {
    "object": "chat.completion",
    "id": "x1",
    "choices": [
        {
            "message": {"role": "assistant", "content": "w7 w8"},
            "finish_reason": "length",
            "logprobs": {"content": [{"token": "w7", "logprob": -0.1}, {"token": "w8", "logprob": -0.2}]},
        }
    ],
}
REQUEST = {"messages": [{"role": "user", "content": "w5"}], "temperature": 1.0, "max_tokens": 2}


def chat(**changes: Any) -> dict[str, Any]:
    return CHAT | {"choices": [CHAT["choices"][0] | changes]}


@pytest.mark.parametrize(
    "row",
    [
        {"request": REQUEST, "response": CHAT},
        {"custom_id": "x1", "request": {"body": REQUEST}, "response": {"body": CHAT}},
        CHAT | REQUEST,
    ],
)
def test_chat_completion(read: Any, row: Any) -> None:
    (one,), _ = read(row)
    assert (one.prompt, one.tokens, one.id) == ([3, 5, 4], [7, 8], "x1")
    assert one.log_p.tolist() == [-0.1, -0.2] and one.sampling == Sampling() and one.limit == 2


def test_completions_with_server_fields(read: Any) -> None:
    output = {"tokens": ["w7", "w8"], "token_logprobs": [-0.1, -0.2]}
    plain = {"choices": [{"text": "w7 w8", "logprobs": output, "finish_reason": "length"}]} | {"prompt": "w5"}
    named = {"tokens": ["token_id:7", "token_id:2"], "token_logprobs": [-0.1, -0.2]}
    ids = {"choices": [{"text": "?", "logprobs": named, "finish_reason": "stop"}], "prompt": [5], "max_tokens": 8}
    with_token_ids = {"choices": [{"text": "?", "token_ids": [9, 9], "prompt_token_ids": [5, 6]}]}
    ended = output | {"tokens": ["w7", "w8", "</s>"], "token_logprobs": [-0.1, -0.2, -0.3]}
    whole = {"choices": [{"text": "w7 w8", "logprobs": ended, "finish_reason": "stop"}], "prompt": [5]}
    cut = {"choices": [{"text": "w7 w8", "logprobs": output, "finish_reason": "stop"}], "prompt": [5]}
    result, reader = read(plain, ids, with_token_ids, whole, cut)
    assert [item.tokens for item in result] == [[7, 8], [7, 2], [9, 9], [7, 8, 2], [7, 8]]
    assert [item.ended for item in result] == [False, True, False, True, False]
    assert result[1].limit == 8 and result[2].prompt == [5, 6]
    assert reader.assumed["without their end-of-sequence token, treated as truncated there"] == 1


@pytest.mark.parametrize(
    ("row", "output"),
    [
        ("{", "responses.jsonl:2: not JSON"),
        ("[1]", "responses.jsonl:2: a response is a JSON object"),
        ({"prompt": [1]}, "responses.jsonl:2: the response is missing"),
        ({"tokens": [1]}, "responses.jsonl:2: the prompt is missing"),
        ({"prompt": [], "tokens": [1]}, "responses.jsonl:2: the prompt is empty"),
        ({"prompt": [1], "tokens": [1.5]}, "responses.jsonl:2: 'tokens' must be a list of integer token ids"),
        ({"prompt": [1], "tokens": [True]}, "responses.jsonl:2: 'tokens' must be a list of integer token ids"),
        ({"prompt": [1], "tokens": [-1]}, "responses.jsonl:2: 'tokens' contains -1, which is not a valid token id"),
        ({"prompt": [1], "tokens": [1], "logprobs": [0, -1]}, "'logprobs' has 2 numbers, but the response has 1 tok"),
        ({"prompt": [1], "tokens": [1], "logprobs": [0.4]}, "responses.jsonl:2: 'logprobs' contains 0.4 for token 1"),
        ({"prompt": [1], "tokens": [1], "logprobs": [-9999.0]}, "'logprobs' contains -9999.0 for token 1"),
        ('{"prompt": [1], "tokens": [1], "logprobs": [NaN]}', "'logprobs' contains nan for token 1"),
        ({"prompt": [1], "tokens": [1], "logprobs": [None]}, "'logprobs' contains None for token 1"),
        ({"prompt": [1], "tokens": [1], "logprobs": ["0"]}, "'logprobs' must be a list of numbers"),
        (
            {"prompt": [1], "tokens": [1], "temperature": -1},
            "responses.jsonl:2: invalid sampling parameters temperature",
        ),
        (
            {"prompt": [1], "tokens": [1], "temperature": 0.7},
            "sampled at temperature 0.7, but the options request temperature 1",
        ),
        ({"prompt": [1], "tokens": [1], "finish_reason": 1}, "responses.jsonl:2: 'finish_reason' is 1; it must"),
        ({"prompt": [1], "tokens": [1], "max_tokens": 0}, "responses.jsonl:2: 'max_tokens' is 0"),
        ({"prompt": [1], "tokens": [1], "category": "a\nb"}, "responses.jsonl:2: 'category' is"),
        ({"prompt": "a\x00", "tokens": [1]}, "responses.jsonl:2: a text contains the character U\\+0000"),
        ({"messages": ["hello"], "tokens": [1]}, "responses.jsonl:2: 'messages' must be a list of objects"),
        ({"response": {"id": 1}, "prompt": [1]}, "'response' is an object without 'choices'"),
        (chat() | {"choices": {}} | REQUEST, "responses.jsonl:2: 'choices' must be a list"),
        (CHAT, "responses.jsonl:2: the prompt is missing"),
        (
            chat(logprobs={"content": [{"token": "w7", "logprob": -1}]}) | REQUEST,
            "the 2 tokens of the text differ",
        ),
        (chat(logprobs={"content": [{"token": t, "logprob": -1} for t in ("w7", "w9")]}) | REQUEST, "return_token_ids"),
        (chat(logprobs=[1]) | REQUEST, r"responses.jsonl:2, choices\[0\]: 'logprobs' has an unknown format"),
        (chat(message={}, logprobs=None) | REQUEST, "the choice is empty"),
    ],
)
def test_invalid_response_is_skipped_with_its_line(read: Any, row: Any, output: str) -> None:
    """Another response of the file is read; without one, or if the options contradict a response, it is refused."""
    fine = {"prompt": [1], "tokens": [1]}
    if "the options request" in output:
        with pytest.raises(UsageError, match=output):
            read(fine, row, sampling=Sampling())
        return
    responses, context = read(fine, row, sampling=Sampling())
    assert len(responses) == 1 and re.search(output, next(iter(context.skipped.values())))
    with pytest.raises(UsageError, match=output.replace("jsonl:2", "jsonl.*")):
        read(row, sampling=Sampling())


def test_texts_of_data_set_are_cut(tmp_path: Path) -> None:
    import datasets

    rows = {"text": [" ".join(f"w{5 + (i + j) % 50}" for j in range(20)) for i in range(3)]}
    for name in ("texts", "more"):
        datasets.Dataset.from_dict(rows).save_to_disk(tmp_path / name)
    reader = Reader(prompt_tokens=4, tokens=10, column="text", limit=2)
    reader.target, reader._tokenizer = "tiny", TokenizerOf("tiny", make_tokenizer(), frozenset({2}))
    result = list(reader.read([str(tmp_path / "texts")]))
    assert [len(item.prompt) for item in result] == [4, 4] and [len(item.tokens) for item in result] == [10, 10]
    assert result[1].tokens == [10 + i for i in range(10)] and result[1].limit == 10
    assert any("assumed to be samples" in subject for subject in reader.assumed)
    reader.limit = None
    assert len({item.id for item in reader.read([str(tmp_path / name) for name in ("texts", "more")])}) == 6
    with pytest.raises(UsageError, match="no column 'words'"):
        reader.column = "words"
        list(reader.read([str(tmp_path / "texts")]))


@pytest.mark.parametrize("name", ["nowhere/responses.jsonl", "nowhere.jsonl", "nowhere"])
def test_no_such_source(name: str) -> None:
    with pytest.raises(UsageError, match=f"responses '{name}' do not exist; give a run, one of its cells"):
        list(Reader().read([name]))


def test_texts_need_tokenizer_before_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossdraft_advisor.replay.responses.rows", None)
    with pytest.raises(UsageError, match=r"hf:a/b: a text needs a tokenizer; set --target MODEL"):
        list(Reader(column="text").read(["hf:a/b"]))


def test_empty_responses_are_skipped(read: Any) -> None:
    result, reader = read({"prompt": [1], "tokens": []}, {"prompt": [1], "tokens": [2]})
    assert len(result) == 1 and reader.assumed["skipped: without tokens"] == 1


def test_log_p_is_never_above_zero(read: Any) -> None:
    (one,), _ = read({"prompt": [1], "tokens": [2], "logprobs": [1e-7]}, sampling=Sampling())
    assert np.array_equal(one.log_p, [0.0])
