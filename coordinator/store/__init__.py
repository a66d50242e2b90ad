"""A run's durable state: one SQLite file in the run's folder, with one writer at a time.

A step writes only what it changed. The layout has a version, and older stores are upgraded. The modules that
store a value decide its meaning: the engine, the method, the run.
"""
