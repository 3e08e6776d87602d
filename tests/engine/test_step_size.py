"""Size of a step: the files and functions of crossdraft that one `Decoder.step` enters."""

from collections.abc import Callable
from typing import Any

from entered_functions import entered_functions

from crossdraft.framework import plugins

#: Most files, and most functions, of a step of a draft model and the verifier `token` at temperature 1 on a CPU.
FILES, FUNCTIONS = 18, 90


def test_step_enters_few_files_and_functions(tiny_model: Callable, decoder: Callable) -> None:
    drafter, verifier = plugins.get("drafters", "draft-model"), plugins.get("verifiers", "token")
    target, small = (tiny_model("llama", noise=noise, copy="step") for noise in (0.0, 0.3))
    options: dict[str, Any] = {"model": "small", "gamma": 3}
    loop = decoder(
        target,
        drafter,
        options,
        verifier,
        batch_size=2,
        drafting=small,
        temperature=1.0,
        max_new_tokens=40,
        validate="sampled",
    )
    for row in range(2):
        loop.start(row, [5, 9, 3, 7], row, row)
    for _ in range(10):  # the first 8 steps validate values
        loop.step()
    with entered_functions() as entered:
        loop.step()
    files = {file for file, _ in entered}
    assert FILES - 3 <= len(files) <= FILES, sorted(files)
    assert FUNCTIONS - 15 <= len(entered) <= FUNCTIONS, (len(entered), sorted(entered))
