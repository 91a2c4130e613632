"""Files that say which Python packages an image is extended with."""
