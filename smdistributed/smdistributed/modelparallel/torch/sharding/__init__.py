"""Sharded data parallelism: each rank keeps a part of each parameter, and
gathers a block of the model to run it.
"""
