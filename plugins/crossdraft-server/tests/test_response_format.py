"""Constrained responses through the `openai` client."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from text_models import SCHEMA, is_valid, make_text_tokenizer, save_text_model
from tiny_models import CHAT

pytest.importorskip("llguidance", reason="constraints need the extra constrain")
openai = pytest.importorskip("openai", reason="the endpoint is tested with the openai client")

from crossdraft_server import constraint_compiler  # noqa: E402
from crossdraft_server.tools import CallParser, call_format  # noqa: E402
from server_thread import RunningServer, serving  # noqa: E402

from crossdraft.framework.errors import UsageError  # noqa: E402

MESSAGES = [{"role": "user", "content": "a cat as JSON"}]
#: Like those of Qwen3-Coder, the template reads the arguments of earlier calls as a mapping.
ARGUMENTS = "{% for key, value in call.function.arguments | items %}{{ key }}={{ value }};{% endfor %}"
CALLS = "{{ m.reasoning_content }}{% for call in m.tool_calls or [] %}" + ARGUMENTS + "{% endfor %}"
SLOW = "the constraint's json_schema takes more than 1 s to compile; simplify it"
NESTED: Any = "a"
for _ in range(100):
    NESTED = [NESTED]
FORMAT = {"type": "json_schema", "json_schema": {"name": "animal", "strict": True, "schema": SCHEMA}}


@pytest.fixture(scope="module")
def names(tmp_path_factory: Any) -> list[str]:
    root = tmp_path_factory.mktemp("models")
    chat = CHAT.replace("{{ m.content }}", "{{ m.content }}" + CALLS) + "{# <tool_call> #}"
    return [save_text_model(root / f"model-{seed}", seed, chat=chat) for seed in range(2)]


@pytest.fixture(scope="module")
def running(names: list[str]) -> Iterator[RunningServer]:
    drafter = f"{{name: draft-model, model: {names[1]}, gamma: 3}}"
    with serving("--target", names[0], "--drafter", drafter, "--slots", "3", "--max-new-tokens", "140") as server:
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
        model=names[0],
        messages=MESSAGES,
        response_format={"type": "json_object"},
        seed=1,
        temperature=0.5,
        max_tokens=60,
    )
    choice = response.choices[0]
    assert choice.message.content.startswith("{")
    assert choice.finish_reason == "length" or isinstance(json.loads(choice.message.content), dict)


def test_structured_outputs_of_vllm(api: Any, names: list[str]) -> None:
    body: dict[str, Any] = {"structured_outputs": {"choice": ["yes", "no"], "regex": None}}  # a null is not set
    response = api.completions.create(model=names[0], prompt=["is it?", "or not?"], extra_body=body)
    assert {choice.text for choice in response.choices} <= {"yes", "no"}
    body = {"structured_outputs": {"choice": ["o€"]}}
    chat = api.chat.completions.create(model=names[0], messages=MESSAGES, logprobs=True, extra_body=body)
    assert chat.choices[0].message.content == "o€"
    tokens = [(token.token, token.bytes) for token in chat.choices[0].logprobs.content]
    assert tokens == [("o", [111]), *[("\ufffd", None)] * 3, ("</s>", list(b"</s>"))]
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
    message = choice.message.model_dump(exclude_none=True) | {"reasoning_content": "hm "}
    results = [message, {"role": "tool", "tool_call_id": call.id, "content": ""}]
    later = api.chat.completions.create(**options | {"messages": [*MESSAGES, *results]}, max_tokens=4)
    pairs = "".join(f"{key}={value};" for key, value in json.loads(call.function.arguments).items())
    text = f"user {MESSAGES[0]['content']} assistant hm {pairs} tool  assistant"
    assert later.usage.prompt_tokens == len(make_text_tokenizer()(text)["input_ids"])
    call.function.arguments = "[1]"
    results[0] = choice.message.model_dump(exclude_none=True)
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\].tool_calls must be a list of calls"):
        api.chat.completions.create(**options | {"messages": [*MESSAGES, *results]})


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {"n": {"type": "integer"}}}], ids=str)
def test_arguments_are_object_without_a_type_in_the_schema(api: Any, names: list[str], parameters: Any) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    for seed in range(3):
        choice = api.chat.completions.create(
            model=names[0], messages=MESSAGES, tools=tools, tool_choice="required", max_tokens=2, seed=seed
        ).choices[0]
        assert choice.message.tool_calls[0].function.arguments.startswith("{")


CALL = '<tool_call>{"name": "animal", "arguments": {"age": 3}}</tool_call>'


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_that_the_model_decides_on(api: Any, names: list[str], parallel: bool) -> None:
    """A constraint forces the text: content and two calls."""
    tools = [{"type": "function", "function": {"name": "animal", "parameters": SCHEMA}}]
    options: dict[str, Any] = {"model": names[0], "messages": MESSAGES, "tools": tools}
    options |= {
        "extra_body": {"structured_outputs": {"choice": [f"yes {CALL}\n{CALL}"]}},
        "parallel_tool_calls": parallel,
    }
    choice = api.chat.completions.create(**options).choices[0]
    calls = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
    assert choice.message.content == "yes" and choice.finish_reason == "tool_calls"
    assert calls == [("animal", '{"age": 3}')] * (2 if parallel else 1)
    chunks = list(api.chat.completions.create(stream=True, **options))
    deltas = [call for chunk in chunks for call in chunk.choices[0].delta.tool_calls or ()]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "yes"
    assert [(call.function.name, call.function.arguments) for call in deltas] == calls
    assert [call.index for call in deltas] == list(range(len(calls))) and len({call.id for call in deltas}) == len(
        calls
    )
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("text", ["no", "yes <tool_call>no</tool_call> yes", f"<{CALL[:-3]}", "<tool_call>{}"])
def test_text_without_a_valid_call_is_content(api: Any, names: list[str], text: str) -> None:
    tools = [{"type": "function", "function": {"name": "animal"}}]
    options: dict[str, Any] = {"model": names[0], "messages": MESSAGES, "tools": tools}
    options |= {"extra_body": {"structured_outputs": {"choice": [text]}}}
    choice = api.chat.completions.create(**options).choices[0]
    assert choice.message.content == text and not choice.message.tool_calls and choice.finish_reason == "stop"
    chunks = api.chat.completions.create(stream=True, **options)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == text


def parsed(tokenizer: Any, text: str, step: int, prompt: Sequence[int] = ()) -> tuple[dict[str, str], list[Any]]:
    """Fields and calls of a response that arrives in pieces of ``step`` characters."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}}}}}]
    target: Any = SimpleNamespace(tokenizer=tokenizer, name="a model")
    parser = CallParser(call_format(target, tools, True), tokenizer, prompt)
    fields: dict[str, str] = {}
    calls = []
    for start in range(0, len(text), step):
        texts, new = parser.add(text[start : start + step], end=start + step >= len(text))
        calls += new
        for field, value in texts.items():
            fields[field] = fields.get(field, "") + value
    return fields, calls


@pytest.mark.parametrize("step", [1, 2, 7, 1000])
def test_formats_of_calls(step: int) -> None:
    """The chat template's, or that of the tokenizer's response template, which reads the prompt."""
    tokenizer = make_text_tokenizer()
    with pytest.raises(UsageError, match="its chat template does not contain <tool_call>, so the format"):
        parsed(tokenizer, "a", step)
    tokenizer.chat_template = "<tool_call><function=name><parameter=key>"
    call = "<tool_call>\n<function=f>\n<parameter=n>\n2\n</parameter>\n</function>\n</tool_call>"
    assert parsed(tokenizer, f"a\n{call}\n{call}</s>", step) == ({"content": "a"}, [("f", '{"n": 2}')] * 2)
    tokenizer.chat_template = "<tool_call>"
    call = '<tool_call>\n{"name": "f", "arguments": {"n": 2}}\n</tool_call>'
    text = f"a <b>{call}<tool_call>c</s>"
    assert parsed(tokenizer, text, step) == ({"content": "a <b><tool_call>c"}, [("f", '{"n": 2}')])
    calls = {"open": "[CALL]", "close": "[/CALL]", "content": "json", "transform": {"function": "{content}"}}
    thinking = {"open": "<think>", "close": "</think>", "content": "text"}
    fields = {"tool_calls": calls, "thinking": thinking, "content": {"close": "</s>", "content": "text"}}
    tokenizer.response_template = {"start_anchor": "<s>", "fields": fields}
    text = 'a</think>b[CALL]{"name": "f", "arguments": {"n": "2"}}[/CALL]</s>'
    expected = {"content": "b", "reasoning_content": "a"}, [("f", '{"n": 2}')]
    assert parsed(tokenizer, text, step, tokenizer("no<s><think>")["input_ids"]) == expected


@pytest.mark.parametrize(
    "fields, sentence",
    [
        ({"tool_choice": "always"}, "or be auto, none, or required with one tool"),
        ({"tool_choice": {"type": "function", "function": {"name": "b"}}}, "must name one of the tools"),
        ({"tool_choice": "required", "response_format": FORMAT}, "are both set; remove one of them"),
        ({"tools": [{"type": "function"}]}, "tools.0.function is not valid: is missing"),
    ],
)
def test_invalid_tools_are_refused(api: Any, names: list[str], fields: Any, sentence: str) -> None:
    options = {"tools": [{"type": "function", "function": {"name": "a"}}], **fields}
    with pytest.raises(openai.BadRequestError) as caught:
        api.chat.completions.create(model=names[0], messages=MESSAGES, **options)
    assert sentence in caught.value.body["message"]


def test_constraints_do_not_affect_other_clients(api: Any, names: list[str], monkeypatch: Any) -> None:
    """One takes too long to compile, one fails while it is decoded; the others are answered meanwhile."""
    monkeypatch.setattr(constraint_compiler, "MOST_SECONDS", 8.0)

    def send(constraint: Any) -> Any:
        fields = {"structured_outputs": constraint} if constraint else {}
        try:
            return api.completions.create(model=names[0], prompt="a", max_tokens=12, extra_body=fields).choices[0].text
        except openai.APIStatusError as error:
            return error

    with ThreadPoolExecutor(8) as pool:
        slow = pool.submit(send, {"json": {"type": "integer", "multipleOf": 9_999_991}})
        failing = [pool.submit(send, {"grammar": 'start: /[ab]/ ("c" | "z" T)\nT: /b/ & /c/'}) for _ in range(6)]
        others = [pool.submit(send, constraint) for constraint in ({"regex": "[0-9]{3}"}, None, None)]
        texts = [future.result(60) for future in others]
        assert re.fullmatch("[0-9]{3}", texts[0]) and all(isinstance(text, str) for text in texts)
        assert not slow.done()
        results = [future.result(60) for future in failing]
    assert all("a dead end" in str(result) or result in ("ac", "bc") for result in results)
    assert slow.result().status_code == 400


@pytest.mark.parametrize(
    "fields, param, sentence",
    [
        ({"response_format": {"type": "xml"}}, "response_format", "its type is text, json_object or json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "that has a schema"),
        ({"structured_outputs": {"xml": "a"}}, "structured_outputs", "an object with one of json, regex"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "regex cannot be compiled"),
        ({"structured_outputs": {"json": {"type": "integer", "multipleOf": 999_983}}}, "structured_outputs", SLOW),
        ({"structured_outputs": {"choice": ["a"] * 200_000}}, "structured_outputs", "choice has 200000 texts"),
        ({"structured_outputs": {"regex": "a?" * 9000 + "a" * 9000}}, "structured_outputs", "for one token"),
        ({"structured_outputs": {"regex": "a|" * 2_500_000}}, "structured_outputs", "the maximum is 262144"),
        ({"structured_outputs": {"json": "[" * 50_000}}, "structured_outputs", "nested too deeply"),
        ({"structured_outputs": {"json": {"const": NESTED}}}, None, "the request body is nested more than 64 deep"),
        (
            {"structured_outputs": {"grammar": 'start: "z" T\nT: /b/ & /c/'}},
            "structured_outputs",
            "permits no response",
        ),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "structured_outputs", "remove ignore_eos"),
        ({"structured_outputs": {"regex": "a"}, "response_format": FORMAT}, "response_format", "remove one of them"),
    ],
)
def test_invalid_formats_are_refused(
    api: Any, names: list[str], fields: Any, param: str | None, sentence: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr(constraint_compiler, "MOST_SECONDS", 1.0 if sentence is SLOW else 60.0)
    monkeypatch.setattr(constraint_compiler, "MOST_STEP_SECONDS", 0.01 if sentence == "for one token" else 0.5)
    with pytest.raises(openai.BadRequestError) as caught:
        api.completions.create(model=names[0], prompt="a", extra_body=fields)
    assert caught.value.body["param"] == param and sentence in caught.value.body["message"]
