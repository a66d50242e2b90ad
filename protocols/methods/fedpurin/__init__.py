"""FedPURIN (Xie, He, Shi): devices send the weights that matter most to their loss, nothing else."""
