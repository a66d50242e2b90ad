"""Whether proposed ratios win over every fixed one, fleet by fleet and method by method."""
