"""What a step trains: gradients of replicas, precision, optimizers, recomputed activations; and what is saved."""
