"""Masks in few bytes: which entries are meant, predicted from what both sides hold."""
