"""Measurements of ourselves: coordinator, slow links, trainers, and how good forecasts are."""
