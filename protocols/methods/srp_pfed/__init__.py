"""SRP-pFed (Hu et al.; seed 000): small weights are shared, at a rate that a reinforced random walk draws."""
