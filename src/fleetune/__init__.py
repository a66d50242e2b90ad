"""Fleetune: on-device training for fleets of edge devices.

The folders beside this file are links to those at the top of the repository, which is where to read and edit
them; an installed wheel has them in here.
"""
