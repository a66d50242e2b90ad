"""Turns a torch module into graphs that train without torch, and compares them with torch (extra
`export`).
"""
