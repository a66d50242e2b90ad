"""The base class of methods and its families: averaging, sub-models, personal targets."""
