"""Which module is on which partition, by hand or by a trace, and what stands
for the modules of other partitions.
"""
