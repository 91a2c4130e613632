"""The processes of one host: how they start, what they print, how they end."""
