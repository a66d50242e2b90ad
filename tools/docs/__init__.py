"""What makes the documentation: pages that are generated from the code, and pictures from real runs."""
