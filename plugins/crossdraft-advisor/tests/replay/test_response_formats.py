"""Responses in the formats of engines and tools: own samples of each, whole, damaged, and with failed requests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from crossdraft_advisor import ResponseFormat
from crossdraft_advisor.replay.response import Response
from crossdraft_advisor.replay.responses import Reader
from tiny_models import CHAT, make_tokenizer

from crossdraft.framework.errors import UsageError
from crossdraft.framework.models.tokenizer import TokenizerOf

USER = {"role": "user", "content": "w5 w6"}
PARTS = {"role": "user", "content": [{"type": "text", "text": "w5 w6"}]}
BODY = {"choices": [{"message": {"role": "assistant", "content": "w7 w8"}, "finish_reason": "length"}]}
META = {"id": "a", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 2, "completion_tokens": 2}
ARGUMENTS = {"until": ["Q:"], "do_sample": False, "temperature": 0.0}
LM_EVAL = {"doc_id": 3, "target": "8", "resps": [["w7 w8"]], "filtered_resps": ["8"], "filter": "strict-match"}
SHARE_GPT = [{"from": "human", "value": "w5 w6"}, {"from": "gpt", "value": "w7 w8"}]
INPUT = {"custom_id": "r-1", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [USER]}}
OUTPUT = {"id": "b-1", "custom_id": "r-1", "response": {"status_code": 200, "body": BODY}, "error": None}
FAILED = {"id": "b-2", "custom_id": "r-2", "response": {"status_code": 400, "body": None}}
FAILED |= {"error": {"message": "maximum context length", "code": "BadRequestError"}}


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """``read(*files)``: the responses of files with these texts, and the reader."""

    def reading(*files: str | bytes) -> tuple[list[Response], Reader]:
        paths = [tmp_path / f"{i}.json" for i in range(len(files))]
        for path, text in zip(paths, files, strict=True):
            path.write_bytes(text.encode() if isinstance(text, str) else text)
        tokenizer = make_tokenizer()
        tokenizer.chat_template = CHAT
        reader = Reader(target="tiny", _tokenizer=TokenizerOf("tiny", tokenizer, frozenset({2})))
        return list(reader.read([str(path) for path in paths])), reader

    return reading


def text_of(*rows: Any) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.mark.parametrize(
    "files",
    [
        (text_of({"messages": [USER]} | BODY),),
        (text_of({"messages": [PARTS]} | BODY),),
        (text_of(INPUT), text_of(OUTPUT, FAILED)),
        (text_of(INPUT, FAILED, OUTPUT),),
        (text_of({"request": {"text": "w5 w6"}, "response": {"text": "w7 w8", "meta_info": META}}),),
        (text_of({"prompt": [5, 6], "output_ids": [7, 8], "meta_info": META}),),
        (text_of({"prompt": "w5 w6", "content": "w7 w8", "stop_type": "limit", "generation_settings": {"top_k": 0}}),),
        (text_of(LM_EVAL | {"arguments": [["w5 w6", ARGUMENTS]]}, LM_EVAL | {"arguments": [["w5 w6", ARGUMENTS]]}),),
        (text_of(LM_EVAL | {"arguments": {"gen_args_0": {"arg_0": "w5 w6", "arg_1": ARGUMENTS}}}),),
        (text_of(LM_EVAL | {"arguments": [[json.dumps([USER]), ARGUMENTS]]}),),
        (json.dumps([{"id": "c", "conversations": SHARE_GPT}]),),
        (json.dumps([{"id": "c", "conversations": SHARE_GPT}], indent=1),),
        (text_of({"prompt": [5, 6], "tokens": [7, 8]}).encode() + b'{"prompt": "\xe2\x82", "tokens": [1]}\n',),
        ("\ufeff" + text_of({"prompt": [5, 6], "tokens": [7, 8]}) + '{"prompt": [5, 6], "tok',),
        ('{"prompt": [5, 6], "tok\n' + text_of({"prompt": [5, 6], "tokens": [7, 8]}),),
    ],
)
def test_response_formats(read: Any, files: tuple[str, ...]) -> None:
    (response,), reader = read(*files)
    assert list(response.tokens) == [7, 8] and list(response.prompt[-2:] if len(response.prompt) == 2 else [5, 6]) == [
        5,
        6,
    ]
    assert not response.ended and len(reader.skipped) <= 1


@pytest.mark.parametrize(
    "row, message",
    [
        (FAILED, "r-2|status 400, .maximum context length"),
        ({"error": {"message": "overloaded", "type": "server_error"}}, "overloaded"),
        (OUTPUT, "give the input of an OpenAI batch before its output"),
        (LM_EVAL | {"arguments": [["w5", " A"]], "resps": [[["-1.5", "False"]]]}, "scored, not generated"),
        ({"conversations": [{"from": "plugin", "value": 3}]}, "not a text of a known sender"),
        ({"generated_texts": ["a"], "input_lens": [3]}, "the prompt is missing"),
        ({"prompt": [5, 6], "output_ids": [7], "meta_info": META | {"finish_reason": None}}, "chunk of a stream"),
    ],
)
def test_files_without_a_response(read: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(text_of(row))


def test_event_streams(read: Any) -> None:
    with pytest.raises(UsageError, match="line of an event stream"):
        read('data: {"choices": []}\n\ndata: [DONE]\n')


class Pairs(ResponseFormat):
    name = "pairs"

    def rows(self, row: Any, context: Any, place: str) -> Any:
        return iter([{"prompt": row["question"], "response": row["answer"]}]) if "question" in row else None


class Broken(ResponseFormat):
    name = "broken"

    def rows(self, row: Any, context: Any, place: str) -> Any:
        yield row["no such key"]


def test_formats_of_plug_ins(read: Any, install: Any) -> None:
    """One that fails is named, and the others are tried."""
    install("response_formats", ("broken", Broken), ("pairs", Pairs))
    (response,), reader = read(text_of({"question": "w5 w6", "answer": "w7 w8"}))
    assert list(response.tokens) == [7, 8] and "'broken'" in "".join(reader.skipped.values())
