"""Rules that combine the updates of a round, independently of the method (`round.robust`)."""
