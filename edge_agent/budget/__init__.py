"""What a round may cost and will cost, which ratio fits, and the owner's policy."""
