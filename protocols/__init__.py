"""What both sides share: methods, models, encodings, the wire protocol and settings."""

import os

# ONNX Runtime reports usage to its makers unless this is set before its first import (its Privacy.md).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
