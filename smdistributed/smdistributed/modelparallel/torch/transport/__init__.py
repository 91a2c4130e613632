"""Messages between ranks: connections, the inbox, failures, and nested values that are sent."""
