"""DC-PFL (Liu, Huang, He, Cao; seed 004): one group of devices that splits while training."""
