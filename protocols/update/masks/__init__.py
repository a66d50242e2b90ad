"""Masks in few bytes: each flag is predicted from values that both sides hold."""
