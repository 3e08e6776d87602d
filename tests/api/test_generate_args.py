"""A keyword that `generate` does not have: the message names the place where it belongs."""

from typing import Any

import pytest
from tiny_models import save_model

from crossdraft import generate, load_model, stream
from crossdraft.framework.errors import UsageError


@pytest.mark.parametrize("call", [generate, stream])
@pytest.mark.parametrize(
    "arguments, sentence",
    [
        ({"gamma": 3}, 'it is an option of the drafter: drafter={"name": "prompt-lookup", "gamma": 3}'),
        ({"drafter": {"name": "draft-model", "model": "x"}, "gamma": 3}, 'drafter={"name": "draft-model", "gamma": 3}'),
        ({"drafter": "none", "gamma": 3}, "has no argument 'gamma'; its arguments are model, inputs"),
        ({"max_new_token": 3}, "did you mean 'max_new_tokens'?"),
        ({"drafter": "nothing", "gamma": 3}, "has no argument 'gamma'; its arguments are"),
    ],
    ids=str,
)
def test_unexpected_arguments(call: Any, arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(TypeError) as caught:
        call("no-such-model", "w5", **arguments)
    assert isinstance(caught.value, UsageError) and sentence in str(caught.value)
    assert str(caught.value).startswith(f"{call.__name__}() has no argument")


def test_empty_text_is_refused_with_and_without_chat_template(tmp_path: Any) -> None:
    """The endpoint does the same."""
    target = load_model(save_model(tmp_path / "target"))
    for chat in (None, True, False):
        for inputs, i in (("", 0), (["w5", ""], 1)):
            with pytest.raises(UsageError, match=rf"inputs\[{i}\] is an empty text"):
                generate(target, inputs, chat=chat)
