"""Passes of transformers models on a CPU, computed by OpenVINO; only with ``CROSSDRAFT_OPENVINO=1``."""

from crossdraft import hookimpl


@hookimpl
def crossdraft_register_preparations(register):
    register("openvino", f"{__name__}.slots:OpenVINOSlots", summary="passes on a CPU, computed by OpenVINO")
