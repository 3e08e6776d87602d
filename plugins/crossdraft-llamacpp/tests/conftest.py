"""Import path of the helpers of these tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
