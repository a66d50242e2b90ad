"""What a run keeps on disk, written so that a step costs what it changed; versions, and one writer at a
time.
"""
