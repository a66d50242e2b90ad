"""FedPURIN (Xie, He, Shi; seed 003): devices send the weights that matter most to their loss, nothing
else.
"""
