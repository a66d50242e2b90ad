"""Experiment trackers (TensorBoard, MLflow, user-defined): pass them a run's figures without delaying the
run.
"""
