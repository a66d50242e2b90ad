"""SRP-pFed (Hu et al.): small weights are shared, at a rate that a reinforced random walk draws."""
