"""Try every type of model of transformers with OpenVINO, each in a process of its own, and write ``tried.txt``.

    python plugins/crossdraft-openvino/tests/try_classes.py [TYPE ...]

A class is listed if its tiny model equals transformers: ragged chains, trees in two pieces, hidden states. Conversion
ends the process of some. Without TYPE all are tried (minutes); with TYPE the other classes stay as they are.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import crossdraft_openvino

LIST = Path(crossdraft_openvino.__file__).with_name("tried.txt")
sys.path[:0] = [str(Path(__file__).parents[3] / "tests" / folder) for folder in ("support", "contract")]
#: Seconds for one type.
LIMIT = 180


def attempt(model_type: str, result: Connection) -> None:
    """Send the name of the class and `SAME`, or the reason why not."""
    from architecture_checks import disagreement
    from architecture_walk import TOLERANCE, class_name, tiny
    from crossdraft_openvino.slots import OpenVINOLM
    from transformers import CONFIG_MAPPING

    name = class_name(model_type)
    try:
        config = CONFIG_MAPPING[model_type]
        windows = {key: 64 for key in ("sliding_window", "attention_chunk_size") if hasattr(config(), key)}
        off = disagreement(tiny(config, **windows), lm_class=OpenVINOLM)
        result.send((name, "exact" if off < TOLERANCE else f"{off:.2g} standard deviations off"))
    except Exception as error:
        result.send((name, f"{type(error).__name__}: {str(error).partition(chr(10))[0][:150]}"))


def main(types: list[str]) -> None:
    from architecture_walk import NOT_MADE, TYPES, class_name

    from crossdraft.framework.lm.architectures import EXACT

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["architecture_walk", "crossdraft_openvino.slots"])
    exact, reasons = set(LIST.read_text(encoding="utf-8").split() if types else ()), Counter[str]()
    for model_type in types or TYPES:
        if model_type in NOT_MADE or class_name(model_type) not in EXACT:
            continue
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=attempt, args=(model_type, theirs))
        process.start()
        theirs.close()
        process.join(LIMIT)
        process.kill()
        try:
            name, outcome = ours.recv()
        except EOFError:
            name, outcome = class_name(model_type), f"ends the process ({process.exitcode})"
        print(model_type, name, outcome, flush=True)
        reasons[outcome] += 1
        exact = exact | {name} if outcome == "exact" else exact - {name}
    print(*(f"{count:4} {reason}" for reason, count in reasons.most_common()), sep="\n")
    LIST.write_text("".join(f"{name}\n" for name in sorted(exact)), encoding="utf-8")


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        os.environ["CROSSDRAFT_CACHE"] = folder
        main(sys.argv[1:])
