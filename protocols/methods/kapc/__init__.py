"""KAPC and BLS (Zhi et al., IEEE TMC 2024): each layer is coached by a mix of other devices' layers."""
