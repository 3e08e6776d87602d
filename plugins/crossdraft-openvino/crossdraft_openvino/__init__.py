"""Passes of transformers models on a CPU, computed by OpenVINO; only with ``CROSSDRAFT_OPENVINO=1``."""

import os

from crossdraft import hookimpl


@hookimpl
def crossdraft_register_preparations(register):
    state = "on" if os.environ.get("CROSSDRAFT_OPENVINO") == "1" else "off without CROSSDRAFT_OPENVINO=1"
    register("openvino", f"{__name__}.slots:OpenVINOSlots", summary=f"passes on a CPU, computed by OpenVINO ({state})")
