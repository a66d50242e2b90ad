"""Intakes bring samples into a device's store. Each intake is one file."""
