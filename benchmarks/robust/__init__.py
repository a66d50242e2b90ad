"""What hostile devices do to a model, with each rule of `round.robust`."""
