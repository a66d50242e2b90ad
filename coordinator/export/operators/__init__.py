"""Each torch operation as standard ONNX operators, one file a kind."""
