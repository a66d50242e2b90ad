"""What the coordinator proposes, told: what ratios and encodings took and brought, and why these."""
