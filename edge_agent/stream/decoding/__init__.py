"""Decoding of images and .npz files in a child process, which hostile files may crash."""
