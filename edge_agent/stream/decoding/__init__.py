"""Decoding images, sounds, Parquet and .npz files in a process of its own, which hostile files may harm."""
