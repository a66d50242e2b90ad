"""`edge-sim bench wire`: what encodings cost and lose, and how many bytes a fleet sends until it is good."""
