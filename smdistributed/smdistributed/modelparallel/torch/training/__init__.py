"""Training: gradients of replicas, precision, optimizers, recomputed activations, checkpoints."""
