"""What simulated boards draw, and what becomes of their batteries."""
