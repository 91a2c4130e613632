"""A step as a pipeline of microbatches. `runtime` puts it together."""
