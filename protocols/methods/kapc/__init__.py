"""KAPC and BLS (Zhi et al., IEEE TMC 2024): each layer coached by a mix of the others'."""
