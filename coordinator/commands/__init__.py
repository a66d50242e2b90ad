"""Commands for a run: requests of its owner, kept in a control file until the coordinator applies them."""
