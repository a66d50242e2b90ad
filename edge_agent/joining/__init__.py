"""How this device joined its fleets: its keys and certificates, and where each fleet's broker is."""
