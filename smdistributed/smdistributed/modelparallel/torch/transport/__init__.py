"""Messages between ranks: connections, what is read from them, and values taken
apart to be sent.
"""
