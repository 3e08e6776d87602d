"""Passes of transformers models on a CPU, computed by OpenVINO; not with ``CROSSDRAFT_OPENVINO=0``."""

import os
import sys

from crossdraft import hookimpl
from crossdraft.runs import sleep_between_products

# Without this package openvino sends no statistics of its use. It would send them at each import and conversion from
# processes forked beside PyTorch's threads, which may end or block this one.
sys.modules.setdefault("openvino_telemetry", None)  # type: ignore[arg-type]
if os.environ.get("CROSSDRAFT_OPENVINO") != "0":
    sleep_between_products()  # or PyTorch's threads, spinning, take processors from those of OpenVINO


@hookimpl
def crossdraft_register_preparations(register):
    state = " (off: CROSSDRAFT_OPENVINO=0)" if os.environ.get("CROSSDRAFT_OPENVINO") == "0" else ""
    register("openvino", f"{__name__}.slots:OpenVINOSlots", summary=f"passes on a CPU, computed by OpenVINO{state}")
