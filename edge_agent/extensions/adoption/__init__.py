"""Chooses and deploys a device's model: records and files of models, the adoption rules, the extension."""
