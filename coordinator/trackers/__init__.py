"""Experiment trackers (TensorBoard, MLflow, user-defined): what they receive of a run, without delaying
it.
"""
