"""What the fleet's model is: one flat vector and what every entry of it means; networks by name, loss terms,
what a training step costs. Nothing here knows what is sent.
"""
