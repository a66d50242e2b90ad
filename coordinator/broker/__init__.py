"""The embedded broker: started as a child process, with passwords and rules for each device."""
