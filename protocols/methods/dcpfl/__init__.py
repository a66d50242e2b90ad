"""DC-PFL (Liu, Huang, He, Cao): one group of devices that splits during training."""
