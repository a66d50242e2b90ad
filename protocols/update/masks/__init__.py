"""Masks in few bytes: each boolean is predicted from values that both sides hold."""
