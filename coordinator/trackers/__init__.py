"""Experiment trackers (TensorBoard, MLflow, a user's own): what they are told of a run, never in its way"""
