"""Makes the tasks for devices when they are sent, as differences to the model that a device has."""
