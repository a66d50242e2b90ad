"""SRP-pFed (Hu et al.): small weights are shared, at a rate drawn by a reinforced random walk."""
