"""What both sides must agree on."""

import os

# ONNX Runtime reports to its makers unless told otherwise before its first import: see its Privacy.md.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
