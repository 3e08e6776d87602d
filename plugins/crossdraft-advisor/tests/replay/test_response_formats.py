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
ANSWER = {"role": "assistant", "content": "w7 w8"}
#: Responses of other APIs, with their request beside or around them.
OPENAI = {"object": "response", "status": "incomplete", "usage": {"input_tokens": 4, "output_tokens": 2}}
INPUTS = [{"role": "user", "content": [{"type": "input_text", "text": "w5 w6"}]}]
OPENAI |= {"output": [{"type": "message", "content": [{"type": "output_text", "text": "w7 w8"}]}]}
ANTHROPIC = {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "w7 w8"}]}
ANTHROPIC |= {"stop_reason": "max_tokens", "usage": {"input_tokens": 4, "output_tokens": 2}}
OLLAMA = {"done": True, "done_reason": "length", "eval_count": 2}
TGI = {"inputs": "w5 w6", "parameters": {"do_sample": False}, "generated_text": "w7 w8"}
TGI |= {"details": {"finish_reason": "length", "tokens": [{"id": 7, "text": "w7"}, {"id": 8, "text": "w8"}]}}
OFFLINE = {"request_id": "0", "prompt": "w5 w6", "prompt_token_ids": [5, 6]}
OFFLINE |= {"outputs": [{"index": 0, "text": "w7 w8", "token_ids": [7, 8], "finish_reason": "length"}]}
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
        (json.dumps([{"id": "c", "conversations": [USER, ANSWER]}]),),
        (text_of({"conversation_id": "c", "model": "m", "conversation": [USER, ANSWER], "turn": 1}),),
        (text_of({"messages": [USER, ANSWER]}),),
        (text_of({"prompt": [USER], "completion": [ANSWER]}),),
        (text_of({"prompt": "w5 w6", "completion": "w7 w8"}),),
        (text_of({"input": "w5 w6"} | OPENAI),),
        (
            text_of(
                {
                    "request": {"input": [USER | {"content": [{"type": "input_text", "text": "w5 w6"}]}]},
                    "response": OPENAI,
                }
            ),
        ),
        (text_of({"request": {"messages": [USER], "max_tokens": 2}, "response": ANTHROPIC}),),
        (text_of({"messages": [USER], "message": ANSWER} | OLLAMA),),
        (text_of({"prompt": "w5 w6", "response": "w7 w8"} | OLLAMA),),
        (text_of(TGI),),
        (text_of(OFFLINE),),
        (text_of({"messages": [USER], "sglext": {"input_ids": [5, 6], "output_ids": [[7, 8]]}} | BODY),),
        (text_of({"prompt": ["w5 w6"], "choices": [{"text": "w7 w8", "finish_reason": "length"}]}),),
        (json.dumps({"messages": [USER]} | BODY, indent=1) + "\n" + json.dumps({"error": "busy"}, indent=1),),
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
        ({"messages": [USER], "message": ANSWER, "done": False}, "chunk of a stream"),
        (OPENAI | {"output": [{"type": "reasoning", "summary": [{"text": "w9"}]}]}, "a summary of hidden reasoning"),
        (OPENAI | {"input": "w5", "output": [{"type": "web_search_call"}]}, "'web_search_call' is not read"),
        (INPUT, "the input of an OpenAI batch has no responses; give its output, too"),
        ({"prompt": "w5", "completion": {"text": "w7"}}, "'completion' must be a text, or a list"),
    ],
)
def test_files_without_a_response(read: Any, row: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(text_of(row))


@pytest.mark.parametrize(
    "data, message",
    [
        (b"\x1f\x8b\x08", "compressed; unpack it"),
        (b"PK\x03\x04", "an archive"),
        ("\ufeff{}".encode("utf-16-le"), "UTF-16; save it as UTF-8"),
        (
            b"INFO SpecDecoding metrics: Mean acceptance length: 1.90\n",
            "for the log or the counters .* crossdraft advise",
        ),
        (b"prompt,response\nw5,w6\n", "responses are JSON, one in a line"),
    ],
)
def test_files_that_are_not_json(read: Any, data: bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(data)


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
    install("formats", ("broken", Broken), ("pairs", Pairs))
    (response,), reader = read(text_of({"question": "w5 w6", "answer": "w7 w8"}))
    assert list(response.tokens) == [7, 8] and "'broken'" in "".join(reader.skipped.values())
