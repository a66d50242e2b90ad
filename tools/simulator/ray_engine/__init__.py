"""Past one machine: devices work in Ray actors on a cluster's nodes; Ray is imported here alone."""
