"""Where samples come from: one file for each format, and `sources.load`, which picks it by `data.source`.

Whatever its format, a source gives a `Dataset`. `train_test_split` decides which of its samples a device tests
and validates on. Bringing samples into a model's shape belongs to `edge_agent.training.device_data`.
"""
