"""What links carry and when: presets, traces, a radio cell; and real traffic behind emulated ones."""
