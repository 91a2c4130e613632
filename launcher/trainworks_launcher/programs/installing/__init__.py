"""The parts of ``install.py``: read the requirements, adapt them to the image, install with uv."""
