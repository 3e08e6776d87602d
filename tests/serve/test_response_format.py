"""Constrained responses through the `openai` client."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from text_models import SCHEMA, is_valid, save_text_model

pytest.importorskip("uvicorn", reason="the endpoint needs the extra serve")
pytest.importorskip("llguidance", reason="constraints need the extra constrain")
openai = pytest.importorskip("openai", reason="the endpoint is tested with the openai client")

from server_thread import RunningServer, serving  # noqa: E402

MESSAGES = [{"role": "user", "content": "a cat as JSON"}]
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def names(tmp_path_factory: Any) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    return [save_text_model(root / f"model-{seed}", seed) for seed in range(2)]


@pytest.fixture(scope="module")
def running(names: list[str]) -> Iterator[RunningServer]:
    drafter = f"{{name: draft-model, model: {names[1]}, gamma: 3}}"
    with serving("--target", names[0], "--drafter", drafter, "--slots", "3", "--max-new-tokens", "60") as server:
        yield server


@pytest.fixture
def api(running: RunningServer) -> Any:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, timeout=30)


def test_chats_match_schema(api: Any, names: list[str]) -> None:
    for seed in range(4):
        response = api.chat.completions.create(
            model=names[0], messages=MESSAGES, response_format=FORMAT, seed=seed, temperature=0.8
        )
        assert is_valid(response.choices[0].message.content) and response.choices[0].finish_reason == "stop"
    chunks = api.chat.completions.create(model=names[0], messages=MESSAGES, response_format=FORMAT, stream=True)
    assert is_valid("".join(chunk.choices[0].delta.content or "" for chunk in chunks))


def test_json_object_is_valid_or_truncated(api: Any, names: list[str]) -> None:
    response = api.chat.completions.create(
        model=names[0], messages=MESSAGES, response_format={"type": "json_object"}, seed=1, temperature=0.5
    )
    choice = response.choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def test_structured_outputs_of_vllm(api: Any, names: list[str]) -> None:
    body = {"structured_outputs": {"choice": ["yes", "no"]}}
    response = api.completions.create(model=names[0], prompt=["is it?", "or not?"], extra_body=body)
    assert {choice.text for choice in response.choices} <= {"yes", "no"}
    plain = api.completions.create(model=names[0], prompt="is it?", max_tokens=5)
    assert plain.choices[0].text not in ("yes", "no")


def test_required_function_is_called(api: Any, names: list[str]) -> None:
    animal = {"type": "function", "function": {"name": "animal", "parameters": SCHEMA}}
    other = {"type": "function", "function": {"name": "other"}}
    named = {"type": "function", "function": {"name": "animal"}}
    options: dict[str, Any] = {"model": names[0], "messages": MESSAGES, "seed": 3}
    choice = api.chat.completions.create(tools=[animal, other], tool_choice=named, **options).choices[0]
    (call,) = choice.message.tool_calls
    assert call.function.name == "animal" and is_valid(call.function.arguments)
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    chunks = api.chat.completions.create(tools=[animal], tool_choice="required", stream=True, **options)
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == "animal" and deltas[0].id
    assert "".join(delta.function.arguments for delta in deltas) == call.function.arguments
    results = [choice.message.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": call.id, "content": "ok"}]
    later = api.chat.completions.create(**options | {"messages": [*MESSAGES, *results]}, max_tokens=4)
    assert later.usage.prompt_tokens > 20


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({}, "tool_choice=auto is not supported"),
        ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, "must name one of the tools"),
        ({"tool_choice": "required", "response_format": FORMAT}, "are both set; remove one of them"),
        ({"tools": [{"type": "function"}]}, "tools[0] must have type function"),
    ],
)
def test_invalid_tools_are_refused(api: Any, names: list[str], fields: Any, sentence: str) -> None:
    options = {"tools": [{"type": "function", "function": {"name": "a"}}], **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model=names[0], messages=MESSAGES, **options)
    assert sentence in caught.value.body["message"]


@pytest.mark.parametrize(
    "fields, param, sentence",
    [
        ({"response_format": {"type": "xml"}}, "response_format", "its type is text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "that has a schema"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "an object with one of json, regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex cannot be compiled"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs", "remove ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "response_format", "remove one of them"),
    ],
)
def test_invalid_formats_are_refused(api: Any, names: list[str], fields: Any, param: str, sentence: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model=names[0], prompt="a", extra_body=fields)
    assert caught.value.body["param"] == param and sentence in caught.value.body["message"]
