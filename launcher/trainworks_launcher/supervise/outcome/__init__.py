"""How a job ended, and what the last words of a program say of it. Pure."""
