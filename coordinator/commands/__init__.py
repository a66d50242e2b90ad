"""Commands for a run: what its owner asks of it, kept in a control file until the run takes it up."""
