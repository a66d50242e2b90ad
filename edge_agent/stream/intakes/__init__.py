"""Intakes: the ways by which samples come into a device's store. Each intake is one file."""
