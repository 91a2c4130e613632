"""The partition of the model, by hand or by a trace, and stand-ins for the modules of other
partitions.
"""
