"""FedPURIN (Xie, He, Shi): devices send only the weights that matter most to their loss."""
