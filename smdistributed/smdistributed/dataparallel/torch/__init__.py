"""The library for PyTorch."""
