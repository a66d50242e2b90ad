"""Rules that write each torch operation in standard ONNX operators; one file for each kind of operation."""
