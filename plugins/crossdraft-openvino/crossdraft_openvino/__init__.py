"""Passes of transformers models on a CPU, computed by OpenVINO; not with ``CROSSDRAFT_OPENVINO=0``."""

import os

from crossdraft import hookimpl


@hookimpl
def crossdraft_register_preparations(register):
    state = " (off: CROSSDRAFT_OPENVINO=0)" if os.environ.get("CROSSDRAFT_OPENVINO") == "0" else ""
    register("openvino", f"{__name__}.slots:OpenVINOSlots", summary=f"passes on a CPU, computed by OpenVINO{state}")
