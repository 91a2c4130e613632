"""What goes into a build and is not in the checkout: where it is found, and how
it gets to this machine.
"""
