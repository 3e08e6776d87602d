"""Responses that ``crossdraft serve`` writes are replayed as the tokens that were generated."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from text_models import SCHEMA, save_text_model

pytest.importorskip("llguidance", reason="constraints need the extra constrain")
openai = pytest.importorskip("openai", reason="the endpoint is tested with the openai client")

from crossdraft_advisor.replay.responses import Reader  # noqa: E402
from server_thread import RunningServer, serving  # noqa: E402

from crossdraft.framework.models.tokenizer import load_tokenizer  # noqa: E402

WRITTEN = (
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
)
CALL = '<tool_call>{"name": "animal", "arguments": {"age": 3}}</tool_call>'
TOOL = {"type": "function", "function": {"name": "animal", "parameters": SCHEMA}}


def choice(*texts: str) -> dict[str, Any]:
    return {"structured_outputs": {"choice": list(texts)}}


@pytest.fixture(scope="module")
def name(tmp_path_factory: Any) -> str:
    chat = f"{{% for m in messages %}}{{{{ m.role }}}} {WRITTEN}</s>{{% endfor %}}"
    chat += "{% if add_generation_prompt %}assistant {% endif %}"
    return save_text_model(tmp_path_factory.mktemp("models") / "model", chat=chat)


@pytest.fixture(scope="module")
def running(name: str) -> Iterator[RunningServer]:
    with serving("--target", name, "--drafter", "none", "--slots", "2", "--max-new-tokens", "140") as server:
        yield server


@pytest.mark.parametrize(
    "fields",
    [
        {"extra_body": choice("yes yes"), "max_tokens": 2},
        {"extra_body": choice("yes")},
        {"tools": [TOOL], "extra_body": choice(f"yes{CALL}{CALL}")},
        {"tools": [TOOL], "extra_body": choice(CALL)},
        {"tools": [TOOL], "tool_choice": "required", "temperature": 0.8},
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "animal"}}, "max_tokens": 9},
        {"extra_body": choice("o€")},
    ],
    ids=str,
)
def test_served_responses_are_read_back(running: RunningServer, name: str, tmp_path: Path, fields: dict) -> None:
    api = openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=30)
    messages = [{"role": "user", "content": "a cat?"}]
    body = {"model": name, "messages": messages, **fields}
    body["extra_body"] = {**body.get("extra_body", {}), "return_token_ids": True}
    answer = api.chat.completions.create(**body, logprobs=True).model_dump()
    request = {key: value for key, value in body.items() if key != "extra_body"}
    tokens = answer["choices"][0]["token_ids"]
    assert len(tokens) == answer["usage"]["completion_tokens"]
    tokenizer = load_tokenizer(name).tokenizer

    def read() -> list[int]:
        (tmp_path / "responses.jsonl").write_text(json.dumps({"request": request, "response": answer}), "utf-8")
        reader = Reader(target=name)
        (one,) = reader.read([str(tmp_path / "responses.jsonl")])
        assert len(one.prompt) == answer["usage"]["prompt_tokens"] and not reader.skipped
        return list(one.tokens)

    assert read() == tokens
    del answer["choices"][0]["token_ids"]
    assert read() == tokens or "\ufffd" in str(answer["choices"][0]["logprobs"])
    answer["choices"][0]["logprobs"] = None
    plain, expected = (str(tokenizer.decode(ids, skip_special_tokens=True)) for ids in (read(), tokens))
    assert plain == expected
