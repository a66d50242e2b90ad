"""What a run keeps on disk while it goes: one SQLite file in the run's folder, and who may write to it.

It is written so that a step costs what it changed. The layout has a version, and older stores are brought up;
a folder has one writer at a time. What the stored values mean is decided by whoever stores them: the engine,
the method, the run.
"""
