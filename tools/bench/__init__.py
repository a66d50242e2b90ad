"""Measurements that users run: the load on a coordinator, and one transfer over a slow link."""
