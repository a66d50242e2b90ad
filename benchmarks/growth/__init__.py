"""How the cost of a simulated round, and of summing updates, grows with fleets and models."""
