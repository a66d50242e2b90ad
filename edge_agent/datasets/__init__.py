"""Data sets: one file for each format, and `sources.load`, which picks the format by `data.source`.

Every format gives a `Dataset`. `formats` is the registry: a new format takes one file and one line there.
`train_test_split` decides which samples a device tests and validates on. Bringing samples into a model's
shape belongs to `edge_agent.training.device_data`.
"""
