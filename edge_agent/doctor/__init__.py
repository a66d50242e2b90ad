"""edge-agent doctor: is this device fit to join a fleet?"""
