"""What a step trains: gradients of replicas, precision, optimizers, recomputed activations.

And what is saved.
"""
