"""Decoding of images, sounds, Parquet and .npz files in a child process, which hostile files may crash."""
