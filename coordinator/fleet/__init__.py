"""Who belongs to a fleet: its certificate authority, invitations, and the registry of its devices."""
